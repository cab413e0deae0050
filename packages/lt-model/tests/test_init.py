"""Initial weights: bit-equal for any slice, and equal to plain Python integer arithmetic."""

import hashlib
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lt_model import Decoder, ModelConfig, ParamSpec, init_model, init_slice, param_specs, preset  # noqa: E402

WORD = 2**64


def _parameter(name="model.layers.0.mlp.up_proj.weight", shape=(7, 5), std=0.02):
    return ParamSpec(name, shape, 0, "matrix", tp_dim=0, init=std)


def _splitmix64(state):
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def _element(seed, name, index, std):
    """The value of one element by Python's unbounded integers; the fp32 rounding through struct."""
    key = int.from_bytes(hashlib.blake2b(struct.pack("<q", seed) + name.encode(), digest_size=8).digest(), "little")
    words = [_splitmix64((key + (2 * index + k) * 0x9E3779B97F4A7C15) % WORD) for k in (1, 2)]
    total = sum(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48))
    value = (total - 262140) * (std / math.sqrt(8 * (2**32 - 1) / 12))
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_splitmix64_is_the_published_one():
    # First outputs for seed 1234567 of the reference implementation (prng.di.unimi.it/splitmix64.c).
    states = [(1234567 + k * 0x9E3779B97F4A7C15) % WORD for k in (1, 2, 3)]
    assert [_splitmix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    name=st.text(max_size=20),
    row=st.integers(0, 2**33),
    column=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_any_element_equals_integer_arithmetic(seed, name, row, column):
    parameter = _parameter(name, shape=(2**33 + 1, 5))  # beyond 32-bit indices
    value = init_slice(parameter, seed, offset=(row, column), shape=(1, 1))
    assert value.item() == _element(seed, name, row * 5 + column, 0.02)


@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_slice_equals_that_slice_of_the_whole(data, shape):
    parameter = _parameter(shape=tuple(shape))
    whole = init_slice(parameter, 3)
    offset = [data.draw(st.integers(0, n)) for n in shape]
    extent = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]
    part = init_slice(parameter, 3, offset=offset, shape=extent)
    window = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
    assert part.shape == whole[window].shape
    assert torch.equal(part, whole[window])


def test_chunks_do_not_show(monkeypatch):
    parameter = _parameter(shape=(33, 17))
    whole = init_slice(parameter, 0)
    for chunk in (1, 16, 17, 18, 40, 10**6):
        monkeypatch.setattr("lt_model.init._CPU_CHUNK_NUMEL", chunk)
        assert torch.equal(init_slice(parameter, 0), whole)


def test_values_are_pinned():
    """A change of these is a change of every model trained from a seed: never by accident."""
    found = init_slice(_parameter(), 42, shape=(1, 5)).flatten().tolist()
    assert found == [_element(42, "model.layers.0.mlp.up_proj.weight", i, 0.02) for i in range(5)]
    assert found == PINNED


PINNED = [0.017746616154909134, 0.033811673521995544, -0.018353980034589767, 0.011699886992573738, -0.01993275247514248]


def test_moments_and_independence():
    config = preset("tiny-2m")
    q, up = (
        p
        for p in param_specs(config)
        if p.name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight")
    )
    values = init_slice(up, 0, dtype=torch.float64).flatten()
    n = values.numel()
    normal = values / 0.02
    assert abs(normal.mean().item()) < 4 / math.sqrt(n)
    assert abs(normal.square().mean().item() - 1) < 4 * math.sqrt(1.85 / n)
    assert normal.pow(4).mean().item() == pytest.approx(3 - 1.2 / 8, abs=0.05)  # kurtosis of eight uniform numbers
    assert abs((normal[1:] * normal[:-1]).mean().item()) < 4 / math.sqrt(n)
    for other in (init_slice(up, 1), init_slice(q, 0)):
        m = min(n, other.numel())
        assert abs((other.flatten()[:m].double() / 0.02 * normal[:m]).mean().item()) < 4 / math.sqrt(m)


def test_dtypes_are_roundings_of_the_same_values():
    wide = init_slice(_parameter(), 0, dtype=torch.float64)
    single = init_slice(_parameter(), 0)
    assert single.dtype == torch.float32
    assert torch.equal(wide.float(), single)
    assert not torch.equal(single.double(), wide)
    assert torch.equal(init_slice(_parameter(), 0, dtype=torch.bfloat16), single.bfloat16())


def test_init_model_fills_every_parameter_in_place(config):
    model = Decoder(config)
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    init_model(model, seed=5)
    found = dict(model.named_parameters())
    for parameter in param_specs(config):
        assert torch.equal(found[parameter.name], init_slice(parameter, 5))
        assert found[parameter.name].data_ptr() == pointers[parameter.name]
        assert found[parameter.name].requires_grad
    assert torch.equal(model.model.norm.weight, torch.ones(config.hidden_size))


def test_first_loss_is_that_of_a_uniform_guess():
    config = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=128, n_heads=4, n_kv_heads=2, n_layers=2)
    model = Decoder(config)
    init_model(model, 0)
    ids = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(0))
    loss = model(ids[:, :-1], labels_BT=ids[:, 1:]).item() / 128
    assert loss == pytest.approx(math.log(512), abs=0.1)


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    parameter = _parameter(shape=(1000, 333))
    assert torch.equal(init_slice(parameter, 9, device="cuda").cpu(), init_slice(parameter, 9))
