"""A step on a lazy device: accumulate gradients, sum them over ranks, clip, update. Nothing here waits for the device.

Two graphs serve every step: one of a micro-batch (forward, backward, add), run as often as there are micro-batches, and
one of the update. With `whole` they are one graph, which grows with the number of micro-batches: for few of them it
saves launches, for many no compiler takes it. (With pipeline stages a micro-batch is several graphs, see `pipeline`.)
Everything that a graph reads or writes has its place from the start: gradients are added into memory that the update
sets to zero, so the first micro-batch is no special case.

ZeRO-1 cuts each tensor of a rank along its rows over the data-parallel ranks, with rows of zeros to make them divide
(NxD's shards): gradients are reduce-scattered, the rows of the masters updated, the weights gathered and cast. The loss
was divided by the tokens of the global batch, so gradients are summed and not averaged.

The norm counts every parameter of the model once: a tensor that several ranks hold alike is counted by the first.

A tied embedding is on the first and on the last stage, and each has a part of its gradient. Their sum is made over all
stages, of which the others add zeros: that takes no groups of ranks beside NxD's. It has a graph of its own, for a
compiler may order what is in a graph otherwise on one stage than on another.

Cost: per step and parameter one reduce-scatter and one all-gather over the data-parallel ranks; all-reduces of two
numbers; for a tied embedding on stages one more all-reduce, and on the stages between a gradient of zeros. Memory:
gradients, masters and moments as `Precision` says, the last three cut by ZeRO-1 (gradients are not).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_ckpt.nxd.zero import shard_rows
from lt_trainer.sections import OptimizerOptions
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.adamw import AdamW
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.ranks import Ranks

__all__ = ["AfterMicro", "Passes", "Precision", "Step", "Weight"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a run, as torch knows them.

    Attributes:
        compute: of the layers' weights and what they compute.
        master: of masters, moments and added-up gradients.
        wide: of norms, softmax and the loss.
    """

    compute: torch.dtype
    master: torch.dtype
    wide: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One of a rank's tensors.

    Attributes:
        parameter: what the layers compute with.
        decays: whether weight decay applies.
        counted: runs of rows (begin, end) whose gradient this rank counts in the norm.
        summed_over_tp: each tensor-parallel rank has its own part of the gradient (norms under sequence parallelism).
    """

    parameter: nn.Parameter
    decays: bool
    counted: tuple[tuple[int, int], ...]
    summed_over_tp: bool = False


class AfterMicro(Protocol):
    """What is called after a micro-batch's backward pass."""

    def __call__(self, cross_entropy: Tensor) -> None:
        """End the graph, unless the step is one. `cross_entropy`: a scalar, the sum; zero where a stage has no loss."""
        ...


class Passes(Protocol):
    """Forward and backward of micro-batches; adds to the parameters' gradients."""

    def train(self, micros: Sequence[Tensor], valid_tokens: Tensor, after: AfterMicro) -> None:
        """Run the micro-batches; `after` is told each one's cross-entropy when its backward pass is written down."""
        ...

    def evaluate(self, micros: Sequence[Tensor]) -> Tensor:
        """The summed cross-entropy of the micro-batches, without gradients."""
        ...


