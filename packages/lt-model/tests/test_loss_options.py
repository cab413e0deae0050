"""z-loss and the padded vocabulary: exact values and gradients, and the memory that the loss takes."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from plain_loss import cross_entropy_sum, linear_loss  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from lt_model import IGNORE_INDEX, ModelConfig, ModelError, linear_loss_parts, param_specs  # noqa: E402
from lt_model.decoder import Decoder  # noqa: E402
from lt_model.loss import vocab_parallel_loss_parts, vocab_parallel_softmax  # noqa: E402

Z = 0.37  # large, so that a wrong factor shows


def _inputs(n_tokens=23, width=6, vocab=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_tokens, width, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, vocab, (n_tokens,), generator=generator)
    labels[::4] = IGNORE_INDEX
    return hidden, weight, labels


def _by_formula(hidden, weight, labels, z_loss):
    """Written out, row by row, without any of our code."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(hidden @ weight.T, labels.tolist(), strict=True):
        if label != IGNORE_INDEX:
            normalizer = row.exp().sum().log()
            total = total + normalizer - row[label] + z_loss * normalizer**2
    return total


def _close(found, expected, tolerance):
    """Norm of the difference over the norm, per tensor."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert ((one - other).norm() / other.norm()).item() <= tolerance


@pytest.mark.parametrize("rows", [1, 5, 256])
def test_z_loss_and_its_gradients_follow_the_formula(monkeypatch, rows):
    monkeypatch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: rows)
    hidden, weight, labels = _inputs()
    expected = _by_formula(hidden, weight, labels, Z)
    gradients = torch.autograd.grad(expected * 3.0, (hidden, weight))
    for loss in (
        linear_loss(hidden, weight, labels, z_loss=Z),
        cross_entropy_sum(hidden @ weight.T, labels, z_loss=Z),
    ):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        _close(torch.autograd.grad(loss * 3.0, (hidden, weight)), gradients, 1e-12)


@given(
    cuts=st.sets(st.integers(1, 10), max_size=3),
    rows=st.integers(1, 9),
    pad_to=st.integers(1, 8),
    z_loss=st.sampled_from([0.0, Z]),
)
@settings(max_examples=60, deadline=None)
def test_the_pure_form_the_chunked_one_and_one_split_over_ranks_are_the_same(cuts, rows, pad_to, z_loss):
    """Value and gradients in float64; ranks are simulated by one weight in parts, whose terms are combined at once."""
    hidden, weight, labels = _inputs()
    expected = cross_entropy_sum(hidden @ weight.T, labels, z_loss=z_loss)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    pure = vocab_parallel_loss_parts(hidden @ weight.T, labels, z_loss=z_loss)
    terms = vocab_parallel_softmax(hidden @ weight.T, labels)
    written_out = terms.logits_grad(z_loss)
    torch.testing.assert_close(pure.total, expected, rtol=1e-12, atol=0)
    assert torch.equal(pure.total, pure.cross_entropy + pure.z_loss)
    _close(torch.autograd.grad(pure.total, (hidden, weight)), gradients, 1e-12)
    _close((written_out @ weight, written_out.T @ hidden), gradients, 1e-12)
    bounds = list(pairwise([0, *sorted(cuts), 11]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: rows)
        patch.setattr("lt_model.loss._CPU_PART_TOKENS", 2)
        found = _split_loss(hidden, weight, labels, bounds, z_loss=z_loss, pad_to_multiple_of=pad_to)
    for parts, _, _ in found:
        torch.testing.assert_close(parts, (pure.total, pure.cross_entropy, pure.z_loss), rtol=1e-12, atol=1e-12)
    hidden_grad = sum(grad for _, grad, _ in found)
    _close((hidden_grad, torch.cat([grad for _, _, grad in found])), gradients, 1e-12)


def _split_loss(hidden, weight, labels, bounds, **options):
    """Return loss and gradients of each part of the weight, the parts being ranks in threads."""
    barrier, terms = threading.Barrier(len(bounds), timeout=60), {}

    def rank(index):
        def all_reduce_softmax(top, exp_sum, at_label):
            terms[index] = top, exp_sum, at_label
            barrier.wait()
            tops, sums, at_labels = (torch.stack(column) for column in zip(*terms.values(), strict=True))
            barrier.wait()
            top = tops.amax(dim=0)
            return top, ((tops - top).exp() * sums).sum(dim=0), at_labels.sum(dim=0)

        first, end = bounds[index]
        own = [hidden.detach().requires_grad_(), weight.detach()[first:end].clone().requires_grad_()]
        parts = linear_loss_parts(
            *own, labels, vocab_start_index=first, all_reduce_softmax=all_reduce_softmax, **options
        )
        return tuple(part.detach() for part in parts), *torch.autograd.grad(parts.total, own)

    with ThreadPoolExecutor(len(bounds)) as pool:
        return list(pool.map(rank, range(len(bounds))))


def test_parts_add_up_and_only_the_total_is_differentiable():
    hidden, weight, labels = _inputs()
    parts = linear_loss_parts(hidden, weight, labels, z_loss=Z)
    assert torch.equal(parts.cross_entropy, linear_loss(hidden, weight, labels).detach())
    torch.testing.assert_close(parts.cross_entropy, _by_formula(hidden, weight, labels, 0).detach(), rtol=1e-12, atol=0)
    assert torch.equal(parts.total.detach(), parts.cross_entropy + parts.z_loss)
    assert parts.z_loss.item() > 1
    assert [part.requires_grad for part in parts] == [True, False, False]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 10_000])
def test_chunks_of_any_size_give_the_same_gradients(chunk_tokens):
    hidden, weight, labels = _inputs()
    whole = linear_loss_parts(hidden, weight, labels, z_loss=Z)
    expected = torch.autograd.grad(whole.total, (hidden, weight))
    parts = linear_loss_parts(hidden, weight, labels, z_loss=Z, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.autograd.grad(parts.total, (hidden, weight)), expected, rtol=1e-11, atol=1e-13)


def test_a_negative_chunk_is_refused():
    with pytest.raises(ModelError, match="chunk_tokens = -1: must be at least 0"):
        linear_loss_parts(*_inputs(), chunk_tokens=-1)


def test_z_loss_of_the_model_reaches_every_parameter(config, make_model):
    ids = torch.arange(20).view(2, 10) % config.vocab_size
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    model = make_model(config)
    expected = cross_entropy_sum(model(ids), labels, z_loss=Z)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(expected, weights)
    parts = model(ids, labels_BT=labels, z_loss=Z, return_parts=True)
    assert torch.equal(parts.total, model(ids, labels_BT=labels, z_loss=Z))
    torch.testing.assert_close(parts.total, expected, rtol=1e-12, atol=0)
    assert torch.equal(parts.cross_entropy, model(ids, labels_BT=labels).detach())
    for name, one, other in zip(names, torch.autograd.grad(parts.total, weights), gradients, strict=True):
        assert ((one - other).norm() / other.norm()).item() <= 1e-10, name


@given(vocab=st.integers(1, 70), pad_to=st.integers(1, 64), rows=st.integers(1, 9), z_loss=st.sampled_from([0.0, Z]))
@settings(max_examples=60, deadline=None)
def test_padding_changes_neither_loss_nor_gradients(vocab, pad_to, rows, z_loss):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: rows)
        hidden, weight, labels = _inputs(n_tokens=13, vocab=vocab, seed=vocab)
        plain = linear_loss(hidden, weight, labels, z_loss=z_loss)
        padded = linear_loss(hidden, weight, labels, z_loss=z_loss, pad_to_multiple_of=pad_to)
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad(plain, (hidden, weight))
        torch.testing.assert_close(torch.autograd.grad(padded, (hidden, weight)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_a_padded_weight_get_neither_probability_nor_gradient(dtype):
    """Whatever stands in the padding, and although its logits are the largest."""
    hidden, weight, labels = (tensor.detach() for tensor in _inputs())
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    expected = linear_loss(hidden, weight, labels, z_loss=Z)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    wide = torch.cat([weight.detach(), torch.full((5, 6), 50.0, dtype=dtype)]).requires_grad_()
    loss = linear_loss(hidden, wide, labels, z_loss=Z, vocab_size=11, pad_to_multiple_of=8)
    found_hidden, found_wide = torch.autograd.grad(loss, (hidden, wide))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=1e-6 if dtype == torch.bfloat16 else 1e-12, atol=0)
    _close((found_hidden, found_wide[:11]), gradients, tolerance)
    assert not found_wide[11:].any()


def test_padding_is_done_in_the_matrix_products(monkeypatch):
    """The products see the padded width; the model's parameters and their table see the true one."""
    config = ModelConfig(vocab_size=101, hidden_size=48, intermediate_size=72, n_heads=4, n_kv_heads=4, n_layers=1)
    seen = []
    real = F.pad
    monkeypatch.setattr("lt_model.loss.F.pad", lambda *a: seen.append(real(*a).shape) or real(*a))
    torch.manual_seed(0)
    model = Decoder(config, pad_vocab_to_multiple_of=64).double()
    plain = Decoder(config).double()
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(12)[None]
    losses = [one(ids, labels_BT=ids) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    assert seen == [(128, 48)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    table = {parameter.name: parameter.shape for parameter in param_specs(config)}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == table
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ((one.grad - other.grad).norm() / other.grad.norm()).item() <= 1e-12, name


def test_options_out_of_range_are_refused(gqa_config):
    hidden, weight, labels = _inputs()
    for z_loss in (-1e-4, float("nan"), float("inf")):
        with pytest.raises(ModelError, match="z_loss = "):
            linear_loss(hidden, weight, labels, z_loss=z_loss)
    for vocab_size in (0, 12):
        with pytest.raises(ModelError, match="must be between 1 and the 11 columns"):
            linear_loss(hidden, weight, labels, vocab_size=vocab_size)
    with pytest.raises(ModelError, match="pad_to_multiple_of = 0"):
        linear_loss(hidden, weight, labels, pad_to_multiple_of=0)
    with pytest.raises(ModelError, match="pad_vocab_to_multiple_of = 0"):
        Decoder(gqa_config, pad_vocab_to_multiple_of=0)


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the most there ever were; every tensor passes here."""

    def __init__(self, *there):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in there)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, n_bytes):
        self.now -= n_bytes


def _loss_memory(loss, n_tokens, width, vocab, dtype):
    """Return the peak of bytes above inputs and results, in forward and backward; nothing is computed."""
    with FakeTensorMode():
        hidden = torch.empty(n_tokens, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=dtype, requires_grad=True)
        labels = torch.empty(n_tokens, dtype=torch.long)
        with _Live(hidden, weight, labels) as live:
            gradients = torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
        return live.peak - sum(gradient.untyped_storage().nbytes() for gradient in gradients)


def _plain(hidden, weight, labels):
    return cross_entropy_sum(hidden @ weight.T, labels)


def test_the_count_of_live_bytes_is_right():
    with FakeTensorMode(), _Live() as live:
        one = torch.empty(1000)
        two = one * 2
        del one
        three = two.view(10, 100) + 1
        del two, three
    assert (live.peak, live.now) == (8000, 0)


@pytest.mark.parametrize(
    ("n_tokens", "width", "dtype", "most"),
    [
        (4096, 512, torch.float32, 0.03),
        (4096, 4096, torch.float32, 0.04),
        (16384, 2048, torch.bfloat16, 0.10),  # the head's gradient is summed in fp32: V * D * 4 bytes
    ],
)
def test_the_loss_takes_a_tenth_of_the_plain_ones_memory(n_tokens, width, dtype, most):
    plain, chunked = (_loss_memory(loss, n_tokens, width, 128_256, dtype) for loss in (_plain, linear_loss))
    assert plain > 1.9 * n_tokens * 128_256 * 4  # else the plain way would not have been counted whole
    assert chunked <= most * plain


def test_without_gradients_only_a_chunk_is_held():
    with torch.no_grad(), FakeTensorMode():
        hidden, weight = torch.empty(4096, 256), torch.empty(128_256, 256)
        with _Live(hidden, weight) as live:
            linear_loss(hidden, weight, torch.empty(4096, dtype=torch.long))
    assert live.peak < 1.01 * 256 * 128_256 * 4


def test_a_backward_that_is_repeated_scales_afresh():
    """Where the graph is kept the saved gradients must not be scaled in place."""
    hidden, weight, labels = _inputs()
    expected = torch.autograd.grad(_by_formula(hidden, weight, labels, 0.0), (hidden, weight))
    loss = linear_loss(hidden, weight, labels)
    for factor in (3.0, 0.5, 1.0):
        keep = factor != 1.0
        found = torch.autograd.grad(loss * factor, (hidden, weight), retain_graph=keep)
        _close(found, [factor * gradient for gradient in expected], 1e-12)


@pytest.mark.gpu
def test_memory_on_the_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    peaks = []
    for loss in (_plain, linear_loss):
        hidden = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(128_256, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, 128_256, (16384,), device="cuda")
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss(hidden, weight, labels).backward()
        results = hidden.numel() * 2 + weight.numel() * 2
        peaks.append(torch.cuda.max_memory_allocated() - held - results)
        del hidden, weight, labels
        torch.cuda.empty_cache()
    assert peaks[1] <= 0.15 * peaks[0]
