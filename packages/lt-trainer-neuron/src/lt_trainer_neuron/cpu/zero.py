"""AdamW with ZeRO-1 as NxD does it: each data-parallel rank updates its run of rows of every tensor.

A tensor is padded with rows of zeros to a multiple of the data-parallel degree and cut along its rows
(`lt_ckpt.nxd.zero.shard_rows`). Per step, in this order:

1. gradients that ranks have parts of are summed: norms over tensor-parallel ranks under sequence parallelism,
   replicated key/value heads over the ranks that have them, a tied embedding over the first and the last stage;
2. the sum over data-parallel ranks, of which each keeps its rows;
3. the norm over all ranks, each element of the model counted once (or, as NxD counts, each copy of a head), clipping;
4. AdamW on fp32 (float64) masters:  m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
   w = w (1 - lr d) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps);
5. the masters' rows are gathered and rounded into the layers' weights.

Where the loss or the norm is not finite, 4 changes nothing.

Cost: fp32 gradients, masters and two moments beside the weights, the last three divided by the data-parallel degree.
The sum over data-parallel ranks is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_ckpt.nxd.zero import shard_rows
from lt_trainer.sections import OptimizerOptions
from lt_trainer_neuron.backend import MASTERS, MOMENTS, Rows
from lt_trainer_neuron.cpu.collectives import gathered, total
from lt_trainer_neuron.cpu.groups import Groups
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.held import EMBED, HEAD, Held, rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """What the optimizer keeps of one tensor: rows with the padding; `held` of them are the tensor's."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    first: int
    held: int
    decay: bool

    def rows(self, tensor: Tensor) -> Rows:
        """The rows of one of the tensors that are not padding."""
        return Rows(local=tensor[: self.held], first=self.first)


