"""What both torch engines share; besides `sample`, which runs a model, the only module of lt-trainer with torch.

Ranks talk over a gloo group on the CPU (`GlooControl`), weights start from the counter-based init slice by slice, and
tensors become `lt_ckpt.Shard`s as views of their bytes: nothing is copied until it is written.
"""

from __future__ import annotations

import datetime
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, Shard, TensorSpec, Want
from lt_model import LlamaConfig, parameters
from lt_trainer.errors import PeerError
from lt_trainer.pretrained import Pretrained

DTYPE_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Torch dtypes and their safetensors codes, for what an optimizer state may hold."""

BATCH_BYTES = 256 * 2**20
"""Bytes that are read at once on their way to a device."""


@contextmanager
def peers() -> Iterator[None]:
    """A context in which a collective that fails because another rank is gone or silent raises a `PeerError`."""
    try:
        yield
    except RuntimeError as exc:
        # NCCL's failures have a type of their own, gloo's have only the path of its source in the text.
        if isinstance(exc, dist.DistError) or "gloo/" in str(exc):
            raise PeerError(f"lost contact with another rank: {exc}") from exc
        raise


class GlooControl:
    """Control over a gloo group of all ranks; one small exchange costs well under a millisecond on one node.

    Raises:
        PeerError: (every method) a rank is gone, or did not come within the timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        with peers():
            group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "this rank is in the group of all ranks"
        self._group = group

    def all_max(self, value: int) -> int:
        """The largest `value` of all ranks."""
        tensor = torch.tensor([value], dtype=torch.int64)
        with peers():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return int(tensor.item())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        text = json.dumps(value).encode()
        size = torch.tensor([len(text)], dtype=torch.int64)
        with peers():
            dist.broadcast(size, src=0, group=self._group)
            box = torch.zeros(int(size.item()), dtype=torch.uint8)
            if dist.get_rank() == 0:
                box = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
            dist.broadcast(box, src=0, group=self._group)
        return json.loads(box.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank."""
        text = json.dumps(value).encode()
        longest, ranks = self.all_max(len(text)), dist.get_world_size(self._group)
        mine = torch.from_numpy(np.frombuffer(text.ljust(longest), dtype=np.uint8).copy())  # JSON ends in no blanks
        boxes = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
        with peers():
            dist.all_gather(boxes, mine, group=self._group)
        return [json.loads(box.numpy().tobytes()) for box in boxes]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's slice of a tensor that no single rank need hold.

    Attributes:
        local: The slice.
        shape: Shape of the whole.
        offset: Where the slice starts in the whole.
        copies: How many ranks hold this same slice.
        copy: Which of them this one is. Each gives its share of the rows to a checkpoint: nothing is written twice.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: int = 1
    copy: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The slice's dtype."""
        return self.local.dtype

    def share(self) -> Part:
        """The rows of the slice that this rank gives to a checkpoint; together the ranks give all."""
        if self.copies == 1:
            return self
        rows = self.local.shape[0]
        first = rows * self.copy // self.copies
        local = self.local[first : rows * (self.copy + 1) // self.copies]
        return Part(local=local, shape=self.shape, offset=(self.offset[0] + first, *self.offset[1:]))


def local_part(tensor: Tensor | Part) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's slice of a tensor (a `Part`, a DTensor or a plain one) and where it starts in the whole."""
    if isinstance(tensor, Part):
        return tensor.local, tensor.offset
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(tensor, DTensor)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tensor.to_local(), tuple(offset)
    return tensor, (0,) * tensor.ndim


def as_shard(group: str, name: str, tensor: Tensor | Part) -> Shard | None:
    """What this rank gives of a tensor to a checkpoint, as a shard; None where that is nothing.

    On the CPU its data views the tensor's memory, and changes with it. On a device it is copied when it is asked for.
    """
    local, offset = local_part(tensor.share() if isinstance(tensor, Part) else tensor)
    if local.numel() == 0 and math.prod(tensor.shape) != 0:
        return None
    local = local.detach()

    def copied() -> np.ndarray:
        return local.cpu().contiguous().view(-1).view(torch.uint8).numpy()

    def into(target: np.ndarray) -> None:
        torch.from_numpy(target).view(local.dtype).view(local.shape).copy_(local)

    on_cpu = local.device.type == "cpu"
    return Shard(
        group=group,
        name=name,
        dtype=DTYPE_CODES[tensor.dtype],
        global_shape=tuple(tensor.shape),
        offset=offset,
        shape=tuple(local.shape),
        data=copied() if on_cpu else copied,
        into=None if on_cpu else into,
    )


def host_memory(n_bytes: int, device: torch.device) -> np.ndarray:
    """Bytes on the host for copies of what is on `device`; where that is a GPU, page-locked, so that it copies faster.

    Raises:
        MemoryError: the system does not let so much be locked.
    """
    from lt_ckpt.background import host_memory as pageable

    memory = pageable(n_bytes)
    if device.type == "cuda" and n_bytes:
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        assert runtime is not None, "torch was built with CUDA"
        code = int(runtime.cudaHostRegister(address, n_bytes, 0))
        if code:
            raise MemoryError(f"CUDA cannot lock {n_bytes} bytes of host memory (error {code})")
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


def spec_of(tensor: Tensor | Part) -> TensorSpec:
    """The dtype and the global shape of a tensor, as checkpoints know them (`Checkpoint.require`)."""
    return TensorSpec(DTYPE_CODES[tensor.dtype], tuple(tensor.shape))


def fill_from(checkpoint: Checkpoint, groups: Mapping[str, Mapping[str, Tensor | Part]]) -> None:
    """Copy a checkpoint's tensors of the same dtypes and shapes, or this rank's slices of them, into tensors.

    Args:
        checkpoint: What to read.
        groups: Group → name → tensor. On the CPU a tensor's memory is filled in place; others by batches of
            `BATCH_BYTES`.
    """
    straight: list[tuple[Want, np.ndarray]] = []
    batch: list[tuple[Want, Tensor]] = []
    n_bytes = 0

    def fill_batch() -> None:
        nonlocal n_bytes
        with torch.no_grad():
            for (_, local), raw in zip(batch, checkpoint.read_many([want for want, _ in batch]), strict=True):
                local.copy_(torch.from_numpy(raw).view(local.dtype).view(local.shape))
        batch.clear()
        n_bytes = 0

    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            local, offset = local_part(tensor)
            if local.numel() == 0:
                continue
            local = local.detach()
            want = Want(group=group, name=name, offset=offset, shape=tuple(local.shape))
            if local.device.type == "cpu" and local.is_contiguous():
                straight.append((want, local.view(-1).view(torch.uint8).numpy()))
                continue
            batch.append((want, local))
            n_bytes += local.nbytes
            if n_bytes >= BATCH_BYTES:
                fill_batch()
    fill_batch()
    checkpoint.read_into([want for want, _ in straight], [memory for _, memory in straight])


def fill_from_pretrained(pretrained: Pretrained, tensors: Mapping[str, Tensor | Part]) -> None:
    """Copy a model's weights, cast to the tensors' dtype, into tensors, or this rank's slices into theirs."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            local, offset = local_part(tensor)
            flat, at = torch.empty(local.shape, dtype=local.dtype), 0
            memory = flat.view(-1)
            for block in pretrained.read(name, offset, tuple(local.shape), DTYPE_CODES[tensor.dtype]):
                values = torch.from_numpy(block).view(local.dtype)
                memory[at : at + len(values)] = values
                at += len(values)
            assert at == len(memory), (name, at, len(memory))
            local.copy_(flat)


def initialise(parts: Mapping[str, Part], config: LlamaConfig, seed: int) -> None:
    """Give every parameter its initial value; each rank computes only the slices that it holds, equal on every mesh.

    Args:
        parts: This rank's slices by name.
        config: The model.
        seed: The run's.
    """
    from lt_model.init import init_slice

    table = {parameter.name: parameter for parameter in parameters(config)}
    assert parts.keys() == table.keys(), parts.keys() ^ table.keys()
    with torch.no_grad():
        for name, part in parts.items():
            local, shape = part.local, tuple(part.local.shape)
            local.copy_(
                init_slice(table[name], seed, offset=part.offset, shape=shape, dtype=local.dtype, device=local.device)
            )


def decayed(config: LlamaConfig, *, embeddings: bool = False) -> set[str]:
    """Names of the parameters that weight decay applies to: matrices, and with `embeddings` the input embedding too."""
    return {row.name for row in parameters(config) if row.decay or (embeddings and row.role == "embed")}


def to_device(array: np.ndarray, device: torch.device) -> Iterator[Tensor]:
    """Micro-batches of an int32 array [M, B, T] as int64 tensors [B, T] on `device`, widened there."""
    whole = torch.from_numpy(array)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    for micro in whole:
        yield micro.to(torch.int64)
