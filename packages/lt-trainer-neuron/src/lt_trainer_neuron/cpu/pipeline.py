"""A step's micro-batches over pipeline stages, in the order of `schedule`; with one stage that is a plain loop.

Sends block until they are received, as the collectives of the device do: what would hang there hangs here.

Cost: at most P micro-batches' activations on a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_trainer_neuron.cpu.collectives import Peers
from lt_trainer_neuron.cpu.stage import Micro, Stage
from lt_trainer_neuron.schedule import forward_only, one_forward_one_backward


class Pipeline:
    """One stage among its peers.

    Args:
        stage: this rank's layers.
        peers: the ranks of all stages, of which this is one.
        dtype: of what stages hand over.
    """

    def __init__(self, stage: Stage, peers: Peers, dtype: torch.dtype) -> None:
        self._stage, self._peers, self._dtype = stage, peers, dtype
        self._last = peers.rank == peers.size - 1

    def train(self, micros: Sequence[Micro], scale: float, z_loss: float, after_backward: Any) -> Tensor:
        """All passes of a step.

        Args:
            micros: the micro-batches.
            scale: what the loss is multiplied with before it is differentiated.
            z_loss: coefficient of logsumexp(logits)^2.
            after_backward: called after each backward pass.

        Returns:
            The summed cross-entropy, float64; 0 on every stage but the last.
        """
        loss_sum = torch.zeros((), dtype=torch.float64)
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        for kind, index in one_forward_one_backward(self._peers.rank, self._peers.size, len(micros)):
            match kind:
                case "take input":
                    inputs[index] = self._take(micros[index], -1, index).requires_grad_()
                case "forward":
                    outputs[index] = self._stage.forward(micros[index], inputs.get(index))
                    if self._last:
                        loss, cross_entropy = self._stage.loss(outputs[index], micros[index], z_loss)
                        loss_sum += cross_entropy
                        outputs[index] = loss * scale
                case "give output":
                    self._give(outputs[index].detach(), 1, index)
                case "take gradient":
                    gradients[index] = self._take(micros[index], 1, index)
                case "backward":
                    outputs.pop(index).backward(gradients.pop(index, None))
                    after_backward()
                case "give gradient":
                    gradient = inputs.pop(index).grad
                    assert gradient is not None
                    self._give(gradient, -1, index)
        return loss_sum

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Micro]) -> Tensor:
        """The summed cross-entropy, float64; 0 on every stage but the last."""
        loss_sum = torch.zeros((), dtype=torch.float64)
        passing: Tensor | None = None
        for kind, index in forward_only(self._peers.rank, self._peers.size, len(micros)):
            match kind:
                case "take input":
                    passing = self._take(micros[index], -1, index)
                case "forward":
                    passing = self._stage.forward(micros[index], passing)
                    if self._last:
                        loss_sum += self._stage.loss(passing, micros[index], 0.0)[1]
                        passing = None
                case _:
                    assert passing is not None
                    self._give(passing, 1, index)
                    passing = None
        return loss_sum

    def _take(self, micro: Micro, step: int, tag: int) -> Tensor:
        box = torch.empty(self._stage.shape_between(micro), dtype=self._dtype)
        dist.recv(box, self._peers.ranks[self._peers.rank + step], group=self._peers.group, tag=tag)
        return box

    def _give(self, x: Tensor, step: int, tag: int) -> None:
        dist.send(x.contiguous(), self._peers.ranks[self._peers.rank + step], group=self._peers.group, tag=tag)
