"""What an engine decides from the device that torch reports, for devices that are not here."""

import datetime
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lt_trainer.engine import World
from lt_trainer_gpu import devices
from lt_trainer_gpu.devices import (
    Accelerator,
    DeviceError,
    accumulation_dtype,
    choose_device_type,
    compute_dtype,
)
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.peak_flops import peak_flops

CUDA, NEURON, MPS = (Accelerator(type=kind, count=count) for kind, count in (("cuda", 8), ("neuron", 64), ("mps", 1)))


def fake_device(kind: str) -> Any:
    """What stands for a device whose backend is not installed here."""
    return SimpleNamespace(type=kind)


F64 = torch.float64
ALONE, PAIR = World(), World(rank=1, size=2, local_rank=1, local_size=2)


CHOSEN = {("auto", CUDA): "cuda", ("auto", NEURON): "neuron", ("auto", MPS): "cpu", ("auto", None): "cpu"} | {
    **{("cpu", CUDA): "cpu", ("cuda", CUDA): "cuda", ("mps", MPS): "mps", ("neuron", NEURON): "neuron"},
}


def test_auto_takes_what_several_ranks_can_use() -> None:
    for (wanted, accelerator), chosen in CHOSEN.items():
        assert choose_device_type(wanted, accelerator, ALONE) == chosen


@pytest.mark.parametrize(
    ("wanted", "accelerator", "world", "message"),
    [
        ("cuda", None, ALONE, "torch finds no CUDA device; set it to 'cpu' or 'auto'"),
        ("cuda", MPS, ALONE, "torch finds no CUDA device, but mps; set it"),
        ("neuron", None, ALONE, "torch finds no Neuron device; set it.*torch-neuronx 2.13 or newer, .*AUTOLOAD not 0"),
        ("mps", MPS, PAIR, "trains in one process, and 2 ranks were started"),
        ("cuda", Accelerator(type="cuda", count=1), PAIR, "RANK = 1: torch finds 1 devices of type cuda; start at"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    wanted: str, accelerator: Accelerator | None, world: World, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        choose_device_type(wanted, accelerator, world)


def test_each_rank_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current = []
    monkeypatch.setattr(devices, "find_accelerator", lambda: CUDA)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made_current.append)
    assert devices.select_device(GpuOptions(), PAIR) == torch.device("cuda", 1)
    assert made_current == [1]
    assert devices.select_device(GpuOptions(device="cpu"), PAIR) == torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "world", "backend"),
    [("cuda", PAIR, "nccl"), ("neuron", PAIR, "cpu:gloo,neuron:neuron"), ("cpu", PAIR, "gloo"), ("mps", ALONE, "gloo")],
)
def test_the_process_group_is_the_devices(
    monkeypatch: pytest.MonkeyPatch, kind: str, world: World, backend: str
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(devices.dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    devices.init_process_group(torch.device("cuda", 0) if kind == "cuda" else fake_device(kind), world, 7.0)
    ((args, kwargs),) = calls
    assert args == (backend,)
    assert kwargs["timeout"] == datetime.timedelta(seconds=7)
    assert kwargs.get("device_id") == (torch.device("cuda", 0) if kind == "cuda" else None)


def test_devices_without_float64_sum_in_float32() -> None:
    kinds = ("cuda", "neuron", "mps", "cpu")
    assert [accumulation_dtype(fake_device(kind)) for kind in kinds] == [F64, torch.float32, torch.float32, F64]
    with pytest.raises(DeviceError, match="mps has no float64"):
        compute_dtype(GpuOptions(dtype="float64"), torch.device("mps"))
    found = [compute_dtype(GpuOptions(), fake_device(kind)) for kind in kinds[:3]]
    assert found == [torch.bfloat16, torch.bfloat16, torch.float32]


PEAKS = {
    "NVIDIA A10G": 70,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "AMD Instinct MI300X": 1307,
    "NVIDIA RTX A1000 Laptop GPU": math.nan,
    "NVIDIA A1000": math.nan,
    "NVIDIA GeForce RTX 4090 D": math.nan,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": math.nan,
    "NVIDIA H2000": math.nan,
    "Quadro RTX 6000": math.nan,
}
"""Names as torch tells them, and dense bfloat16 TFLOP/s of the datasheets; nan: not in the table."""


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_that_of_the_exact_model(name: str) -> None:
    found, source = peak_flops(torch.device("cuda", 0), torch.bfloat16, name)
    assert found == pytest.approx(PEAKS[name] * 1e12, nan_ok=True)
    assert source.startswith("unknown: " if math.isnan(found) else "datasheet of ")


def test_float32_products_are_exact_unless_told_otherwise(open_on, config) -> None:
    open_on("cpu", config, "engine.gpu.float32_matmul_precision=high")
    assert torch.get_float32_matmul_precision() == "high"
    open_on("cpu", config)
    assert torch.get_float32_matmul_precision() == "highest"
