"""Optimizer offload: moments in page-locked host memory, on the device in chunks for their update.

AdamW's moments pass through two buffers on the device. While the kernel updates one chunk, a stream of its own copies
the next chunk to the device and another one copies the previous chunk back, so both directions of the bus are busy.
The host never waits: streams wait for each other. The update is elementwise, so its chunks give the same bits.
Optimizers without a fused kernel copy the slots of one parameter at a time, on the stream that computes.

Gradients, weights and their master copies stay on the device: the norm needs all gradients before the first update, and
the update runs at the speed of the device's memory. Checkpoints are written from the host's memory and read into it.

Cost per rank and step: each byte of optimizer state once over the bus in each direction, 8 bytes per parameter of the
rank with AdamW in float32 (Muon's momentum twice to the device). Nothing hides it: the update needs the norm, the next
forward pass the weights. Larger batches make it a smaller part of the step. Memory: the whole state on the host, on the
device two buffers of at most `CHUNK_BYTES` during the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lt_trainer.torch import allocate_host_memory
from lt_trainer_gpu.optimizer import GpuOptimizer, GroupKey, ParamUpdate, UpdateGroup, split_buckets

CHUNK_BYTES = 128 * 2**20
"""Optimizer state in one of the two buffers: some milliseconds of the bus, many times the latency of a copy."""
ALIGN = 256
"""Alignment of tensors in a buffer, as in torch's allocator: kernels then load several elements at a time."""


class OffloadedOptimizer(GpuOptimizer):
    """Optimizer whose state is in host memory."""

    def allocate_slot(self, weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros for a slot of a weight, in host memory."""
        return zeros_on_host(shape, dtype, weight.device)

    def slots_of(self, name: str) -> dict[str, Tensor]:
        """Return copies of a parameter's slots on the device."""
        return {
            slot: torch.empty_like(one, device=self.step_count.device).copy_(one, non_blocking=True)
            for slot, one in super().slots_of(name).items()
        }

    def wait_for_slots(self) -> None:
        """Wait until the slots are those of the last step."""
        if self.device_type != "cpu":
            torch.accelerator.current_stream(self.step_count.device).synchronize()

    def update_groups(self, groups: Mapping[GroupKey, list[ParamUpdate]], update_group: UpdateGroup) -> None:
        """Call `update_group` for chunks whose moments are on the device."""
        chunks = [
            (key, chunk)
            for key, updates in groups.items()
            for chunk in split_buckets(updates, CHUNK_BYTES, ParamUpdate.slot_bytes)
        ]

        def update_chunk(index: int, moments: list[Tensor]) -> None:
            key, chunk = chunks[index]
            on_device = zip(chunk, moments[::2], moments[1::2], strict=True)
            update_group(key, [replace(row, first=first, second=second) for row, first, second in on_device])

        moments = [[moment for row in chunk for moment in (row.first, row.second)] for _, chunk in chunks]
        self._chunk_pipeline.update(moments, update_chunk)

    @cached_property
    def _chunk_pipeline(self) -> ChunkPipeline:
        return ChunkPipeline(self.step_count.device)


def zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, page-locked if the device is a GPU."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return torch.from_numpy(allocate_host_memory(like.nbytes, device)).view(dtype).view(shape).zero_()


class ChunkPipeline:
    """Update of tensors in host memory, chunk by chunk, through two buffers on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cpu = device.type == "cpu"  # nothing to overlap; for tests
        self._to_device = None if on_cpu else torch.Stream(device=device)
        self._to_host = None if on_cpu else torch.Stream(device=device)

    def update(self, chunks: Sequence[Sequence[Tensor]], update_chunk: Callable[[int, list[Tensor]], None]) -> None:
        """Copy each chunk to the device, update it there and copy it back; what follows on the stream waits.

        Args:
            chunks: dense tensors in host memory.
            update_chunk: function of a chunk's index and its tensors on the device, which it changes in place.
        """
        n_bytes = max((_padded_bytes(chunk) for chunk in chunks), default=0)
        buffers = [torch.empty(n_bytes, dtype=torch.uint8, device=self._device) for _ in chunks[:2]]
        written_back: list[torch.Event | None] = [None] * len(chunks)
        if self._to_device is None or self._to_host is None:
            for index, chunk in enumerate(chunks):
                tensors = _views(buffers[index % 2], chunk)
                _copy_all(chunk, tensors)
                update_chunk(index, tensors)
                _copy_all(tensors, chunk)
            return
        current = torch.accelerator.current_stream(self._device)
        self._to_device.wait_stream(
            current
        )  # earlier kernels may use the buffers' memory, and earlier copies the host's

        def fetch(index: int) -> tuple[list[Tensor], torch.Event]:
            tensors = _views(buffers[index % 2], chunks[index])
            assert self._to_device is not None
            if index >= 2:
                event = written_back[index - 2]
                assert event is not None
                self._to_device.wait_event(event)
            with self._to_device:
                _copy_all(chunks[index], tensors)
                return tensors, self._to_device.record_event()

        fetched = fetch(0) if chunks else None
        for index, chunk in enumerate(chunks):
            assert fetched is not None
            tensors, arrived = fetched
            fetched = fetch(index + 1) if index + 1 < len(chunks) else None
            current.wait_event(arrived)
            update_chunk(index, tensors)
            self._to_host.wait_stream(current)
            with self._to_host:
                _copy_all(tensors, chunk)
                written_back[index] = self._to_host.record_event()
        current.wait_stream(self._to_host)


def _padded_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors)


def _views(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return parts of the buffer with the dtypes and shapes of the tensors."""
    views, at = [], 0
    for tensor in tensors:
        views.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += _padded_bytes([tensor])
    return views


def _copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
