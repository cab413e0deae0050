"""Gloo process groups of a rank: one per axis of NxD's rank mesh, and one for shared heads.

Every rank creates every group, in one order; groups of one rank are not created.

Cost: creating a group takes some milliseconds on each rank of the run, member or not.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from lt_trainer.engine import World
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.gloo_collectives import RankGroup


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """Process groups that this rank belongs to.

    Attributes:
        tp: tensor-parallel ranks, which compute each layer together.
        dp: data-parallel ranks, with the same weights and different rows.
        pp: ranks of all pipeline stages.
        kv_heads: the ranks of `tp` that hold the same key/value head.
    """

    tp: RankGroup
    dp: RankGroup
    pp: RankGroup
    kv_heads: RankGroup

    @staticmethod
    def make(grid: Grid, kv_head_ranks: list[list[int]], timeout_s: float) -> ProcessGroups:
        """Create all groups of the run; must be called by all ranks.

        Args:
            grid: this rank's coordinates.
            kv_head_ranks: tensor-parallel ranks that hold the same key/value head, by head; empty if not replicated.
            timeout_s: timeout of collectives in seconds.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        tp_groups = grid.groups("tp")
        same_head = [[group[rank] for rank in ranks] for group in tp_groups for ranks in kv_head_ranks]
        return ProcessGroups(
            tp=_new_rank_group(tp_groups, grid.rank, timeout),
            dp=_new_rank_group(grid.groups("dp"), grid.rank, timeout),
            pp=_new_rank_group(grid.groups("pp"), grid.rank, timeout),
            kv_heads=_new_rank_group(same_head, grid.rank, timeout),
        )


def _new_rank_group(lists: list[list[int]], rank: int, timeout: datetime.timedelta) -> RankGroup:
    found = RankGroup(ranks=(rank,))
    for ranks in lists:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = RankGroup(ranks=tuple(ranks), rank=ranks.index(rank), process_group=group)
    return found


def init_process_group(world: World, timeout_s: float) -> None:
    """Initialize the default gloo process group; a single process needs no port and no network."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
