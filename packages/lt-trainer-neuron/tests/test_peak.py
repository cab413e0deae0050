"""The FLOP/s that MFU of the cpu backend is a share of."""

import pytest
import torch

from lt_trainer_neuron.cpu.backend import _measure_peak_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_product_is_measured_in_the_dtype_that_is_named(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    dtypes, real = set(), torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtypes.add((a.dtype, b.dtype))
        return real(a, b)

    monkeypatch.setattr(torch, "mm", watched)
    peak, source = _measure_peak_flops(dtype, 0.001)
    assert peak > 0
    assert dtypes == {(dtype, dtype)}
    assert str(dtype).removeprefix("torch.") in source
