"""The process groups of a rank: gloo groups along each axis of NxD's box of ranks, and the two that weights ask for.

Every rank makes every group, in one order; groups of one rank are not made.

Cost: a group takes some milliseconds on each rank of the run, whether it is in it or not.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from lt_trainer.engine import World
from lt_trainer_neuron.cpu.collectives import Peers
from lt_trainer_neuron.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Ranks that this rank shares work with.

    Attributes:
        world: all ranks.
        tp: those that compute each layer together.
        dp: those that have the same weights and read other rows.
        pp: those that have the other stages.
        heads: of `tp`, those that have the same key/value head.
        ends: the first and the last stage, which both hold a tied embedding; other stages are alone.
    """

    world: Peers
    tp: Peers
    dp: Peers
    pp: Peers
    heads: Peers
    ends: Peers

    @staticmethod
    def make(grid: Grid, heads: list[list[int]], timeout_s: float) -> Groups:
        """Make all groups of the run; called by all its ranks.

        Args:
            grid: this rank's place.
            heads: lists of tensor-parallel ranks that have the same key/value head; none where each has its own.
            timeout_s: how long a collective waits for its ranks.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        tp_groups = grid.groups("tp")
        pp_groups = grid.groups("pp")
        same_head = [[group[rank] for rank in ranks] for group in tp_groups for ranks in heads]
        ends = [[group[0], group[-1]] for group in pp_groups if grid.pp > 1]
        return Groups(
            world=Peers(ranks=tuple(range(grid.world)), rank=grid.rank, group=dist.group.WORLD),
            tp=_mine(tp_groups, grid.rank, timeout),
            dp=_mine(grid.groups("dp"), grid.rank, timeout),
            pp=_mine(pp_groups, grid.rank, timeout),
            heads=_mine(same_head, grid.rank, timeout),
            ends=_mine(ends, grid.rank, timeout),
        )


def _mine(lists: list[list[int]], rank: int, timeout: datetime.timedelta) -> Peers:
    found = Peers(ranks=(rank,))
    for ranks in lists:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = Peers(ranks=tuple(ranks), rank=ranks.index(rank), group=group)
    return found


def join(world: World, timeout_s: float) -> None:
    """Meet the other ranks over gloo; one process alone needs no port and no network."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
