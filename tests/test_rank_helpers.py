"""Ranks for tests: what a call gives back, which error a test sees, and processes that can be killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lt_test_helpers.forkserver import RankError
from lt_test_helpers.pool import RankPool
from lt_test_helpers.rank_processes import start_run


def added_up(offsets: list[int]) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(offsets[dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def rank_1_ends(kind: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs":
            time.sleep(10_000)
        raise KeyError("planted")
    if kind != "hangs":
        dist.all_reduce(torch.zeros(1))


def hangs(rank: int) -> None:
    """Before the command: says so and waits."""
    sys.stdout.write(f"rank {rank} hangs in {os.getcwd()}\n")
    sys.stdout.flush()
    while True:
        time.sleep(1)


def test_results_come_by_rank_and_the_first_error_with_its_rank() -> None:
    """Rank 0 fails too, for it loses its peer; that is not what a test wants to see."""
    pool = RankPool(3)
    assert pool.run(added_up, [1, 20, 300], ranks=3) == [321, 321, 321]
    with pytest.raises(KeyError, match="planted") as caught:
        pool.run(rank_1_ends, "raises", ranks=2)
    assert caught.value.__notes__[0].startswith("rank 1 of rank_1_ends:\nTraceback")
    with pytest.raises(RankError, match="rank 1 of rank_1_ends was killed by SIGKILL"):
        pool.run(rank_1_ends, "dies", ranks=2)
    with pytest.raises(RankError, match=r"rank 1 of rank_1_ends did not return within 3 s"):
        pool.run(rank_1_ends, "hangs", ranks=2, timeout_s=3)
    assert pool.run(added_up, [1, 1], ranks=2) == [2, 2]


def test_signals_reach_one_rank_and_leaving_the_context_kills(tmp_path: Path) -> None:
    with start_run([], ranks=3, cwd=tmp_path, prepare=f"{__file__}:hangs") as run:
        deadline = time.monotonic() + 60
        while not all(f"rank {rank} hangs in {tmp_path}" in run.output(rank) for rank in range(3)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.kill(1)
        run.send_signal(signal.SIGTERM, 2)
        while run.alive_ranks != [0]:
            time.sleep(0.01)
        with pytest.raises(RankError, match=r"(?s)rank 0 did not exit within 0.1 s.*in hangs"):
            run.wait(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(run.pids[0], 0)
