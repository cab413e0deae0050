"""Slices of model tensors in a rank's tensors. Pure arithmetic over `lt_ckpt.nxd.layout`.

A rank holds tensors under NxD's keys; each consists of slices of model tensors, concatenated along the rows. Some
slices are replicated: norms on all tensor-parallel ranks, a replicated key/value head on the ranks that use it, a tied
head on the last stage besides the embedding on the first. ZeRO-1 further splits a rank's tensor along its rows, so a
rank's optimizer holds the part of each slice in its rows.

Cost: one small object per tensor and rank of the whole run (256 ranks of a 70B model: about 20 thousand).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from lt_ckpt.llama_tensors import EMBED, HEAD
from lt_ckpt.nxd.layout import nxd_layout
from lt_ckpt.shards import Ints

if TYPE_CHECKING:
    from lt_ckpt.layout import TensorRegion
    from lt_ckpt.nxd.options import NxdOptions
    from lt_model import ModelConfig
    from lt_trainer_neuron.grid import Grid


RankCoordinates = tuple[int, int]
"""(pp_rank, tp_rank)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Slice of a model tensor placed in a rank's tensor.

    Attributes:
        name: model tensor (the embedding, for a tied head).
        offset: start of the slice in the model tensor.
        shape: shape of the slice.
        start_row: first row of the slice in the rank's tensor.
        replicas: coordinates of all ranks with the same slice, by stage and tensor-parallel rank.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start_row: int
    replicas: tuple[RankCoordinates, ...]

    def replica_index(self, grid: Grid) -> int:
        """Return the index of the rank in `replicas`."""
        return self.replicas.index((grid.pp_rank, grid.tp_rank))


def build_tensor_slices(config: ModelConfig, nxd_options: NxdOptions, grid: Grid) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices of a rank's tensors by NxD's key, in row order.

    The keys are in the order of the rank's file. With one stage, a tied head is the same tensor as the embedding; its
    key is included, with the same slice.

    Raises:
        CheckpointError: the model cannot be sharded with these options.
    """
    layout = nxd_layout(config, nxd_options)
    ranks: list[RankCoordinates] = list(product(range(nxd_options.pp), range(nxd_options.tp)))

    def box_of(region: TensorRegion) -> tuple[str, Ints, Ints]:
        is_tied_head = config.tie_word_embeddings and region.name == HEAD
        return EMBED if is_tied_head else region.name, region.offset, region.shape

    replicas: dict[tuple[str, Ints, Ints], dict[RankCoordinates, None]] = {}
    for coordinates, file in zip(ranks, layout, strict=True):
        for tensor in file.tensors:
            for region in tensor.regions:
                replicas.setdefault(box_of(region), {})[coordinates] = None

    def slice_of(region: TensorRegion) -> TensorSlice:
        name, offset, shape = box = box_of(region)
        row = region.stored_offset[0]
        return TensorSlice(name=name, offset=offset, shape=shape, start_row=row, replicas=tuple(replicas[box]))

    own_file = layout[ranks.index((grid.pp_rank, grid.tp_rank))]
    return {tensor.key: tuple(map(slice_of, tensor.regions)) for tensor in own_file.tensors}


def intersect_rows(tensor_slice: TensorSlice, start_row: int, n_rows: int) -> TensorSlice | None:
    """Return the part of a slice within a range of rows of the rank's tensor.

    Args:
        tensor_slice: slice to intersect.
        start_row: first row of the range.
        n_rows: number of rows of the range.

    Returns:
        The part of the slice, with `start_row` relative to the range; None if they do not overlap.
    """
    begin = max(start_row, tensor_slice.start_row)
    end = min(start_row + n_rows, tensor_slice.start_row + tensor_slice.shape[0])
    if begin >= end:
        return None
    offset = (tensor_slice.offset[0] + begin - tensor_slice.start_row, *tensor_slice.offset[1:])
    return replace(
        tensor_slice, offset=offset, shape=(end - begin, *tensor_slice.shape[1:]), start_row=begin - start_row
    )


def replicated_kv_heads(nxd_options: NxdOptions, n_kv_heads: int) -> list[list[int]]:
    """Return, by key/value head, the tensor-parallel ranks that hold it.

    Empty if heads are not replicated.
    """
    if nxd_options.kv_size_multiplier == 1:
        return []
    return [list(range(head, nxd_options.tp, n_kv_heads)) for head in range(n_kv_heads)]
