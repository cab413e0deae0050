"""Torch adapter of the engines: control collectives, tensor slices, checkpoint shards, initialization.

Ranks exchange control values over a gloo group on the CPU (`GlooControl`), weights are initialized slice by slice by
the counter-based init, and tensors become `lt_ckpt.Shard`s as views of their bytes: nothing is copied until written.
"""

from __future__ import annotations

import datetime
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, ReadItem, Shard
from lt_model import ModelConfig, param_specs
from lt_trainer.control import Control
from lt_trainer.errors import PeerError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lt_trainer.checkpointing.pretrained import PretrainedWeights

DTYPE_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Safetensors codes of the dtypes that checkpoints may hold."""

READ_BATCH_BYTES = 256 * 2**20
"""Bytes per read on the way to a device."""


@contextmanager
def translate_dist_errors() -> Iterator[None]:
    """Translate collective failures caused by other ranks into `PeerError`."""
    try:
        yield
    except RuntimeError as exc:
        # NCCL errors have a type of their own; gloo errors are recognized by the source path in their text.
        if isinstance(exc, dist.DistError) or "gloo/" in str(exc):
            raise PeerError(f"lost contact with another rank: {exc}") from exc
        raise


class GlooControl(Control):
    """Control collectives over a gloo group of all ranks; well under a millisecond each on one node.

    Raises:
        PeerError: (every method) a rank exited, or did not join within the timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        with translate_dist_errors():
            group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "all ranks are in this group"
        self._group = group

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64)
        with translate_dist_errors():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return int(tensor.item())

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        text = json.dumps(value).encode()
        size = torch.tensor([len(text)], dtype=torch.int64)
        with translate_dist_errors():
            dist.broadcast(size, src=0, group=self._group)
            data = torch.zeros(int(size.item()), dtype=torch.uint8)
            if dist.get_rank() == 0:
                data = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
            dist.broadcast(data, src=0, group=self._group)
        return json.loads(data.numpy().tobytes())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        text = json.dumps(value).encode()
        size, n_ranks = self.all_reduce_max(len(text)), dist.get_world_size(self._group)
        own = torch.from_numpy(np.frombuffer(text.ljust(size), dtype=np.uint8).copy())  # JSON ignores trailing blanks
        gathered = [torch.zeros(size, dtype=torch.uint8) for _ in range(n_ranks)]
        with translate_dist_errors():
            dist.all_gather(gathered, own, group=self._group)
        return [json.loads(data.numpy().tobytes()) for data in gathered]


