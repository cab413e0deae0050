"""The order of a step's micro-batches over pipeline stages: one forward, one backward (1F1B).

Stage s of P first runs min(P - 1 - s, M) micro-batches forward, then one forward and one backward in turn, then what
is left backward (PipeDream-Flush, arXiv:2006.09503). With one stage that is a plain loop. Sends are begun and waited
for at the end of the step, so that no two stages wait for each other; micro-batches have their own tags.

Cost: at most P micro-batches' activations on a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lt_trainer_neuron.cpu.collectives import Peers
from lt_trainer_neuron.cpu.stage import Micro, Stage

Turn = tuple[Literal["forward", "backward"], int]


def turns(stage: int, n_stages: int, n_micro: int) -> Iterator[Turn]:
    """What a stage does, one after the other: a pass and the number of its micro-batch."""
    ahead = min(n_stages - 1 - stage, n_micro)
    for index in range(ahead):
        yield "forward", index
    for index in range(ahead, n_micro):
        yield "forward", index
        yield "backward", index - ahead
    for index in range(n_micro - ahead, n_micro):
        yield "backward", index


class Pipeline:
    """One stage among its peers.

    Args:
        stage: this rank's layers.
        peers: the ranks of all stages, of which this is one.
        dtype: of what stages hand over.
    """

    def __init__(self, stage: Stage, peers: Peers, dtype: torch.dtype) -> None:
        self._stage, self._peers, self._dtype = stage, peers, dtype
        self._first, self._last = peers.rank == 0, peers.rank == peers.size - 1
        self._sent: list[tuple[Any, Tensor]] = []

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
        open_passes: dict[int, tuple[Tensor | None, Tensor]] = {}
        for kind, index in turns(self._peers.rank, self._peers.size, len(micros)):
            if kind == "forward":
                received = self._receive(micros[index], self._peers.rank - 1, index)
                output = self._stage.forward(micros[index], received)
                if self._last:
                    loss, cross_entropy = self._stage.loss(output, micros[index], z_loss)
                    loss_sum += cross_entropy
                    output = loss * scale
                else:
                    self._send(output.detach(), self._peers.rank + 1, index)
                open_passes[index] = received, output
            else:
                received, output = open_passes.pop(index)
                upstream = None if self._last else self._receive(micros[index], self._peers.rank + 1, index)
                output.backward(upstream)
                if received is not None:
                    assert received.grad is not None
                    self._send(received.grad, self._peers.rank - 1, index)
                after_backward()
        self._wait()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Micro]) -> Tensor:
        """The summed cross-entropy, float64; 0 on every stage but the last."""
        loss_sum = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(micros):
            output = self._stage.forward(micro, self._receive(micro, self._peers.rank - 1, index))
            if self._last:
                loss_sum += self._stage.loss(output, micro, 0.0)[1]
            else:
                self._send(output, self._peers.rank + 1, index)
        self._wait()
        return loss_sum

    def _receive(self, micro: Micro, stage: int, tag: int) -> Tensor | None:
        if stage < 0:
            return None
        box = torch.empty(self._stage.shape_between(micro), dtype=self._dtype)
        dist.recv(box, self._peers.ranks[stage], group=self._peers.group, tag=tag)
        return box.requires_grad_(torch.is_grad_enabled())

    def _send(self, x: Tensor, stage: int, tag: int) -> None:
        kept = x.contiguous()
        self._sent.append((dist.isend(kept, self._peers.ranks[stage], group=self._peers.group, tag=tag), kept))

    def _wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
