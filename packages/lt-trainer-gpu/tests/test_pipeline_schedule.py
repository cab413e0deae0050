"""Pipeline schedules by themselves: every pass once, inputs before outputs, no deadlock, balanced stages."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.planning.layout import PlannedLayout
from lt_trainer_gpu.pipeline_schedule import StagePass, forward_passes, training_passes

Message = tuple[int, int, bool, int, int]
"""Sender, receiver, forward or backward, stage of the sender, micro-batch."""


def schedules(pp: int, per_rank: int, n: int) -> list[list[StagePass]]:
    return [training_passes(pp=pp, pp_rank=rank, stages_per_rank=per_rank, n_micro_batches=n) for rank in range(pp)]


def messages(one: StagePass, rank: int, pp: int, n_stages: int) -> tuple[Message | None, Message | None]:
    """The message that a pass waits for and the one that it sends; None at the ends of the pipeline."""
    stage, step = rank + one.chunk * pp, 1 if one.is_forward else -1
    source, target = stage - step, stage + step
    received = (source % pp, rank, one.is_forward, source, one.micro_batch) if 0 <= source < n_stages else None
    sent = (rank, target % pp, one.is_forward, stage, one.micro_batch) if 0 <= target < n_stages else None
    return received, sent


def run(programs: list[list[StagePass]], pp: int, per_rank: int) -> list[Message]:
    """Run all ranks, where a send ends only once its receiver asks for it, in the order of each directed edge.

    A pass waits for its message; sends are queued and not waited for. Returns the messages left when nothing moves.
    """
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    arrived: set[Message] = set()
    done = [0] * pp
    posted = [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(programs):
            while done[rank] < len(passes):
                for ahead in range(posted[rank], min(done[rank] + 2, len(passes))):
                    posted[rank] = ahead + 1
                    received, _ = messages(passes[ahead], rank, pp, pp * per_rank)
                    if received is not None:
                        receives.setdefault(received[:2], []).append(received)
                received, sent = messages(passes[done[rank]], rank, pp, pp * per_rank)
                if received is not None and received not in arrived:
                    break
                if sent is not None:
                    sends.setdefault(sent[:2], []).append(sent)
                done[rank] += 1
                moved = True
        for edge, queue in sends.items():
            waiting = receives.get(edge, [])
            while queue and waiting:
                assert queue[0] == waiting[0], "sent and received in different orders"
                arrived.add(queue.pop(0))
                waiting.pop(0)
                moved = True
    assert all(count == len(passes) for count, passes in zip(done, programs, strict=True)), "deadlock"
    return [message for queue in sends.values() for message in queue]


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 7))
def test_all_passes_run_once_and_nothing_deadlocks(pp: int, per_rank: int, groups: int, extra: int) -> None:
    n = groups * pp + (extra if per_rank == 1 else 0)
    programs = schedules(pp, per_rank, n)
    wanted = {(f, c, i) for f in (True, False) for c in range(per_rank) for i in range(n)}
    for passes in programs:
        assert len(passes) == len(wanted)
        assert {(one.is_forward, one.chunk, one.micro_batch) for one in passes} == wanted
        seen: set[tuple[int, int]] = set()
        for one in passes:
            key = (one.chunk, one.micro_batch)
            assert one.is_forward or key in seen
            seen.add(key)
    assert run(programs, pp, per_rank) == []


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 13))
def test_forward_passes_run_for_any_number_of_micro_batches(pp: int, per_rank: int, n: int) -> None:
    passes = list(forward_passes(pp=pp, stages_per_rank=per_rank, n_micro_batches=n))
    assert len({(one.chunk, one.micro_batch) for one in passes}) == len(passes) == n * per_rank
    assert run([passes] * pp, pp, per_rank) == []


def test_1f1b_by_hand() -> None:
    def text(rank: int) -> str:
        passes = training_passes(pp=3, pp_rank=rank, stages_per_rank=1, n_micro_batches=4)
        return " ".join(f"{'F' if one.is_forward else 'B'}{one.micro_batch}" for one in passes)

    assert [text(rank) for rank in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def max_in_flight(**schedule: int) -> int:
    """The most forward passes of a rank whose backward pass is still to come."""
    return max(accumulate(1 if one.is_forward else -1 for one in training_passes(**schedule)))


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_a_rank_holds_at_most_the_stages_behind_it(n: int) -> None:
    held = [max_in_flight(pp=4, pp_rank=rank, stages_per_rank=1, n_micro_batches=n) for rank in range(4)]
    assert held == [min(n, 4 - rank) for rank in range(4)]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_the_plan_counts_the_passes_in_flight_and_the_idle_time(pp: int, per_rank: int, groups: int) -> None:
    n = groups * pp
    layout = PlannedLayout(
        devices=pp,
        nodes=1,
        tp=1,
        sequence_parallel=False,
        dp_replicate=1,
        dp_shard=1,
        micro_batch_size=1,
        accumulation_steps=n,
        pp=pp,
        stages_per_rank=per_rank,
    )
    for rank in range(pp):
        most = max_in_flight(pp=pp, pp_rank=rank, stages_per_rank=per_rank, n_micro_batches=n)
        assert layout.max_in_flight(rank) == most
    assert 1 - layout.pipeline_efficiency == pytest.approx((pp - 1) / (n * per_rank + pp - 1))
