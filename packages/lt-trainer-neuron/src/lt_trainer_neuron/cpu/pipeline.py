"""Pipeline execution of a step's micro-batches in the order of `pipeline_schedule`.

With one stage this is a plain loop. Sends block until they are received, as the collectives on the device do: a
schedule that would deadlock there deadlocks here.

Cost: activations of at most P micro-batches per stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_trainer_neuron.cpu.collectives import RankGroup
from lt_trainer_neuron.cpu.stage import CpuPipelineStage, MicroBatch
from lt_trainer_neuron.pipeline_schedule import forward_only, one_forward_one_backward


class PipelineSchedule:
    """Pipeline schedule of one stage.

    Args:
        stage: this rank's layers.
        pp_group: ranks of all stages, including this one.
        dtype: dtype of activations sent between stages.
    """

    def __init__(self, stage: CpuPipelineStage, pp_group: RankGroup, dtype: torch.dtype) -> None:
        self._stage, self._pp_group, self._dtype = stage, pp_group, dtype
        self._is_last_stage = pp_group.rank == pp_group.size - 1

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_scale: float, z_loss: float, on_backward_end: Any
    ) -> Tensor:
        """Run forward and backward of all micro-batches.

        Args:
            micro_batches: the micro-batches.
            loss_scale: factor applied to the loss before the backward pass.
            z_loss: coefficient of logsumexp(logits)^2.
            on_backward_end: called after each backward pass.

        Returns:
            Summed cross-entropy, float64; 0 on every stage but the last.
        """
        loss_sum = torch.zeros((), dtype=torch.float64)
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        for kind, index in one_forward_one_backward(self._pp_group.rank, self._pp_group.size, len(micro_batches)):
            match kind:
                case "recv_forward":
                    inputs[index] = self._recv(micro_batches[index], -1, index).requires_grad_()
                case "forward":
                    outputs[index] = self._stage.forward(micro_batches[index], inputs.get(index))
                    if self._is_last_stage:
                        parts = self._stage.loss(outputs[index], micro_batches[index], z_loss)
                        loss_sum += parts.cross_entropy
                        outputs[index] = parts.total * loss_scale
                case "send_forward":
                    self._send(outputs[index].detach(), 1, index)
                case "recv_backward":
                    gradients[index] = self._recv(micro_batches[index], 1, index)
                case "backward":
                    outputs.pop(index).backward(gradients.pop(index, None))
                    on_backward_end()
                case "send_backward":
                    gradient = inputs.pop(index).grad
                    assert gradient is not None
                    self._send(gradient, -1, index)
        return loss_sum

    @torch.no_grad()
    def validate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the summed cross-entropy, float64; 0 on every stage but the last."""
        loss_sum = torch.zeros((), dtype=torch.float64)
        for hidden, micro_batch in self._forward_all(micro_batches):
            loss_sum += self._stage.loss(hidden, micro_batch, 0.0).cross_entropy
        return loss_sum

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Return log-probability and greedy flag of labels, [2, M, B * T]; None on all stages but the last."""
        scores = [self._stage.scores(*outputs) for outputs in self._forward_all(micro_batches)]
        if not self._is_last_stage:
            return None
        return torch.stack([torch.stack([s.log_probs, s.is_greedy.to(s.log_probs.dtype)]) for s in scores], dim=1)

    def _forward_all(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, MicroBatch]]:
        """Run the forward passes; on the last stage, yield its output and the micro-batch of each."""
        activation: Tensor | None = None
        for kind, index in forward_only(self._pp_group.rank, self._pp_group.size, len(micro_batches)):
            match kind:
                case "recv_forward":
                    activation = self._recv(micro_batches[index], -1, index)
                case "forward":
                    activation = self._stage.forward(micro_batches[index], activation)
                    if self._is_last_stage:
                        yield activation, micro_batches[index]
                        activation = None
                case _:
                    assert activation is not None
                    self._send(activation, 1, index)
                    activation = None

    def _recv(self, micro: MicroBatch, stage_offset: int, tag: int) -> Tensor:
        buffer = torch.empty(self._stage.activation_shape(micro), dtype=self._dtype)
        dist.recv(
            buffer,
            self._pp_group.ranks[self._pp_group.rank + stage_offset],
            group=self._pp_group.process_group,
            tag=tag,
        )
        return buffer

    def _send(self, x: Tensor, stage_offset: int, tag: int) -> None:
        dist.send(
            x.contiguous(),
            self._pp_group.ranks[self._pp_group.rank + stage_offset],
            group=self._pp_group.process_group,
            tag=tag,
        )
