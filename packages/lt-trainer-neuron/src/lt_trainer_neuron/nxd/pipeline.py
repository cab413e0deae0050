"""Forward and backward of micro-batches in the order of `pipeline_schedule`, over stages or on the only one.

With one stage there are no transfers, and graphs end where the caller ends them. Else a graph ends after each action,
so that a transfer is alone in its graph (see `collectives`); but the last stage's forward pass and the backward pass
right after it are one graph, with no activations kept between graphs. So a stage has at most six graphs besides that of
the optimizer step, whatever the number of micro-batches:

    first                           middle                                      last
    forward, send output,           receive input, forward, send output,        receive input, forward and backward,
    receive gradient, backward      receive gradient, backward, send gradient   send gradient

Activations that a forward pass keeps for its backward pass cross graphs: they stay in memory, for min(P - s, M)
micro-batches on stage s of P. Shapes and dtypes are equal for all micro-batches and known to both sides.

Cost: two transfers per micro-batch and pair of adjacent stages, each of one hidden state per position (with sequence
parallelism, of this rank's positions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lt_trainer.data.micro_batch_window import MicroBatchWindow
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.collectives import Direction, PipelineP2P
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.stage_loss import StageWithLoss
from lt_trainer_neuron.pipeline_schedule import forward_only, one_forward_one_backward


class PipelineSchedule:
    """Schedule of one stage.

    Args:
        stage: this rank's layers, with the loss used on the last stage.
        p2p: transfers with the adjacent stages; None: there are none.
        device: tensor device.
        grid: this rank's coordinates.
        dtype: dtype of activations sent between stages.
    """

    def __init__(
        self, stage: StageWithLoss, p2p: PipelineP2P | None, *, device: TensorDevice, grid: Grid, dtype: torch.dtype
    ) -> None:
        self._stage, self._p2p, self._device = stage, p2p, device
        self._stage_and_count, self._is_last_stage, self._dtype = (grid.pp_rank, grid.pp), grid.is_last_stage, dtype

    def forward_backward(
        self,
        micro_batches: Iterable[Tensor],
        n_micro_batches: int,
        valid_tokens: Tensor,
        on_micro_batch_end: Callable[[Tensor], None],
    ) -> None:
        """Run forward and backward of all micro-batches with the 1F1B schedule.

        Args:
            micro_batches: micro-batches on the device, each made for its first action and let go after its last.
            n_micro_batches: number of them.
            valid_tokens: divisor of the loss.
            on_micro_batch_end: called after each backward pass with the summed cross-entropy, zero on stages without
                loss; accumulates it and ends the graph, unless the step is one graph.
        """
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        cross_entropy: dict[int, Tensor] = {}
        window = MicroBatchWindow(micro_batches)
        self._mark_step()  # operations recorded before must not join these graphs
        for kind, index in one_forward_one_backward(*self._stage_and_count, n_micro_batches):
            match kind:
                case "recv_forward":
                    inputs[index] = self._recv(window[index], "forward").requires_grad_()
                case "forward":
                    micro = window[index]
                    outputs[index] = self._stage.forward(inputs.get(index), micro)
                    if self._is_last_stage:
                        parts = self._stage.loss(outputs[index], micro, training=True)
                        outputs[index], cross_entropy[index] = parts.total / valid_tokens, parts.cross_entropy
                    else:
                        self._mark_step()
                case "send_forward":
                    self._send(outputs[index], "forward")
                case "recv_backward":
                    gradients[index] = self._recv(window[index], "backward")
                case "backward":
                    micro = window[index]
                    window.release(index)
                    outputs.pop(index).backward(gradients.pop(index, None))
                    on_micro_batch_end(
                        cross_entropy.pop(index) if self._is_last_stage else self._stage.zero_loss(micro)
                    )  # ends the graph
                case "send_backward":
                    gradient = inputs.pop(index).grad
                    assert gradient is not None
                    self._send(gradient, "backward")

    @torch.no_grad()
    def validate(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Return the summed cross-entropy; zero on every stage but the last."""
        losses = self._forward_all(
            micro_batches, lambda logits, micro: self._stage.loss(logits, micro, training=False).cross_entropy
        )
        return torch.stack(losses).sum() if self._is_last_stage else self._stage.zero_loss(micro_batches[0])

    @torch.no_grad()
    def score(self, micro_batches: Sequence[Tensor]) -> Tensor | None:
        """Return log-probability and greedy flag of labels, [2, M, B * T]; None on all stages but the last."""
        scores = self._forward_all(micro_batches, self._stage.scores)
        return torch.stack(scores, dim=1) if self._is_last_stage else None

    def _forward_all(
        self, micro_batches: Sequence[Tensor], on_logits: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """Run the forward passes; on the last stage, return `on_logits(logits, micro_batch)` of each."""
        results: list[Tensor] = []
        activation: Tensor | None = None
        self._mark_step()
        for kind, index in forward_only(*self._stage_and_count, len(micro_batches)):
            match kind:
                case "recv_forward":
                    activation = self._recv(micro_batches[index], "forward")
                case "forward":
                    activation = self._stage.forward(activation, micro_batches[index])
                    if self._is_last_stage:
                        results.append(on_logits(activation, micro_batches[index]))
                        activation = None
                    self._mark_step()
                case _:
                    assert activation is not None
                    self._send(activation, "forward")
                    activation = None
        return results

    def _mark_step(self) -> None:
        if self._p2p is not None:
            self._device.mark_step()

    def _recv(self, micro_batch: Tensor, direction: Direction) -> Tensor:
        assert self._p2p is not None
        received = self._p2p.recv(self._stage.activation_shape(micro_batch), self._dtype, direction)
        self._mark_step()
        return received

    def _send(self, tensor: Tensor, direction: Direction) -> None:
        assert self._p2p is not None
        sent = self._p2p.send(tensor.detach(), direction)
        self._mark_step()
        del sent  # kept until here: unreferenced results are dropped from the graph