class ZeroAdamW:
    """See the module's text.

    Args:
        weights: the layers', by NxD's key.
        held: what they are made of.
        decays: names of the model tensors that decay.
        options: the recipe's `[optimizer]`.
        grid: this rank's place.
        groups: its groups.
        shard: whether data-parallel ranks share the rows; else each updates all.
        sequence: whether norms see only this rank's positions.
        count_copies: whether the norm counts each copy of a replicated key/value head.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        held: Mapping[str, tuple[Held, ...]],
        decays: set[str],
        options: OptimizerOptions,
        *,
        grid: Grid,
        groups: Groups,
        shard: bool,
        sequence: bool,
        count_copies: bool,
    ) -> None:
        self._options, self._grid, self._groups = options, grid, groups
        self._shard, self._sequence, self._count_copies = shard, sequence, count_copies
        # A tied head on the only stage is the embedding: one tensor, one slot.
        self._weights = {key: one for key, one in weights.items() if key != HEAD or one is not weights.get(EMBED)}
        self._held = held
        self._gradients: dict[str, Tensor] = {}
        self.steps = torch.zeros((), dtype=torch.int64)
        self.slots = {key: self._slot(one, held[key][0].name in decays) for key, one in self._weights.items()}

    def _slot(self, weight: Tensor, decay: bool) -> Slot:
        parts, part = (self._grid.dp, self._grid.dp_rank) if self._shard else (1, 0)
        first, held, stored = shard_rows(weight.shape[0], parts, part)
        wide = torch.promote_types(weight.dtype, torch.float32)
        narrow = torch.bfloat16 if self._options.moments == "bfloat16" else wide
        shape = (stored, *weight.shape[1:])
        return Slot(
            master=torch.zeros(shape, dtype=wide),
            exp_avg=torch.zeros(shape, dtype=narrow),
            exp_avg_sq=torch.zeros(shape, dtype=narrow),
            first=first,
            held=held,
            decay=decay,
        )

    @property
    def groups(self) -> dict[str, dict[str, Rows]]:
        """The state by group, as `Backend.slots`."""
        tensors = {MASTERS: "master"} | {moment: moment for moment in MOMENTS}
        return {
            group: {key: slot.rows(getattr(slot, field)) for key, slot in self.slots.items()}
            for group, field in tensors.items()
        }

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add what backward has left at the weights, in fp32 or wider, and take it away."""
        for key, weight in self._weights.items():
            assert weight.grad is not None, f"{key} has no gradient"
            if key in self._gradients:
                self._gradients[key] += weight.grad
            else:
                self._gradients[key] = weight.grad.to(self.slots[key].master.dtype)
            weight.grad = None

    @torch.no_grad()
    def step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """The step of the module's text; `loss` is this rank's share of the global loss."""
        gradients = {key: self._summed(key, gradient) for key, gradient in self._gradients.items()}
        self._gradients.clear()
        both = total(torch.stack((loss, self._squares(gradients))), self._groups.world)
        loss, norm = both[0], both[1].sqrt()
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        most = self._options.grad_clip
        scale = (most / (norm + 1e-6)).clamp(max=1.0) if most > 0 else torch.ones_like(norm)
        self.steps += finite
        for key, gradient in gradients.items():
            self._update(self.slots[key], gradient * scale.to(gradient.dtype), lr, finite)
        self.masters_changed()
        return loss, norm

    def _summed(self, key: str, gradient: Tensor) -> Tensor:
        """The rows that this rank updates of the gradient of the whole batch."""
        boxes = self._held[key]
        if self._sequence and gradient.ndim == 1:
            gradient = total(gradient, self._groups.tp)
        for box in boxes:
            if _is_replicated_head(box):
                rows = slice(box.row, box.row + box.shape[0])
                gradient[rows] = total(gradient[rows], self._groups.heads)
        if len({stage for stage, _ in boxes[0].holders}) > 1:
            gradient = total(gradient, self._groups.ends)
        gradient = total(gradient, self._groups.dp)
        slot = self.slots[key]
        own = torch.zeros_like(slot.master)
        own[: slot.held] = gradient[slot.first : slot.first + slot.held]
        return own

    def _squares(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of what this rank counts of the gradient, float64."""
        squares = torch.zeros((), dtype=torch.float64)
        if not self._shard and self._grid.dp_rank:
            return squares
        for key, gradient in gradients.items():
            slot = self.slots[key]
            for box in self._held[key]:
                copies = self._count_copies and _is_replicated_head(box)
                part = rows_of(box, slot.first, slot.held) if copies or box.copy_of(self._grid) == 0 else None
                if part is not None:
                    squares += gradient[part.row : part.row + part.shape[0]].to(torch.float64).square().sum()
        return squares

    def _update(self, slot: Slot, gradient: Tensor, lr: float, finite: Tensor) -> None:
        beta1, beta2 = self._options.beta1, self._options.beta2
        decay = self._options.weight_decay if slot.decay else 0.0
        wide = slot.master.dtype
        step = self.steps.clamp(min=1).to(torch.float64)
        first = torch.lerp(slot.exp_avg.to(wide), gradient, 1 - beta1)
        second = slot.exp_avg_sq.to(wide) * beta2 + gradient.square() * (1 - beta2)
        root = (second / (1 - beta2**step).to(wide)).sqrt() + self._options.eps
        moved = slot.master * (1 - lr * decay) - lr * (first / (1 - beta1**step).to(wide)) / root
        for kept, new in ((slot.master, moved), (slot.exp_avg, first), (slot.exp_avg_sq, second)):
            kept.copy_(torch.where(finite, new.to(kept.dtype), kept))

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Gather the masters and round them into the layers' weights."""
        for key, weight in self._weights.items():
            rows = self.slots[key].master.to(weight.dtype)
            whole = gathered(rows, self._groups.dp, dim=0) if self._shard else rows
            weight.copy_(whole[: weight.shape[0]])


def _is_replicated_head(box: Held) -> bool:
    return len(box.holders) > 1 and box.name.endswith(("k_proj.weight", "v_proj.weight"))