class Step:
    """See the module's text.

    Args:
        weights: this rank's tensors by NxD's key, each memory once.
        options: the recipe's `[optimizer]`.
        precision: dtypes.
        device: where they lie.
        ranks: the other ranks.
        grid: this rank's place.
        zero1: cut the optimizer's tensors over data-parallel ranks.
        whole: one graph per step.
        tied: key of the tied embedding (on the last stage, of the head) and shape, where stages have parts of its
            gradient; on stages without it the key is not among the weights.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        options: OptimizerOptions,
        *,
        precision: Precision,
        device: TensorDevice,
        ranks: Ranks,
        grid: Grid,
        zero1: bool,
        whole: bool = False,
        tied: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._weights, self._options, self._precision = weights, options, precision
        self._tied = tied
        self._device, self._ranks, self._grid, self._whole = device, ranks, grid, whole
        self._cut = zero1 and grid.dp > 1
        self._own = not self._cut and precision.compute == precision.master
        """The layers' weights are what the optimizer updates."""
        self.masters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        with torch.no_grad():
            for key, weight in weights.items():
                parameter = weight.parameter
                gradient = torch.zeros_like(parameter, dtype=precision.master)
                self._gradients[key] = gradient
                if precision.compute == precision.master:
                    parameter.grad = gradient  # autograd adds in place
                self.masters[key] = parameter if self._own else torch.zeros_like(self._rows(gradient))
        decays = frozenset(key for key, weight in weights.items() if weight.decays)
        self.optimizer = AdamW(self.masters, decays, options)
        self._loss = torch.zeros((), dtype=precision.wide, device=device.torch_device)
        device.mark()  # what was just made is data of the first graph, as it will be of all others

    @property
    def cut(self) -> bool:
        """Whether the optimizer's tensors are rows of the layers'."""
        return self._cut

    def _rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows with the padding, as a shape to copy; the whole tensor without ZeRO-1."""
        if not self._cut:
            return tensor
        _, _, stored = shard_rows(tensor.shape[0], self._grid.dp, self._grid.dp_rank)
        return tensor.new_empty((stored, *tensor.shape[1:]))

    @torch.no_grad()
    def masters_to_weights(self) -> None:
        """Give the layers their weights: gathered and cast."""
        if not self._own:
            for key, weight in self._weights.items():
                weight.parameter.copy_(self._gathered(self.masters[key], weight.parameter))
        self._device.mark()

    def _gathered(self, master: Tensor, like: Tensor) -> Tensor:
        rows = master.to(like.dtype)
        return self._ranks.gathered(rows, "dp")[: like.shape[0]] if self._cut else rows

    def accumulate(self, passes: Passes, micros: Sequence[Tensor], valid_tokens: int) -> Tensor:
        """Forward and backward of every micro-batch.

        Args:
            passes: what runs them.
            micros: their numbers, on the device already or on their way.
            valid_tokens: of the global batch.

        Returns:
            This rank's cross-entropy divided by `valid_tokens`, a scalar on the device.
        """
        valid = self._device.scalar(valid_tokens, self._precision.wide)

        def after(cross_entropy: Tensor) -> None:
            with torch.no_grad():
                self._loss.add_(cross_entropy.to(self._loss.dtype))
                if self._precision.compute != self._precision.master:
                    for key, weight in self._weights.items():
                        if weight.parameter.grad is not None:
                            self._gradients[key].add_(weight.parameter.grad.to(self._precision.master))
                            weight.parameter.grad = None
            if not self._whole:
                self._device.mark()

        passes.train(micros, valid, after)
        return self._loss / valid

    @torch.no_grad()
    def update(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Sum over ranks, clip, update, forget the gradients.

        Returns:
            The loss of the global batch and the norm of its gradient before clipping.
        """
        if self._tied:
            self._sum_over_stages(*self._tied)
        gradients = {key: self._summed(key, weight) for key, weight in self._weights.items()}
        loss, norm = self._agree(loss, gradients)
        most = self._options.grad_clip
        scale = (most / (norm + 1e-6)).clamp(max=1.0) if most > 0 else torch.ones_like(norm)
        self.optimizer.update(
            self.masters,
            gradients,
            self._device.scalar(lr, self._precision.master),
            torch.isfinite(loss) & torch.isfinite(norm),
            scale.to(self._precision.master),
        )
        for gradient in self._gradients.values():
            gradient.zero_()
        self._loss.zero_()
        if not self._own:
            for key, weight in self._weights.items():
                weight.parameter.copy_(self._gathered(self.masters[key], weight.parameter))
        return loss, norm

    def _sum_over_stages(self, key: str, shape: tuple[int, ...]) -> None:
        """Give the gradient of the tied embedding the parts of all stages."""
        self._device.mark()
        mine = self._gradients.get(key)
        if mine is None:
            zeros = torch.zeros(shape, dtype=self._precision.master, device=self._device.torch_device)
            kept = self._ranks.summed(zeros, "pp")
        else:
            kept = mine.copy_(self._ranks.summed(mine, "pp"))
        self._device.mark()
        del kept  # until here: a result that nobody has is in no graph

    def _summed(self, key: str, weight: Weight) -> Tensor:
        """The gradient of this rank's rows, summed over all ranks that have a part of it."""
        gradient = self._gradients[key]
        if weight.summed_over_tp:
            gradient = self._ranks.summed(gradient, "tp")
        if self._cut:
            rows = gradient.shape[0]
            _, _, stored = shard_rows(rows, self._grid.dp, self._grid.dp_rank)
            padding = [0, 0] * (gradient.ndim - 1) + [0, stored * self._grid.dp - rows]
            gradient = self._ranks.scattered(F.pad(gradient, padding), "dp")
        else:
            gradient = self._ranks.summed(gradient, "dp")
        return gradient

    def _agree(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the norm, over all ranks."""
        wide = self._precision.wide
        squares = torch.zeros((), dtype=wide, device=loss.device)
        for key, weight in self._weights.items():
            for begin, end in self._counted(key, weight):
                squares = squares + gradients[key][begin:end].to(wide).square().sum()
        speaks = self._grid.tp_rank == 0 and self._grid.last_stage
        both = torch.stack((loss.to(wide) if speaks else torch.zeros_like(squares), squares))
        for axis in ("dp", "tp", "pp"):
            counted_already = axis == "dp" and not self._cut
            summed = self._ranks.summed(both, axis)
            both = torch.stack((summed[0], both[1])) if counted_already else summed
        return both[0], both[1].sqrt()

    def _counted(self, key: str, weight: Weight) -> Iterator[tuple[int, int]]:
        """Runs of this rank's rows that it counts."""
        if not self._cut:
            yield from weight.counted
            return
        first, held, _ = shard_rows(weight.parameter.shape[0], self._grid.dp, self._grid.dp_rank)
        for begin, end in weight.counted:
            begin, end = max(begin, first), min(end, first + held)
            if begin < end:
                yield begin - first, end - first