@dataclass(frozen=True, eq=False)
class PendingStep:
    """Step that the device may still be computing: loss and gradient norm over all ranks, device scalars.

    With experts also tokens by layer and expert, and in a last column the load-balancing loss.
    """

    loss: Tensor
    grad_norm: Tensor
    expert_load: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalShard:
    """This rank's slice of a sharded tensor.

    Attributes:
        local: Slice.
        shape: Global shape.
        offset: Start of the slice in the global tensor.
        n_replicas: Number of ranks that hold the same slice.
        replica_index: Index of this rank among them. Each writes its part of the rows to a checkpoint, so nothing is
            written twice.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    n_replicas: int = 1
    replica_index: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the slice."""
        return self.local.dtype

    def replica_slice(self) -> LocalShard:
        """Return the rows that this rank writes to a checkpoint; those of all replicas make up the slice."""
        if self.n_replicas == 1:
            return self
        rows = self.local.shape[0]
        first = rows * self.replica_index // self.n_replicas
        local = self.local[first : rows * (self.replica_index + 1) // self.n_replicas]
        return LocalShard(local=local, shape=self.shape, offset=(self.offset[0] + first, *self.offset[1:]))


def local_slice(tensor: Tensor | LocalShard) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's slice of a tensor (LocalShard, DTensor or plain), and its global offset."""
    if isinstance(tensor, LocalShard):
        return tensor.local, tensor.offset
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(tensor, DTensor)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tensor.to_local(), tuple(offset)
    return tensor, (0,) * tensor.ndim


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a tensor (DTensor or plain); its offset would take longer to compute."""
    return cast("DTensor", tensor).to_local() if hasattr(tensor, "placements") else tensor


def to_checkpoint_shard(group: str, name: str, tensor: Tensor | LocalShard) -> Shard | None:
    """Return what this rank writes of a tensor to a checkpoint; None if nothing.

    On the CPU, the shard's data is a view of the tensor. On a device, it is copied on access.
    """
    local, offset = local_slice(tensor.replica_slice() if isinstance(tensor, LocalShard) else tensor)
    if local.numel() == 0 and math.prod(tensor.shape) != 0:
        return None
    local = local.detach()

    def copy_to_host() -> np.ndarray:
        return local.cpu().contiguous().view(-1).view(torch.uint8).numpy()

    def copy_into(target: np.ndarray) -> None:
        torch.from_numpy(target).view(local.dtype).view(local.shape).copy_(local)

    on_cpu = local.device.type == "cpu"
    return Shard(
        group=group,
        name=name,
        dtype=DTYPE_CODES[tensor.dtype],
        global_shape=tuple(tensor.shape),
        offset=offset,
        shape=tuple(local.shape),
        data=copy_to_host() if on_cpu else copy_to_host,
        copy_fn=None if on_cpu else copy_into,
    )


def allocate_host_memory(n_bytes: int, device: torch.device) -> np.ndarray:
    """Allocate host memory for snapshots of a device's tensors; page-locked for a GPU, for faster copies.

    Raises:
        MemoryError: the system does not allow locking this much.
    """
    from lt_ckpt.async_save import allocate_host_memory as allocate_pageable

    memory = allocate_pageable(n_bytes)
    if device.type == "cuda" and n_bytes:
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        assert runtime is not None, "torch was built with CUDA"
        code = int(runtime.cudaHostRegister(address, n_bytes, 0))
        if code:
            raise MemoryError(f"CUDA cannot lock {n_bytes} bytes of host memory (error {code})")
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


def load_tensors(checkpoint: Checkpoint, groups: Mapping[str, Mapping[str, Tensor | LocalShard]]) -> None:
    """Copy a checkpoint's tensors, or this rank's slices, into tensors of the same dtypes and shapes.

    Args:
        checkpoint: Checkpoint to read.
        groups: Group → name → tensor; filled in batches of `READ_BATCH_BYTES`.

    Raises:
        CheckpointError: this rank's part is damaged or cannot be read (see `read_on_all_ranks`).
    """
    batch: list[tuple[ReadItem, Tensor]] = []

    def fill_batch() -> None:
        with torch.no_grad():
            for (_, local), raw in zip(batch, checkpoint.read_many([item for item, _ in batch]), strict=True):
                local.copy_(torch.from_numpy(raw).view(local.dtype).view(local.shape))
        batch.clear()

    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            local, offset = local_slice(tensor)
            if local.numel():
                item = ReadItem(group=group, name=name, offset=offset, shape=tuple(local.shape))
                batch.append((item, local.detach()))
            if sum(one.nbytes for _, one in batch) >= READ_BATCH_BYTES:
                fill_batch()
    fill_batch()


def load_pretrained_tensors(pretrained: PretrainedWeights, tensors: Mapping[str, Tensor | LocalShard]) -> None:
    """Copy a pretrained model's weights, or this rank's slices, into tensors, cast to their dtype."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            (local, offset), row = local_slice(tensor), 0
            for block in pretrained.read(name, offset, tuple(local.shape), DTYPE_CODES[tensor.dtype]):
                values = torch.from_numpy(block).view(local.dtype).view(-1, *local.shape[1:])
                local[row : row + len(values)] = values
                row += len(values)


def init_parameters(shards: Mapping[str, LocalShard], config: ModelConfig, seed: int) -> None:
    """Initialize the parameters; each rank computes only its own slices, with equal values on every mesh.

    Args:
        shards: This rank's slices by name; a pipeline stage has some of the parameters.
        config: Model.
        seed: Seed of the run.
    """
    from lt_model.init import init_slice

    specs = {spec.name: spec for spec in param_specs(config)}
    assert shards.keys() <= specs.keys(), shards.keys() - specs.keys()
    with torch.no_grad():
        for name, shard in shards.items():
            local, shape = shard.local, tuple(shard.local.shape)
            local.copy_(
                init_slice(specs[name], seed, offset=shard.offset, shape=shape, dtype=local.dtype, device=local.device)
            )


def weight_decay_names(config: ModelConfig, *, include_embeddings: bool = False) -> set[str]:
    """Return the parameters with weight decay: matrices, and optionally the input embedding."""
    return {row.name for row in param_specs(config) if row.decay or (include_embeddings and row.type == "embedding")}


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU has matrix products in bfloat16 (AVX512-BF16, AMX); without, float32 is faster."""
    return cpuinfo.exists() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpuinfo.read_text().split())


def to_device(array: np.ndarray, device: torch.device) -> Iterator[Tensor]:
    """Yield the entries of an int32 array, such as the micro-batches of one [M, B, T], as int64 tensors on `device`.

    They are widened there: 12 bytes per token in pinned memory, half a nanosecond over PCIe, where a token of a 1B
    model takes some 20 microseconds. Narrower ids alone (`lt_data.torch.to_tensors`) would not do:
    context parallelism, custom loaders and XLA take labels and positions from the host.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    yield from tensor.to(torch.int64)
