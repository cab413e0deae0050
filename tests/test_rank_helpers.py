"""Ranks for tests: what a call gives back, which error a test sees, and processes that can be killed."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lt_test_helpers.forkserver import PortClaim, RankError
from lt_test_helpers.pool import RankPool
from lt_test_helpers.rank_processes import start_run


@dataclass(frozen=True)
class Answer:
    rank: int
    total: int


class TwoPartError(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def added_up(offsets: list[int]) -> Answer:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor(offsets[rank])
    dist.all_reduce(total)
    return Answer(rank, int(total))


def described(number: int) -> dict[str, object]:
    import torch

    server = os.getppid()
    return {
        "pid": os.getpid(),
        "server_threads": len(os.listdir(f"/proc/{server}/task")),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "variables": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "planted": os.environ.get("PLANTED"),
        "handler": signal.getsignal(number) is signal.SIG_DFL,
    }


def rank_1_fails_others_wait(kind: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exits":
            sys.exit("left")
        if kind == "odd":
            raise TwoPartError("one", "two")
        raise KeyError("planted")
    dist.all_reduce(torch.zeros(1))


def hangs_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(10_000)


def cannot_be_sent() -> object:
    return lambda: None


def hangs(rank: int) -> None:
    """Before the command: says so and waits."""
    print(f"rank {rank} hangs in {os.getcwd()} at {os.environ['MASTER_PORT']}")  # noqa: T201
    if rank == 0:
        signal.signal(signal.SIGUSR1, lambda number, frame: print("usr1"))  # noqa: T201
    while True:
        time.sleep(1)


def leaves(rank: int) -> None:
    sys.exit(10 + rank)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    return RankPool(3)


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(added_up, [1, 20, 300], ranks=3) == [Answer(rank, 321) for rank in range(3)]
    assert pool.run(added_up, [5, 6], ranks=2) == [Answer(rank, 11) for rank in range(2)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_rank_is_new_and_its_server_has_one_thread(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "here")
    first, second = (pool.run(described, signal.SIGTERM, ranks=2) for _ in range(2))
    assert len({answer["pid"] for answer in first + second} | {os.getpid()}) == 5
    for rank, answer in enumerate(first):
        assert answer["variables"] == [str(rank), "2", str(rank), "2"]
        assert (answer["planted"], answer["handler"], answer["cuda"]) == ("here", True, False)
        assert (answer["server_threads"], answer["torch_threads"]) == (1, 1)
    assert pool.run(described, signal.SIGTERM, ranks=1, env={"PLANTED": "there"})[0]["planted"] == "there"


def test_the_error_that_came_first_is_raised_with_its_rank(pool: RankPool) -> None:
    """Rank 0 fails too, for it loses its peer; that is not what the test wants to see."""
    with pytest.raises(KeyError, match="planted") as caught:
        pool.run(rank_1_fails_others_wait, "raises")
    first, *_ = caught.value.__notes__
    assert first.startswith("rank 1 of rank_1_fails_others_wait:\nTraceback")
    assert 'raise KeyError("planted")' in first
    assert pool.run(added_up, [1, 1]) == [Answer(0, 2), Answer(1, 2)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dies", "rank 1 of rank_1_fails_others_wait was killed by SIGKILL"),
        ("exits", "SystemExit: left"),
        ("odd", "TwoPartError: one two"),
    ],
)
def test_a_rank_that_cannot_tell_its_error(pool: RankPool, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(rank_1_fails_others_wait, kind)


def test_a_rank_that_hangs_is_named_and_ended(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank (0, )?1 of hangs_on_rank_1 did not return within 2 s"):
        pool.run(hangs_on_rank_1, timeout_s=2)


def test_what_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    with pytest.raises(Exception, match=r"local object .*cannot_be_sent"):
        pool.run(cannot_be_sent, ranks=1)


def test_claims_differ_and_leave_the_port_to_a_store() -> None:
    claims = [PortClaim() for _ in range(5)]
    assert len({claim.port for claim in claims}) == 5
    with socket.socket() as store:
        store.bind(("", claims[0].port))
        store.listen()
    for claim in claims:
        claim.close()


def test_exit_codes_and_output_of_a_run(tmp_path: Path) -> None:
    with start_run(["--help"], ranks=1, cwd=tmp_path) as run:
        assert run.wait() == [0]
        assert "Usage: lt-train" in run.output()
    with start_run(["no-such-command"], ranks=2, cwd=tmp_path) as run:
        assert run.wait() == [64, 64]
        assert "no-such-command" in run.output(1)
    with start_run([], ranks=2, cwd=tmp_path, prepare=f"{__file__}:leaves") as run:
        assert run.wait() == [10, 11]
        assert run.alive_ranks == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output-1", "output-2", "output-3"]


def test_real_signals_to_one_rank_and_to_all(tmp_path: Path) -> None:
    with start_run([], ranks=3, cwd=tmp_path, prepare=f"{__file__}:hangs", env={"MASTER_PORT": "7"}) as run:
        for rank in range(3):
            wait_for(run, rank, f"rank {rank} hangs in {tmp_path} at 7")
        run.send_signal(signal.SIGUSR1, 0)
        wait_for(run, 0, "usr1")
        run.kill(1)
        run.send_signal(signal.SIGTERM, 2)
        while run.alive_ranks != [0]:
            time.sleep(0.01)
        os.kill(run.pids[0], 0)
        with pytest.raises(RankError, match=r"(?s)rank 0 did not exit within 0.1 s.*in hangs"):
            run.wait(0.1)
        assert run.wait() == [-signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM]


def test_leaving_the_context_kills(tmp_path: Path) -> None:
    with start_run([], ranks=2, cwd=tmp_path, prepare=f"{__file__}:hangs") as run:
        wait_for(run, 0, "hangs")
    for pid in run.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def wait_for(run, rank: int, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in run.output(rank):
        assert time.monotonic() < deadline, run.output(rank)
        time.sleep(0.01)
