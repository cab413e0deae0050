"""Pipeline parallelism: a rank's passes, with activations and their gradients sent between neighbors.

The runner follows `pipeline_schedule`: a forward pass receives its input from the previous stage and sends its output
on; a backward pass receives the gradient of the output from the next stage and sends that of the input back. Receives
are posted one pass ahead, so that messages travel while the device computes; sends are never waited for, except at the
end of a step. Both sides know the shape of each message from their own copy of the batch, so rows of any length and any
number of micro-batches work in each step. A micro-batch is made for its first pass and let go after its last.

Each directed edge between two ranks has its own communicator: with one for both directions, two ranks that both send
first would wait for each other (see `pipeline_schedule`).

Tied weights: the head of the last stage is a copy of the embedding in the first one. `TiedGradient` adds the gradients
of both before the norm, so both copies take the same update.

Cost: B * T * D elements of the compute dtype per micro-batch, edge and direction. Each rank keeps the activations of
the forward passes whose backward pass is still to come: at most pp - its rank with one stage per rank.

Shapes: B rows, T positions, D hidden_size.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_model.loss import LossParts
from lt_trainer.data.micro_batch_window import MicroBatchWindow
from lt_trainer_gpu.computation import Computation
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.micro_batches import DeviceMicroBatch, MicroBatches
from lt_trainer_gpu.model import DecoderStage
from lt_trainer_gpu.pipeline_schedule import StagePass, forward_passes, training_passes

Edge = tuple[int, int]
"""Pipeline ranks of sender and receiver."""


class PipelineEdges:
    """Point-to-point messages of one pipeline rank, one communicator per directed edge.

    Creating it is collective over all ranks.

    Args:
        mesh_layout: this rank's coordinates.
        stages_per_rank: with several, the last rank also sends forward to the first.
        timeout_s: timeout of a message.
    """

    def __init__(self, mesh_layout: MeshLayout, *, stages_per_rank: int, timeout_s: float) -> None:
        self._pp, self._pp_rank = mesh_layout.pp, mesh_layout.pp_rank
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._groups: dict[Edge, dist.ProcessGroup] = {}
        ends = range(self._pp if stages_per_rank > 1 else self._pp - 1)
        for edge in sorted({edge for a in ends for edge in ((a, (a + 1) % self._pp), ((a + 1) % self._pp, a))}):
            group = new_pipeline_groups(mesh_layout, edge, timeout_s)
            if group is not None:
                self._groups[edge] = group
        self._global_ranks = [mesh_layout.pipeline_rank(pp_rank) for pp_rank in range(self._pp)]

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a tensor to the rank of `stage`; returns at once, the tensor must not change."""
        self._sends = [(work, kept) for work, kept in self._sends if not work.is_completed()]
        tensor = tensor.contiguous()
        peer = stage % self._pp
        work = dist.isend(tensor, self._global_ranks[peer], group=self._groups[self._pp_rank, peer])
        assert work is not None
        self._sends.append((work, tensor))

    def receive(self, buffer: Tensor, stage: int) -> Callable[[], Tensor]:
        """Start to receive from the rank of `stage`; return a function that waits for the tensor."""
        peer = stage % self._pp
        work = dist.irecv(buffer, self._global_ranks[peer], group=self._groups[peer, self._pp_rank])
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return buffer

        return wait

    def finish_sends(self) -> None:
        """Wait for all sends: on a GPU, its stream waits."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


def new_pipeline_groups(mesh_layout: MeshLayout, pp_ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup | None:
    """Create a process group of these pipeline ranks in every pipeline, collectively over all ranks.

    Returns:
        The group of this rank, or None if it is in none.
    """
    per_stage = mesh_layout.world_size // mesh_layout.pp
    ranks = [[pipeline + pp_rank * per_stage for pp_rank in pp_ranks] for pipeline in range(per_stage)]
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=datetime.timedelta(seconds=timeout_s))
    return group if isinstance(group, dist.ProcessGroup) else None


class PipelineRunner:
    """Passes of one rank's stages; creating it is collective over all ranks.

    Args:
        stages: this rank's stages, in the model's order.
        computation: device and dtype of the activations.
        mesh_layout: this rank's coordinates.
        timeout_s: timeout of a message.
    """

    def __init__(
        self, stages: Sequence[DecoderStage], computation: Computation, mesh_layout: MeshLayout, timeout_s: float
    ) -> None:
        self._stages, self._layout = stages, mesh_layout
        self._device, self._dtype = computation.device, computation.dtype
        self._edges = PipelineEdges(mesh_layout, stages_per_rank=len(stages), timeout_s=timeout_s)

    def forward_backward(self, micros: MicroBatches, *, share: Tensor, z_loss: float) -> list[Tensor]:
        """Accumulate the gradients, as `PassRunner` says."""
        window = MicroBatchWindow(micros)
        passes = training_passes(
            pp=self._layout.pp,
            pp_rank=self._layout.pp_rank,
            stages_per_rank=len(self._stages),
            n_micro_batches=len(micros),
        )
        n_left = [len(micros)] * len(self._stages)
        in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor | LossParts]] = {}
        losses = []
        for one, received in self._with_messages(passes, window):
            key = (one.chunk, one.micro_batch)
            balance, labels = self._stages[one.chunk].balance, window[one.micro_batch].labels
            if balance is not None and labels is not None:  # of a backward pass too, which may compute it again
                balance.begin_pass(labels, len(micros))
            if one.is_forward:
                inputs = None if received is None else received.requires_grad_()
                outputs = self._forward(one, inputs, window, z_loss)
                if isinstance(outputs, LossParts):
                    losses.append(outputs.cross_entropy)
                else:
                    self._send(outputs.detach(), one)
                in_flight[key] = (inputs, outputs)
                continue
            inputs, outputs = in_flight.pop(key)
            n_left[one.chunk] -= 1
            fsdp_sync = self._stages[one.chunk].fsdp_sync
            if fsdp_sync is not None:
                fsdp_sync.on_backward_begin(is_last=n_left[one.chunk] == 0)
            if isinstance(outputs, LossParts):
                outputs.total.backward(share)
            else:
                outputs.backward(received)
            if inputs is not None:
                assert inputs.grad is not None
                self._send(inputs.grad, one)
            if one.chunk == 0:  # the last of its passes
                window.release(one.micro_batch)
        self._edges.finish_sends()
        return losses

    def forward(self, micros: MicroBatches, z_loss: float | None) -> list[Any]:
        """Return the losses or the scores, as `PassRunner` says."""
        window = MicroBatchWindow(micros)
        results = []
        passes = forward_passes(pp=self._layout.pp, stages_per_rank=len(self._stages), n_micro_batches=len(micros))
        for one, received in self._with_messages(list(passes), window):
            outputs = self._forward(one, received, window, z_loss)
            if isinstance(outputs, Tensor):
                self._send(outputs, one)
            else:
                results.append(outputs)
            if one.chunk == len(self._stages) - 1:
                window.release(one.micro_batch)
        self._edges.finish_sends()
        return results

    def _with_messages(
        self, passes: Sequence[StagePass], micros: MicroBatchWindow[DeviceMicroBatch]
    ) -> Iterator[tuple[StagePass, Tensor | None]]:
        """Yield each pass with the tensor that it receives, or None; receives are posted one pass ahead."""
        waits: dict[int, Callable[[], Tensor] | None] = {}
        for index, one in enumerate(passes):
            for ahead in range(index, min(index + 2, len(passes))):
                if ahead not in waits:
                    waits[ahead] = self._post_receive(passes[ahead], micros)
            wait = waits.pop(index)
            yield one, None if wait is None else wait()

    def _post_receive(self, one: StagePass, micros: MicroBatchWindow[DeviceMicroBatch]) -> Callable[[], Tensor] | None:
        stage = self._stage_index(one)
        if stage == (0 if one.is_forward else self._n_stages - 1):
            return None
        n_rows, seq_len = micros[one.micro_batch].position_ids.shape
        hidden_size = self._stages[0].config.hidden_size
        shape = (n_rows, self._layout.positions_per_rank(seq_len * self._layout.cp), hidden_size)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._edges.receive(buffer, stage - 1 if one.is_forward else stage + 1)

    def _forward(
        self, one: StagePass, received: Tensor | None, micros: MicroBatchWindow[DeviceMicroBatch], z_loss: float | None
    ) -> Any:
        ids, positions, labels, boundaries = micros[one.micro_batch]
        inputs = ids if received is None else received
        return self._stages[one.chunk](inputs, positions, boundaries, labels, z_loss)

    def _send(self, tensor: Tensor, one: StagePass) -> None:
        stage = self._stage_index(one)
        self._edges.send(tensor, stage + 1 if one.is_forward else stage - 1)

    def _stage_index(self, one: StagePass) -> int:
        return self._layout.pp_rank + one.chunk * self._layout.pp

    @property
    def _n_stages(self) -> int:
        return self._layout.pp * len(self._stages)


class TiedGradient:
    """Sum of the gradients of a tied weight over the first and the last stage.

    Creating it is collective over all ranks; no effect on those of other stages.

    Args:
        name: the weight.
        mesh_layout: this rank's coordinates.
        timeout_s: timeout of the collective.
    """

    def __init__(self, name: str, mesh_layout: MeshLayout, timeout_s: float) -> None:
        self._name, self._group = name, new_pipeline_groups(mesh_layout, (0, mesh_layout.pp - 1), timeout_s)

    def all_reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradient over both ranks, in place; the result is equal bit for bit."""
        if self._group is not None:
            dist.all_reduce(gradients[self._name], group=self._group)
