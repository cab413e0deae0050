"""Activation offload: what blocks save for backward is in page-locked host memory in between.

Autograd's hooks for saved tensors do it from outside. After each tensor is saved, a stream of its own copies it to the
host, and the device's memory is free once that copy and the block are done. On the way back another stream fetches the
tensors of a block while the block after it computes; the first of its backward kernels waits for the copy. The host
never waits.

Not moved: parameters (FSDP frees and gathers them), the block's other arguments (rotary tables and masks, which all
blocks share), tensors below `MIN_BYTES`, views with gaps, and the last block, whose backward pass comes first.
Memory that several operations save, in whatever view, is moved once. With full activation checkpointing the blocks'
inputs are what is moved.

Cost: for each moved byte one copy to the host and one back, over PCIe or NVLink-C2C beside the computation; host memory
as much, rounded up to powers of two by torch's caching allocator of page-locked memory, which reuses it. It pays where
the copies take less time than recomputation: the block's FLOPs per moved byte must exceed the device's FLOP/s over the
link's bytes/s. Gradients are the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lt_model.decoder import DecoderBlock

MIN_BYTES = 1 << 20
"""Size below which a tensor stays on the device."""


class SavedMemory:
    """Memory of a saved tensor, as a vector: on the host, and on the device again once it is fetched."""

    def __init__(self, host: Tensor, block: SavedBlock) -> None:
        self.host, self.block = host, block
        self.fetched: Tensor | None = None


class SavedView(NamedTuple):
    """Saved tensor that was moved: a dense view of some memory."""

    memory: SavedMemory
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedBlock:
    """Moved memory of one forward pass of a block.

    Attributes:
        previous: the block before it, whose backward pass comes next; None for the first.
    """

    def __init__(self, previous: SavedBlock | None) -> None:
        self.previous = previous
        # Autograd owns the tensors: they are freed as the backward pass goes.
        self._tensors: list[weakref.ref[SavedMemory]] = []
        self._is_fetched = False
        self._copied: torch.Event | None = None

    def add(self, tensor: SavedMemory) -> None:
        """Add a moved tensor."""
        self._tensors.append(weakref.ref(tensor))

    def fetch(self, device: torch.device, stream: torch.Stream | None, after: torch.Stream | None) -> None:
        """Begin to copy the tensors back on `stream`, after `after`; at once on a CPU. Once only."""
        if self._is_fetched:
            return
        self._is_fetched = True
        tensors = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        if stream is None or after is None:
            for tensor in tensors:
                tensor.fetched = tensor.host.clone()
            return
        stream.wait_stream(after)
        with stream:
            for tensor in tensors:
                tensor.fetched = tensor.host.to(device, non_blocking=True)
            self._copied = stream.record_event()

    def wait(self, stream: torch.Stream) -> None:
        """Make `stream` wait for the copies."""
        assert self._copied is not None
        stream.wait_event(self._copied)


class ActivationOffload:
    """Host memory for the activations of the blocks of one model stage on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cpu = device.type == "cpu"  # nothing to overlap; for tests
        self._to_host = None if on_cpu else torch.Stream(device=device)
        self._from_host = None if on_cpu else torch.Stream(device=device)
        self._last: SavedBlock | None = None
        self.moved_bytes = 0
        """Bytes moved to the host so far."""

    def wrap(self, block: DecoderBlock, *, is_first: bool) -> None:
        """Replace the forward of a block by one that moves what it saves; after compiling it.

        Args:
            block: a block that is not the last of its stage.
            is_first: the block is the first of its stage.
        """
        forward = block.forward

        def offloaded(x_BTD: Tensor, *args: Any) -> Tensor:
            saved = SavedBlock(None if is_first else self._last)
            self._last = saved
            kept = {_storage(one) for one in (*block.parameters(), *_tensors(args))}
            seen: dict[tuple[Any, ...], tuple[Tensor, SavedMemory]] = {}
            with torch.autograd.graph.saved_tensors_hooks(self._packer(saved, kept, seen), self._unpack):
                output = forward(x_BTD, *args)
            seen.clear()  # the device's memory is free once it has been copied
            return output

        block.forward = offloaded  # pyright: ignore[reportAttributeAccessIssue] - blocks are called by position

    def _packer(
        self, saved: SavedBlock, kept: set[int], seen: dict[tuple[Any, ...], tuple[Tensor, SavedMemory]]
    ) -> Callable[[Tensor], Tensor | SavedView]:
        """Return the pack hook of one forward pass of a block.

        Args:
            saved: record of the pass.
            kept: addresses of memory that stays on the device.
            seen: what was moved; sources stay referenced until the block is done, so equal addresses are equal tensors.
        """

        def pack(tensor: Tensor) -> Tensor | SavedView:
            if tensor.nbytes < MIN_BYTES or tensor.device != self._device or _storage(tensor) in kept:
                return tensor
            if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
                return tensor  # a view with gaps
            key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version)
            if key not in seen:
                seen[key] = tensor, self._move(tensor.detach().as_strided((tensor.numel(),), (1,)), saved)
            return SavedView(seen[key][1], tuple(tensor.shape), tensor.stride())

        return pack

    def _move(self, flat: Tensor, saved: SavedBlock) -> SavedMemory:
        self.moved_bytes += flat.nbytes
        host = torch.empty_like(flat, device="cpu", pin_memory=self._to_host is not None)
        if self._to_host is None:
            host.copy_(flat)
        else:
            self._to_host.wait_stream(torch.accelerator.current_stream(self._device))
            with self._to_host:
                host.copy_(flat, non_blocking=True)
            flat.record_stream(self._to_host)
        moved = SavedMemory(host, saved)
        saved.add(moved)
        return moved

    def _unpack(self, packed: Tensor | SavedView) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        memory = packed.memory
        memory.block.fetch(self._device, self._from_host, self._to_host)
        assert memory.fetched is not None
        if self._from_host is not None:
            current = torch.accelerator.current_stream(self._device)
            memory.block.wait(current)
            memory.fetched.record_stream(current)
        if memory.block.previous is not None:
            memory.block.previous.fetch(self._device, self._from_host, self._to_host)
        return memory.fetched.as_strided(packed.shape, packed.stride)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]


def apply_activation_offload(blocks: list[DecoderBlock], device: torch.device) -> ActivationOffload:
    """Offload the activations of all blocks but the last, in place; call after compiling them."""
    offload = ActivationOffload(device)
    for index, block in enumerate(blocks[:-1]):
        offload.wrap(block, is_first=index == 0)
    return offload
