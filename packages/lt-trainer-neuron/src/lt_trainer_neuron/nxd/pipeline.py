"""Forward and backward of micro-batches where layers are on several stages, in the order of `schedule`.

A graph ends after each turn, so that a transfer is alone in its graph (`ranks` says why); but the last stage's forward
pass and the backward pass that follows at once are one graph, and nothing of theirs is kept between. So a stage has at
most six graphs beside that of the update, whatever the number of micro-batches:

    first                      between                                              last
    forward, give output,      take input, forward, give output,                    take input, forward and backward,
    take gradient, backward    take gradient, backward, give gradient               give gradient

What a forward pass keeps for its backward pass crosses from one graph to another: it lies in memory, for min(P - s, M)
micro-batches on stage s of P. Shapes and dtypes are the same for all micro-batches and known to both sides.

Cost: two transfers per micro-batch and pair of stages, of one hidden state per position each (with sequence parallelism
of this rank's positions).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.passes import StageLoss
from lt_trainer_neuron.nxd.ranks import Neighbours, Way
from lt_trainer_neuron.nxd.step import AfterMicro
from lt_trainer_neuron.schedule import forward_only, one_forward_one_backward

__all__ = ["Pipelined"]


class Pipelined:
    """See the module's text.

    Args:
        stage: this rank's layers, with the loss on the last stage.
        neighbours: the stages before and after.
        device: where tensors lie.
        grid: this rank's place.
        dtype: of what stages hand over.
    """

    def __init__(
        self, stage: StageLoss, neighbours: Neighbours, *, device: TensorDevice, grid: Grid, dtype: torch.dtype
    ) -> None:
        self._stage, self._neighbours, self._device = stage, neighbours, device
        self._place, self._last, self._dtype = (grid.pp_rank, grid.pp), grid.last_stage, dtype

    def train(self, micros: Sequence[Tensor], valid_tokens: Tensor, after: AfterMicro) -> None:
        """Run the micro-batches forward and backward, in turn with the other stages."""
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        cross_entropy: dict[int, Tensor] = {}
        self._device.mark()  # what was written down before is in none of these graphs
        for kind, index in one_forward_one_backward(*self._place, len(micros)):
            micro = micros[index]
            match kind:
                case "take input":
                    inputs[index] = self._taken(micro, "onward").requires_grad_()
                case "forward":
                    outputs[index] = self._stage.forward(inputs.get(index), micro)
                    if self._last:
                        parts = self._stage.loss(outputs[index], micro, training=True)
                        outputs[index], cross_entropy[index] = parts.total / valid_tokens, parts.cross_entropy
                    else:
                        self._device.mark()
                case "give output":
                    self._give(outputs[index], "onward")
                case "take gradient":
                    gradients[index] = self._taken(micro, "back")
                case "backward":
                    outputs.pop(index).backward(gradients.pop(index, None))
                    after(cross_entropy.pop(index) if self._last else self._stage.no_loss(micro))  # ends the graph
                case "give gradient":
                    gradient = inputs.pop(index).grad
                    assert gradient is not None
                    self._give(gradient, "back")

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Tensor]) -> Tensor:
        """The summed cross-entropy; zero on every stage but the last."""
        losses: list[Tensor] = []
        passing: Tensor | None = None
        self._device.mark()
        for kind, index in forward_only(*self._place, len(micros)):
            match kind:
                case "take input":
                    passing = self._taken(micros[index], "onward")
                case "forward":
                    passing = self._stage.forward(passing, micros[index])
                    if self._last:
                        losses.append(self._stage.loss(passing, micros[index], training=False).cross_entropy)
                        passing = None
                    self._device.mark()
                case _:
                    assert passing is not None
                    self._give(passing, "onward")
                    passing = None
        return torch.stack(losses).sum() if self._last else self._stage.no_loss(micros[0])

    def _taken(self, micro: Tensor, way: Way) -> Tensor:
        taken = self._neighbours.take(self._stage.shape_between(micro), self._dtype, way)
        self._device.mark()
        return taken

    def _give(self, tensor: Tensor, way: Way) -> None:
        kept = self._neighbours.give(tensor.detach(), way)
        self._device.mark()
        del kept  # until here: a result that nobody has is in no graph
