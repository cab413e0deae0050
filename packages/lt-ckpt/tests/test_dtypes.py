import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.dtypes import cast

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bf16_value(bits):
    return float(np.array([int(bits) << 16], "<u4").view("<f4")[0])


def run(values, source, target):
    return cast(np.asarray(values).view(np.uint8), source, target)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_f32_to_bf16_equals_torch_for_any_bits(patterns):
    values = np.array(patterns, "<u4").view("<f4")
    got = run(values, "F32", "BF16").view("<u2")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view("<u2")
    number = ~np.isnan(values)
    assert (got[number] == expected[number]).all()
    assert all(np.isnan(bf16_value(bits)) for bits in got[~number])


def test_every_bf16_goes_up_and_comes_back():
    bits = np.arange(2**16, dtype="<u2")
    for wide in ("F32", "F64"):
        back = run(run(bits, "BF16", wide), wide, "BF16").view("<u2")
        number = ~np.isnan((bits.astype("<u4") << 16).view("<f4"))
        assert (back[number] == bits[number]).all()
        assert number.sum() == 2**16 - 2 * 127


@pytest.mark.parametrize("sign", [1, -1])
def test_f64_beside_every_tie_of_bf16(sign):
    """Numbers too small for a normal float32 too, where float32 alone would lose what decides."""
    low = np.arange(0x7F80, dtype="<u4")
    value, above = (low << 16).view("<f4").astype("<f8"), ((low + 1) << 16).view("<f4").astype("<f8")
    above[-1] = 2.0**128
    tie, little = (value + above) / 2, (above - value) * 2.0**-30
    for given_, expected in ((tie - little, low), (tie, low + (low & 1)), (tie + little, low + 1)):
        got = run(sign * given_, "F64", "BF16").view("<u2")
        assert (got == expected + (0x8000 if sign < 0 else 0)).all()


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_casts_equal_torch(source, target):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    start = values.to(torch.float32).to(TORCH[source])  # through float32, so that torch too rounds only once
    data = start.view(torch.uint8).numpy()
    assert cast(data, source, target).tobytes() == start.to(TORCH[target]).view(torch.uint8).numpy().tobytes()


def test_only_floats_are_cast():
    data = np.zeros(8, np.uint8)
    assert cast(data, "I64", "I64") is data
    for source, target in (("I64", "F32"), ("F32", "I32"), ("F8_E4M3", "F32")):
        with pytest.raises(CheckpointError, match="only F64, F32, F16, BF16 are cast"):
            cast(data, source, target)
