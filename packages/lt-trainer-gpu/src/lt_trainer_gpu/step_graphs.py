"""CUDA graphs of the step: a shape's first step runs, its second is recorded, and every later one is a single launch.

A graph holds addresses, not values. So what differs between steps is copied to fixed places on the device: token ids,
positions, labels, document boundaries, one over the valid tokens, and the learning rate. Weights, optimizer state and
step count are where they always are, and a step that is skipped is so on the device already. Each number of
micro-batches, rows and tokens has a graph of its own, all in one pool of memory, as they never run at once; what they
return is copied out before the next one.

All work of the engine is on one stream of its own, since autograd adds a gradient on the stream where its parameter was
made, and the default stream cannot be recorded.

Cost: 8 bytes per token and array for the fixed places, and memory that others cannot use between steps. The time of the
optimizer counts as that of the passes.

Refused (`checks`): several ranks, as collectives in a graph have no timeout; offloading, which the host directs; and
documents with attention that reads their boundaries on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_model.documents import DocumentBoundaries, copy_to_device
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.torch import PendingStep
from lt_trainer_gpu.micro_batches import DeviceMicroBatch

Compute = Callable[[Sequence[DeviceMicroBatch], Tensor, Tensor], PendingStep]
"""A step of micro-batches, with one over its valid tokens and a learning rate."""
Recorded = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""A graph, the places that it reads, and the loss, norm and load that it leaves behind."""


@dataclass(frozen=True, eq=False)
class DeviceBoundaries(DocumentBoundaries):
    """Boundaries on the device; the host does not know them, so any row may have several documents."""

    is_one_per_row = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


class StepGraphs:
    """Graphs of one rank's step by the shapes of its arrays.

    Args:
        device: the rank's device; the engine's work is put on a stream of its own from now on.
        recipe: says whether rows may have several documents.

    Attributes:
        peak_bytes: most bytes that torch's allocator held while a graph was recorded; a replay does not count there.
    """

    def __init__(self, device: torch.device, recipe: Recipe) -> None:
        self._device, self._has_documents = device, recipe.data.document_mask
        self._recorded: dict[tuple[torch.Size, ...], Recorded | None] = {}  # None: the shape's first step has run
        self._pool, self.peak_bytes = torch.cuda.graph_pool_handle(), 0
        torch.cuda.set_stream(torch.cuda.Stream(device))

    def run(self, micros: Sequence[DeviceMicroBatch], share: float, lr: float, compute: Compute) -> PendingStep:
        """Run, record or replay a step.

        Raises:
            RecipeError: the step cannot be recorded.
        """
        if self._has_documents:
            micros = [micro._replace(boundaries=self._on_device(micro.boundaries)) for micro in micros]
        numbers = copy_to_device(torch.tensor([share, lr], dtype=torch.float64), self._device)
        parts = [part for micro in micros for part in (*micro[:3], micro.boundaries.cu_seqlens)]
        tensors = [numbers, *(part for part in parts if part is not None and part.is_cuda)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._recorded:
            self._recorded[shapes] = None
            return compute(micros, numbers[0], numbers[1].float())
        if (recorded := self._recorded[shapes]) is None:
            graph = torch.cuda.CUDAGraph()
            recorded = self._recorded[shapes] = graph, tensors, self._record(graph, micros, numbers, compute)
        graph, places, (loss, norm, load) = recorded
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        return PendingStep(loss.clone(), norm.clone(), load if load is None else load.clone())

    def _on_device(self, boundaries: DocumentBoundaries) -> DeviceBoundaries:
        cu_seqlens = copy_to_device(boundaries.cu_seqlens, self._device)
        return DeviceBoundaries(cu_seqlens, boundaries.n_rows, boundaries.seq_len)

    def _record(
        self, graph: torch.cuda.CUDAGraph, micros: Sequence[DeviceMicroBatch], numbers: Tensor, compute: Compute
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        stream = torch.cuda.current_stream()
        try:
            # What other threads ask of CUDA meanwhile is not the graph's concern.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                pending = compute(micros, numbers[0], numbers[1].float())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            problem = f"a step cannot be recorded: {str(exc).splitlines()[0]}"
            raise RecipeError(problem, values={"engine.gpu.cuda_graphs": True}, remedy="set it to false") from exc
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._device))
        return pending.loss, pending.grad_norm, pending.expert_load
