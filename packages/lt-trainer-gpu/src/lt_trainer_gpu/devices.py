"""Device, compute dtype and process group of a rank.

Devices are found through `torch.accelerator`: "cuda" is a GPU of NVIDIA or AMD (ROCm has the same name in torch), "mps"
one of Apple, "neuron" a NeuronCore of Trainium 2 or 3 in AWS's native TorchNeuron. The decisions are functions of what
torch reports, so they are tested without the devices; none has been run yet (docs/known-limits.md).

TorchNeuron and the older XLA line share the package name torch-neuronx: 2.9 and older are the XLA line, which only
lt-trainer-neuron runs.
"""

from __future__ import annotations

import ctypes
import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lt_trainer.engine import World
from lt_trainer_gpu.options import GpuOptions

BACKENDS = {"cuda": "nccl", "neuron": "cpu:gloo,neuron:neuron", "mps": "gloo", "cpu": "gloo"}
"""Process-group backend by device type."""
NEURON_NEEDS = (
    "torch-neuronx 2.13 or newer, of this torch's version (older ones are the XLA line: run.engine = neuron), and "
    "TORCH_DEVICE_BACKEND_AUTOLOAD not 0"
)
"""What torch's device "neuron" needs besides the driver."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants from glibc's malloc.h."""
WITHOUT_FLOAT64 = ("mps", "neuron")
"""Device types that cannot compute in float64."""


class DeviceError(ValueError):
    """Error for a recipe's device that the machine does not have."""

    exit_code = 64


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Accelerator that torch reports.

    Attributes:
        type: device type.
        count: number of such devices on this node.
    """

    type: str
    count: int


def find_accelerator() -> Accelerator | None:
    """Return the accelerator of this machine; None if there is none that works."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else Accelerator(type=found.type, count=torch.accelerator.device_count())


def choose_device_type(wanted: str, accelerator: Accelerator | None, world: World) -> str:
    """Return the device type of a run; "auto" is CUDA or Neuron if there is one, else the CPU.

    An Apple GPU is only taken when asked for: it has no float64, and its results are compared with nothing here.

    Args:
        wanted: engine.gpu.device.
        accelerator: what torch reports.
        world: the ranks.

    Raises:
        DeviceError: the device is not there, or has fewer units than ranks.
    """
    found = "" if accelerator is None else accelerator.type
    if wanted == "auto":
        wanted = found if found in ("cuda", "neuron") else "cpu"
    if wanted == "cpu":
        return "cpu"
    if accelerator is None or wanted != found:
        title = "Neuron" if wanted == "neuron" else wanted.upper()
        raise DeviceError(
            f'engine.gpu.device = "{wanted}": torch finds no {title} device'
            + (f", but {found}" if found else "")
            + "; set it to 'cpu' or 'auto', or fix the driver"
            + (f"; it needs {NEURON_NEEDS}" if wanted == "neuron" else "")
        )
    if wanted == "mps" and world.size > 1:
        raise DeviceError(
            f'engine.gpu.device = "mps": an Apple GPU trains in one process, and {world.size} ranks were started; '
            "start one, or set it to 'cpu'"
        )
    if world.local_rank >= accelerator.count:
        raise DeviceError(
            f"LOCAL_RANK = {world.local_rank}: torch finds {accelerator.count} devices of type {wanted}; start at most "
            "that many ranks on this node"
        )
    return wanted


def select_device(options: GpuOptions, world: World) -> torch.device:
    """Return this rank's device and make it the current one.

    Raises:
        DeviceError: there is no such device.
    """
    kind = choose_device_type(options.device, None if options.device == "cpu" else find_accelerator(), world)
    if kind in ("cpu", "mps"):
        keep_freed_memory()
        return torch.device(kind)
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(kind, world.local_rank)


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free, for the next ones; a libc without `mallopt` stays as it is.

    A step on a CPU allocates megabytes a thousand times. The system clears each page that is new to the process, which
    cost 5 % of a step of 512 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest it takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def current_device(device_type: str) -> torch.device:
    """Return the device of this type that `select_device` made the current one."""
    indexed = device_type in ("cuda", "neuron")
    return torch.device(device_type, torch.accelerator.current_device_index()) if indexed else torch.device(device_type)


def device_name(device: torch.device) -> str:
    """Return the model name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compute_dtype(options: GpuOptions, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward; "auto" on a CPU is bfloat16 until the ranks agree.

    Raises:
        DeviceError: the device cannot compute in it.
    """
    if options.dtype == "auto":
        return torch.float32 if device.type == "mps" else torch.bfloat16
    if options.dtype == "float64" and device.type in WITHOUT_FLOAT64:
        raise DeviceError(
            f'engine.gpu.dtype = "float64": {device.type} has no float64; set it to "float32", or engine.gpu.device to '
            "'cpu'"
        )
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[options.dtype]


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over micro-batches and parameters: float64 if the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def init_process_group(device: torch.device, world: World, timeout_s: float) -> None:
    """Initialize the process group: NCCL on CUDA (RCCL on ROCm), neuron on Neuron, gloo elsewhere."""
    backend = BACKENDS[device.type]
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1:
        # One process needs no rendezvous, hence no port and no network; FSDP2 still needs a group for its casts.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
