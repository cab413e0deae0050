"""Which part of which model tensor lies where in a rank's tensors. Pure arithmetic over `lt_ckpt.nxd.layout`.

A rank holds tensors under NxD's keys; each is made of boxes of model tensors, one below the other. Some boxes are held
by several ranks: norms by all tensor-parallel ranks, a replicated key/value head by those that use it, a tied head by
the last stage beside the embedding on the first. ZeRO-1 cuts a rank's tensor along its rows once more, so what the
optimizer of a rank has of a model tensor is the box of those rows.

Cost: one small object per tensor and rank of the whole run (256 ranks of a 70B model: some 20 thousand).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lt_ckpt.models import EMBED, HEAD
from lt_ckpt.nxd.layout import nxd_layout

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import NxdOptions
    from lt_model import LlamaConfig
    from lt_trainer_neuron.grid import Grid

__all__ = ["EMBED", "HEAD", "Held", "Holder", "held_by", "replicated_heads", "rows_of"]

Holder = tuple[int, int]
"""(pp_rank, tp_rank)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A box of a model tensor in one of a rank's tensors.

    Attributes:
        name: the model tensor (the embedding, for a tied head).
        offset: where the box begins in it.
        shape: shape of the box.
        row: the row of the rank's tensor at which it begins there.
        holders: the places of all ranks that have this very box, in order of stage and tensor-parallel rank.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    row: int
    holders: tuple[Holder, ...]

    def copy_of(self, grid: Grid) -> int:
        """Which of the holders the rank is."""
        return self.holders.index((grid.pp_rank, grid.tp_rank))


def held_by(config: LlamaConfig, cut: NxdOptions, grid: Grid) -> dict[str, tuple[Held, ...]]:
    """What a rank holds: NxD's key → the boxes that its tensor is made of, from the first row to the last.

    The keys are in the order of the rank's file. A tied head on the only stage is the embedding's very tensor; its key
    is there too, with the same box.

    Raises:
        CheckpointError: the model cannot be cut so.
    """
    layout = nxd_layout(config, cut)
    tied = config.tie_word_embeddings
    places: list[Holder] = [(stage, rank) for stage in range(cut.pp) for rank in range(cut.tp)]
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Holder]] = {}
    mine: dict[str, list[Held]] = {}
    for place, file in zip(places, layout.files, strict=True):
        for tensor in file.tensors:
            for piece in tensor.pieces:
                name = EMBED if tied and piece.name == HEAD else piece.name
                having = holders.setdefault((name, piece.offset, piece.shape), [])
                if place not in having:
                    having.append(place)
                if place == (grid.pp_rank, grid.tp_rank):
                    held = Held(name=name, offset=piece.offset, shape=piece.shape, row=piece.at[0], holders=())
                    mine.setdefault(tensor.key, []).append(held)
    return {
        key: tuple(replace(box, holders=tuple(holders[box.name, box.offset, box.shape])) for box in boxes)
        for key, boxes in mine.items()
    }


def rows_of(held: Held, first: int, rows: int) -> Held | None:
    """What some rows of a rank's tensor have of a box that it is made of.

    Args:
        held: the box.
        first: the first of the rows.
        rows: how many there are.

    Returns:
        The part of the box, whose `row` counts from `first`; None where they have none of it.
    """
    begin, end = max(first, held.row), min(first + rows, held.row + held.shape[0])
    if begin >= end:
        return None
    offset = (held.offset[0] + begin - held.row, *held.offset[1:])
    return replace(held, offset=offset, shape=(end - begin, *held.shape[1:]), row=begin - first)


def replicated_heads(cut: NxdOptions, kv_heads: int) -> list[list[int]]:
    """The tensor-parallel ranks that have the same key/value head, for each head; empty where each has its own."""
    if cut.kv_multiplier == 1:
        return []
    assert cut.head_order == "trn1"
    return [list(range(head, cut.tp, kv_heads)) for head in range(kv_heads)]
