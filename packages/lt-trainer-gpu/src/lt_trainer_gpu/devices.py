"""Device, compute dtype and process group of a rank."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from lt_trainer.engine import World
from lt_trainer_gpu.options import GpuOptions


class DeviceError(ValueError):
    """Error for a recipe's device that the machine does not have."""

    exit_code = 64


def select_device(options: GpuOptions, world: World) -> torch.device:
    """Return this rank's device and make it the current one.

    Raises:
        DeviceError: there is no such device.
    """
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "engine.gpu.device = 'cuda': torch finds no CUDA device; set it to 'cpu' or 'auto', or fix the driver"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"LOCAL_RANK = {world.local_rank}: torch finds {torch.cuda.device_count()} GPUs; start at most that "
            "many ranks on this node"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def compute_dtype(options: GpuOptions, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward."""
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[options.dtype]


def init_process_group(device: torch.device, world: World, timeout_s: float) -> None:
    """Initialize the process group: NCCL on CUDA, gloo on a CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1:
        # One process needs no rendezvous, hence no port and no network; FSDP2 still needs a group for its casts.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
