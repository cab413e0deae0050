"""What heartbeats prove: every verdict from made-up records, with no file, no thread and no clock."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lt_trainer.resilience.heartbeat import (
    GRACE_OBSERVATIONS,
    HEARTBEAT_BYTES,
    PROCESS_GONE,
    Diagnosis,
    Heartbeat,
    HeartbeatMonitor,
    Observation,
    decode_heartbeat,
    failure_message,
)

LOGS = Path("/runs/a/logs")
LIMIT = 10


def record(rank: int, beat: int = 1, **changes: object) -> Heartbeat:
    values: dict[str, object] = {
        "attempt": "a1b2",
        "rank": rank,
        "pid": 100 + rank,
        "process_start_time": "77",
        "host": f"node{rank}",
        "machine_id": f"node{rank} boot",
        "beat": beat,
        "n_rollbacks": 0,
        "step": 10,
        "stage": "step",
        **changes,
    }
    return Heartbeat(**values)  # type: ignore[arg-type]


def sight(rank: int, beat: int = 1, process: str = "S", **changes: object) -> Observation:
    return Observation(heartbeat=record(rank, beat, **changes), process_state=process)


def observer(*ranks: int) -> HeartbeatMonitor:
    return HeartbeatMonitor(ranks, limit=LIMIT, interval_s=0.5, logs=LOGS)


def looked_at(*sights: tuple[Observation, Observation]) -> HeartbeatMonitor:
    """An observer that saw every rank twice."""
    ranks = [a.heartbeat.rank for a, _ in sights if a.heartbeat]
    seen = observer(*ranks)
    for number in (0, 1):
        seen.observe({rank: pair[number] for rank, pair in zip(ranks, sights, strict=True)})
    return seen


def alive(rank: int, **changes: object) -> tuple[Observation, Observation]:
    return sight(rank, 1, **changes), sight(rank, 2, **changes)


def text_of(verdict: Diagnosis | None) -> str:
    assert verdict is not None
    return verdict.text


# The record


@pytest.mark.parametrize(
    "changes", [{}, {"exit_message": ""}, {"exit_message": 'no "space"', "faulty_rank": 3, "main_frame": "f (a.py:1)"}]
)
def test_a_record_survives_its_file(changes: dict[str, object]) -> None:
    data = record(3, **changes).encode()
    assert len(data) == HEARTBEAT_BYTES
    assert json.loads(data)["rank"] == 3
    assert decode_heartbeat(data) == record(3, **changes)


def test_leaving_cleanly_differs_from_not_having_left() -> None:
    stayed, left = decode_heartbeat(record(3).encode()), decode_heartbeat(record(3, exit_message="").encode())
    assert stayed is not None
    assert left is not None
    assert (stayed.exit_message, left.exit_message) == (None, "")


def test_torn_and_mixed_files_are_no_record() -> None:
    old, new = record(3, 7, exit_message="old error", faulty_rank=3).encode(), record(3, 8, stage="save").encode()
    end = len(new.rstrip())
    for torn in (b"", b"\0" * HEARTBEAT_BYTES, b"[]", b"{}", b'"x"', new[: end - 1], new[: end // 2]):
        assert decode_heartbeat(torn) is None
    for cut in range(1, max(end, len(old.rstrip()))):
        mixed = new[:cut] + old[cut:]
        assert mixed in (old, new) or decode_heartbeat(mixed) in (None, decode_heartbeat(old), decode_heartbeat(new))
        assert decode_heartbeat(mixed) is None or mixed.strip() in (old.strip(), new.strip())
    assert decode_heartbeat(new.replace(b'"step": 10', b'"step": 11')) is None
    assert decode_heartbeat(new.replace(b'"n_rollbacks"', b'"gap"')) is None


@pytest.mark.parametrize("character", ["x", '"', "\x00", "é", "🙂"])
def test_a_record_fits_whatever_the_error_says(character: str) -> None:
    sentence = failure_message(record(3), character * 5000, LOGS / "rank00003.log")
    found = decode_heartbeat(record(3, exit_message=sentence, faulty_rank=3, main_frame=character * 5000).encode())
    assert found is not None
    assert found.exit_message is not None
    assert found.exit_message.startswith("rank 3 on node3 (pid 103) has failed in stage step of step 10: ")
    assert found.exit_message.endswith("...; its log is /runs/a/logs/rank00003.log")


# (b) a heartbeat that stands still


def test_a_rank_is_silent_after_the_limit_of_own_looks_and_not_before() -> None:
    watch = observer(1, 2)
    assert watch.observe({1: sight(1, 5), 2: sight(2, 1)}) is None
    for look in range(1, LIMIT):
        assert watch.observe({1: sight(1, 5), 2: sight(2, 1 + look)}) is None
    verdict = watch.observe({1: sight(1, 5), 2: sight(2, 99)})
    assert verdict == Diagnosis(
        text="rank 1 on node1 (pid 101) has had no heartbeat for 5 s, last in stage step of step 10: its process "
        "exists but does not run; its log is /runs/a/logs/rank00001.log",
        faulty_rank=1,
    )


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ("T", "its process is stopped by a signal"),
        ("D", "hangs in the kernel"),
        ("", "process or machine is frozen or down"),
    ],
)
def test_a_silent_rank_is_described_by_the_state_of_its_process(process: str, words: str) -> None:
    watch = observer(1)
    for _ in range(LIMIT):
        assert watch.observe({1: sight(1, process=process)}) is None
    assert words in text_of(watch.observe({1: sight(1, process=process)}))


def test_every_beat_starts_the_count_anew() -> None:
    watch = observer(1)
    for beat in (1, 2):
        for _ in range(LIMIT):
            assert watch.observe({1: sight(1, beat)}) is None
    assert watch.observe({1: sight(1, 3)}) is None


def test_silent_ranks_are_named_together() -> None:
    watch = observer(*range(1, 8))
    for look in range(LIMIT):
        watch.observe({rank: sight(rank, 1 if rank in (2, 4, 5, 6) else look) for rank in range(1, 8)})
    verdict = watch.observe({rank: sight(rank, 1 if rank in (2, 4, 5, 6) else 99) for rank in range(1, 8)})
    assert text_of(verdict).startswith("rank 2 on node2")
    assert text_of(verdict).endswith(" (ranks 4-6 silent as well)")


def test_a_job_that_was_suspended_as_a_whole_goes_on() -> None:
    """However long nobody ran, it is one look: whoever looks first afterwards gives the others the whole limit."""
    watch = observer(1)
    for beat in range(1, 4):
        for _ in range(LIMIT):  # nine looks without news, then a beat
            assert watch.observe({1: sight(1, beat)}) is None


def test_looks_that_show_nothing_count_neither_way() -> None:
    watch = observer(1)
    nothing = Observation(heartbeat=None)
    for _ in range(3 * LIMIT):
        assert watch.observe({1: nothing}) is None
    watch.observe({1: sight(1)})
    for _ in range(LIMIT - 1):
        assert watch.observe({1: sight(1)}) is None
        for _ in range(3):
            assert watch.observe({1: nothing}) is None
    assert watch.observe({1: sight(1)}) is not None


def test_silence_does_not_count_while_the_file_system_refuses_us() -> None:
    watch = observer(1)
    for _ in range(3 * LIMIT):
        assert watch.observe({1: sight(1)}, is_reliable=False) is None
    for _ in range(LIMIT - 1):
        assert watch.observe({1: sight(1)}) is None
    assert watch.observe({1: sight(1)}) is not None


def test_a_rank_that_left_cleanly_is_no_fault() -> None:
    watch = observer(1, 2)
    for look in range(5 * LIMIT):
        seen = {1: sight(1, 9, exit_message="", process=PROCESS_GONE if look else "S"), 2: sight(2, look)}
        assert watch.observe(seen) is None
        assert not watch.has_alarm


# (c) gone, (d) left with an error


def after_grace(watch: HeartbeatMonitor, sights: dict[int, Observation]) -> Diagnosis | None:
    """The verdict after the grace, checking that there is none before."""
    for _ in range(GRACE_OBSERVATIONS):
        assert watch.observe(sights) is None
        assert watch.has_alarm
    return watch.observe(sights)


def test_a_gone_process_is_a_verdict_after_the_grace() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1), 2: sight(2)})
    assert not watch.has_alarm
    verdict = after_grace(watch, {1: sight(1, process=PROCESS_GONE), 2: sight(2, 2)})
    assert verdict == Diagnosis(
        text="the process of rank 1 on node1 (pid 101) has exited without an error message, in stage step of step "
        "10, perhaps killed; its log is /runs/a/logs/rank00001.log",
        faulty_rank=1,
    )


def test_a_gone_process_whose_file_is_torn_for_good_is_judged_by_its_last_record() -> None:
    watch = observer(1)
    watch.observe({1: sight(1)})
    verdict = after_grace(watch, {1: Observation(heartbeat=None, process_state=PROCESS_GONE)})
    assert verdict is not None
    assert verdict.faulty_rank == 1


def test_a_gone_process_that_turns_out_to_have_left_cleanly_is_no_fault() -> None:
    watch = observer(1)
    watch.observe({1: sight(1)})
    for _ in range(GRACE_OBSERVATIONS - 1):
        watch.observe({1: Observation(heartbeat=None, process_state=PROCESS_GONE)})
    for _ in range(3 * GRACE_OBSERVATIONS):
        assert watch.observe({1: sight(1, 2, exit_message="", process=PROCESS_GONE)}) is None
        assert not watch.has_alarm


def error(rank: int, text: str) -> str:
    return failure_message(record(rank), text, LOGS / f"rank{rank:05}.log")


def test_a_rank_that_left_with_an_error_is_quoted() -> None:
    watch = observer(1, 2)
    verdict = after_grace(
        watch, {1: sight(1, exit_message=error(1, "OSError: disk\nfull"), faulty_rank=1), 2: sight(2)}
    )
    assert verdict == Diagnosis(
        text="rank 1 on node1 (pid 101) has failed in stage step of step 10: OSError: disk full; its log "
        "is /runs/a/logs/rank00001.log",
        faulty_rank=1,
    )


def test_a_chain_of_leaving_ranks_quotes_the_first_word_for_word() -> None:
    sentence = error(5, "OSError: disk full")
    for rank in (4, 3, 2):
        watch = observer(rank)
        verdict = after_grace(watch, {rank: sight(rank, exit_message=sentence, faulty_rank=5)})
        assert verdict == Diagnosis(text=sentence, faulty_rank=5)
        sentence = text_of(verdict)


def test_what_was_seen_first_is_the_cause() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1), 2: sight(2, exit_message=error(2, "first"), faulty_rank=2)})
    watch.observe({1: sight(1, process=PROCESS_GONE), 2: sight(2, exit_message=error(2, "first"), faulty_rank=2)})
    cause = watch.find_cause()
    assert cause is not None
    assert cause.faulty_rank == 2


def test_of_what_is_seen_at_once_a_rank_that_knows_comes_first_and_one_that_does_not_last() -> None:
    lost = sight(1, exit_message="rank 1 lost contact", faulty_rank=None)
    own = sight(2, exit_message=error(2, "RuntimeError: connection closed"), faulty_rank=2)
    gone = sight(3, process=PROCESS_GONE)
    knows = sight(4, exit_message="rank 7 is frozen", faulty_rank=7)
    watch = observer(1, 2, 3, 4)
    for sights, culprit in (
        ({1: lost}, None),
        ({1: lost, 2: own}, 2),
        ({1: lost, 2: own, 3: gone}, 3),
        ({1: lost, 2: own, 3: gone, 4: knows}, 7),
    ):
        watch = observer(1, 2, 3, 4)
        watch.observe(sights)
        cause = watch.find_cause()
        assert cause is not None
        assert cause.faulty_rank == culprit


def test_the_reason_may_still_improve_during_the_grace() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1, exit_message="rank 1 lost contact", faulty_rank=None), 2: sight(2)})
    verdict = None
    for _ in range(GRACE_OBSERVATIONS):
        verdict = watch.observe(
            {1: Observation(heartbeat=None), 2: sight(2, exit_message=error(2, "the cause"), faulty_rank=2)}
        )
    assert "the cause" in text_of(verdict)


# Contact lost: what can be said of the others


def test_explain_finds_nothing_when_all_beat() -> None:
    watch = looked_at(alive(1), alive(2))
    assert watch.all_seen_alive
    assert watch.diagnose() is None


def test_explain_names_the_rank_that_does_not_beat() -> None:
    watch = looked_at(alive(1), (sight(2), sight(2)))
    assert not watch.all_seen_alive
    assert text_of(watch.diagnose()).startswith("rank 2 on node2 (pid 102) has had no heartbeat for 0.5 s")


def test_explain_names_the_rank_that_never_came() -> None:
    watch = observer(1, 2)
    for beat in (1, 2):
        watch.observe({1: sight(1, beat), 2: Observation(heartbeat=None)})
    assert not watch.all_seen_alive
    assert text_of(watch.diagnose()).startswith("rank 2 has no readable heartbeat of this start of the run")


def test_explain_names_the_rank_that_is_done() -> None:
    done = sight(2, exit_message="")
    watch = looked_at(alive(1), (done, done))
    assert watch.all_seen_alive
    assert text_of(watch.diagnose()).startswith("rank 2 on node2 (pid 102) has finished, in stage step of")


def test_explain_prefers_what_is_known() -> None:
    watch = looked_at((sight(1), sight(1)), (sight(2), sight(2, process=PROCESS_GONE)))
    assert text_of(watch.diagnose()).startswith("the process of rank 2")


# (a) no mark for the timeout


@pytest.mark.parametrize(
    ("me", "others", "culprit"),
    [
        ({"step": 10, "stage": "sync_stop"}, [{"step": 10, "stage": "sync_stop"}, {"step": 9, "stage": "save"}], 2),
        ({"step": 10, "stage": "data"}, [{"step": 10, "stage": "sync_stop"}, {"step": 10, "stage": "step"}], 0),
        ({"step": 10, "stage": "sync_stop"}, [{"step": 10, "stage": "step"}, {"step": 10, "stage": "sync_stop"}], 1),
        ({"step": 10, "stage": "save"}, [{"step": 10, "stage": "save"}, {"step": 10, "stage": "validate"}], 2),
        (
            {"step": 10, "stage": "validate"},
            [{"step": 10, "stage": "fetch_metrics"}, {"step": 10, "stage": "validate"}],
            1,
        ),
        ({"step": 1, "stage": "data"}, [{"step": -1, "stage": "start"}, {"step": 1, "stage": "data"}], 1),
        # The run went back to a checkpoint: who still is at the higher step has not.
        (
            {"step": 5, "stage": "data", "n_rollbacks": 1},
            [{"step": 20, "stage": "fetch_metrics"}, {"step": 5, "n_rollbacks": 1}],
            1,
        ),
        # A stage that is not known is behind only by its step.
        ({"step": 10, "stage": "rollback"}, [{"step": 9, "stage": "polish"}, {"step": 10, "stage": "step"}], 1),
    ],
)
def test_the_rank_that_is_behind_is_named(me: dict[str, object], others: list[dict[str, object]], culprit: int) -> None:
    watch = looked_at(*(alive(rank, **changes) for rank, changes in enumerate(others, start=1)))
    verdict = watch.diagnose_hang(record(0, **me))
    assert verdict.faulty_rank == culprit
    assert verdict.text.startswith(f"rank {culprit} on node{culprit} (pid {100 + culprit}) is behind, ")
    assert verdict.text.endswith(f"; its stack is in /runs/a/logs/rank0000{culprit}.log")


def test_the_sentence_about_a_rank_that_is_behind() -> None:
    watch = looked_at(alive(1, stage="data", main_frame="hang (job.py:7)"), alive(2), alive(3, stage="data"))
    assert watch.diagnose_hang(record(0)).text == (
        "rank 1 on node1 (pid 101) is behind (rank 3 too), in stage data of step 10 at hang (job.py:7), and has "
        "blocked others, in stage step of step 10, for 5 s; its stack is in /runs/a/logs/rank00001.log"
    )


def test_the_rank_that_stands_elsewhere_is_the_likely_one() -> None:
    watch = looked_at(
        *(alive(rank, main_frame="hang (job.py:7)" if rank == 2 else "reduce (c.py:1)") for rank in (1, 2, 3))
    )
    verdict = watch.diagnose_hang(record(0, main_frame="reduce (c.py:1)"))
    assert verdict == Diagnosis(
        text="no rank has made progress for 5 s; the likely cause is rank 2 on node2 (pid 102), which unlike most "
        "is in stage step of step 10 at hang (job.py:7) (rank 2 of 4 ranks); its stack is in "
        "/runs/a/logs/rank00002.log",
        faulty_rank=2,
    )


@pytest.mark.parametrize("wheres", [("a", "a", "a"), ("a", "b", "b", "a"), ("a", "b"), ("", "a", "a"), ("a", "b", "c")])
def test_it_says_plainly_when_it_cannot_tell(wheres: tuple[str, ...]) -> None:
    mine, *rest = wheres
    watch = looked_at(*(alive(rank, main_frame=where) for rank, where in enumerate(rest, start=1)))
    verdict = watch.diagnose_hang(record(0, main_frame=mine))
    assert verdict.faulty_rank is None
    assert "for an unknown cause: rank" in verdict.text
    assert verdict.text.endswith("; the stacks are in /runs/a/logs")
    shown = re.findall(r"\d+", verdict.text.partition("cause:")[2].partition("in stage")[0])
    assert shown[0] == "0"


def test_unknown_stages_of_one_step_are_compared_by_place_only() -> None:
    watch = looked_at(alive(1, stage="polish", main_frame="b"), alive(2, stage="step", main_frame="a"))
    assert watch.diagnose_hang(record(0, stage="step", main_frame="a")).faulty_rank == 1


def test_the_only_rank_blames_itself() -> None:
    verdict = observer().diagnose_hang(record(0, main_frame="hang (job.py:7)"))
    assert verdict == Diagnosis(
        text="rank 0 on node0 (pid 100) has made no progress for 5 s, in stage step of step 10 at hang (job.py:7); "
        "its stack is in /runs/a/logs/rank00000.log",
        faulty_rank=0,
    )


def test_known_causes_come_before_comparing() -> None:
    behind = alive(1, step=9)
    frozen = (sight(2), sight(2))
    done = (sight(2, exit_message=""), sight(2, exit_message=""))
    gone = (sight(2), sight(2, process=PROCESS_GONE))
    knows = (sight(2), sight(2, exit_message="rank 3 is frozen", faulty_rank=3))
    for found, culprit in ((frozen, 2), (done, 2), (gone, 2), (knows, 3)):
        assert looked_at(behind, found).diagnose_hang(record(0)).faulty_rank == culprit


def test_a_record_of_one_rank_replaced_by_equal_values_but_a_new_beat_is_life() -> None:
    one = record(1)
    watch = observer(1)
    for beat in range(5 * LIMIT):
        assert watch.observe({1: Observation(heartbeat=replace(one, beat=beat))}) is None
