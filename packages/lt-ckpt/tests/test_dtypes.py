from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.dtypes import ITEM_BYTES, cast, item_bytes, parse_float_dtype, torch_dtype_name

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


def test_ties_go_to_even():
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF], "<u4").view("<f4")
    assert run(values, "F32", "BF16").view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80]


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_f64_to_bf16_rounds_once(value):
    got = int(run(np.array([value]), "F64", "BF16").view("<u2")[0])
    near = [bits for bits in (got - 1, got, got + 1) if 0 <= bits < 2**16 and np.isfinite(bf16_value(bits))]
    if not np.isfinite(bf16_value(got)):
        assert abs(Fraction(value)) >= Fraction(bf16_value(0x7F7F)) + (Fraction(2) ** (127 - 8))
        return
    errors = {bits: abs(Fraction(bf16_value(bits)) - Fraction(value)) for bits in near}
    best = min(errors.values())
    assert errors[got] == best
    if sum(error == best for error in errors.values()) > 1:
        assert got % 2 == 0


def test_f64_just_above_a_tie_is_not_rounded_twice():
    value = 1 + 2.0**-8 + 2.0**-40  # float32 would drop the last part and leave an exact tie
    assert bf16_value(run(np.array([value]), "F64", "BF16").view("<u2")[0]) == 1 + 2.0**-7


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


def test_names():
    assert [parse_float_dtype(name) for name in ("bf16", "BF16", "bfloat16", "fp32", "float16", "f64")] == [
        "BF16",
        "BF16",
        "BF16",
        "F32",
        "F16",
        "F64",
    ]
    assert torch_dtype_name("BF16") == "bfloat16"
    assert item_bytes("I16") == 2
    for call in (lambda: parse_float_dtype("int8"), lambda: item_bytes("F4"), lambda: torch_dtype_name("I64")):
        with pytest.raises(CheckpointError):
            call()
    assert set(ITEM_BYTES.values()) == {1, 2, 4, 8}
