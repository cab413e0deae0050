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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lt_trainer.torch import allocate_host_memory
from lt_trainer_gpu.optimizer import GpuOptimizer, GroupKey, Groups, ParamUpdate, split_buckets

CHUNK_BYTES = 128 * 2**20
"""Optimizer state in one of the two buffers: some milliseconds of the bus, many times the latency of a copy."""
ALIGN = 256
"""Alignment of tensors in a buffer, as in torch's allocator: kernels then load several elements at a time."""


class OffloadedOptimizer(GpuOptimizer):
    """Optimizer whose state is in host memory."""

    def allocate_slot(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros for a slot of a weight, in host memory."""
        return zeros_on_host(tuple(weight.shape), dtype, weight.device)

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

    def iter_on_device(self, groups: Groups) -> Iterator[tuple[GroupKey, list[ParamUpdate]]]:
        """Yield chunks whose moments are on the device; each is copied back when the next one is asked for."""
        chunks = [
            (key, chunk)
            for key, updates in groups.items()
            for chunk in split_buckets(updates, CHUNK_BYTES, ParamUpdate.slot_bytes)
        ]
        on_host = [[moment for row in chunk for moment in (row.first, row.second)] for _, chunk in chunks]
        for moments, (key, chunk) in zip(self._chunk_pipeline.iter_on_device(on_host), chunks, strict=True):
            on_device = zip(chunk, moments[::2], moments[1::2], strict=True)
            yield key, [replace(row, first=first, second=second) for row, first, second in on_device]

    @cached_property
    def _chunk_pipeline(self) -> ChunkPipeline:
        return ChunkPipeline(self.step_count.device)


def zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, page-locked if the device is a GPU."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return torch.from_numpy(allocate_host_memory(like.nbytes, device)).view(dtype).view(shape).zero_()


class ChunkPipeline:
    """Tensors in host memory that pass through two buffers on a device, chunk by chunk, and are changed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cpu = device.type == "cpu"  # nothing to overlap; for tests
        self._to_device = None if on_cpu else torch.Stream(device=device)
        self._to_host = None if on_cpu else torch.Stream(device=device)

    def iter_on_device(self, chunks: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield each chunk on the device; what the caller queues before it asks for the next one changes it.

        Then the chunk is copied back. What follows on the caller's stream waits for all copies.

        Args:
            chunks: dense tensors in host memory.
        """
        n_bytes = max((_padded_bytes(chunk) for chunk in chunks), default=0)
        buffers = [torch.empty(n_bytes, dtype=torch.uint8, device=self._device) for _ in chunks[:2]]
        on_device = [_views(buffers[index % 2], chunk) for index, chunk in enumerate(chunks)]
        if self._to_device is None or self._to_host is None:
            for chunk, tensors in zip(chunks, on_device, strict=True):
                _copy_all(chunk, tensors)
                yield tensors
                _copy_all(tensors, chunk)
            return
        to_device, to_host = self._to_device, self._to_host
        current = torch.accelerator.current_stream(self._device)
        to_device.wait_stream(current)  # earlier kernels may use the buffers' memory, and earlier copies the host's
        written_back: list[torch.Event] = []

        def fetch(index: int) -> torch.Event:
            if index >= 2:
                to_device.wait_event(written_back[index - 2])
            with to_device:
                _copy_all(chunks[index], on_device[index])
                return to_device.record_event()

        fetched = [fetch(0)] if chunks else []
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                fetched.append(fetch(index + 1))
            current.wait_event(fetched[index])
            yield on_device[index]
            to_host.wait_stream(current)
            with to_host:
                _copy_all(on_device[index], chunk)
                written_back.append(to_host.record_event())
        current.wait_stream(to_host)


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
