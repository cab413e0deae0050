"""What heartbeats prove: every verdict from made-up records, with no file, no thread and no clock."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lt_trainer.heartbeat import GONE, GRACE_LOOKS, SIZE, Observer, Record, Sight, Verdict, decode, failure

LOGS = Path("/runs/a/logs")
LIMIT = 10


def record(rank: int, beat: int = 1, **changes: object) -> Record:
    values: dict[str, object] = {
        "attempt": "a1b2",
        "rank": rank,
        "pid": 100 + rank,
        "born": "77",
        "host": f"node{rank}",
        "machine": f"node{rank} boot",
        "beat": beat,
        "lap": 0,
        "step": 10,
        "stage": "step",
        **changes,
    }
    return Record(**values)  # type: ignore[arg-type]


def sight(rank: int, beat: int = 1, process: str = "S", **changes: object) -> Sight:
    return Sight(record=record(rank, beat, **changes), process=process)


def observer(*ranks: int) -> Observer:
    return Observer(ranks, limit=LIMIT, beat_s=0.5, logs=LOGS)


def looked_at(*sights: tuple[Sight, Sight]) -> Observer:
    """An observer that saw every rank twice."""
    ranks = [a.record.rank for a, _ in sights if a.record]
    seen = observer(*ranks)
    for number in (0, 1):
        seen.observe({rank: pair[number] for rank, pair in zip(ranks, sights, strict=True)})
    return seen


def alive(rank: int, **changes: object) -> tuple[Sight, Sight]:
    return sight(rank, 1, **changes), sight(rank, 2, **changes)


def text_of(verdict: Verdict | None) -> str:
    assert verdict is not None
    return verdict.text


# The record


@pytest.mark.parametrize("changes", [{}, {"left": ""}, {"left": 'no "space"', "culprit": 3, "where": "f (a.py:1)"}])
def test_a_record_survives_its_file(changes: dict[str, object]) -> None:
    data = record(3, **changes).encode()
    assert len(data) == SIZE
    assert json.loads(data)["rank"] == 3
    assert decode(data) == record(3, **changes)


def test_leaving_cleanly_differs_from_not_having_left() -> None:
    stayed, left = decode(record(3).encode()), decode(record(3, left="").encode())
    assert stayed is not None
    assert left is not None
    assert (stayed.left, left.left) == (None, "")


def test_torn_and_mixed_files_are_no_record() -> None:
    old, new = record(3, 7, left="old error", culprit=3).encode(), record(3, 8, stage="save").encode()
    end = len(new.rstrip())
    for torn in (b"", b"\0" * SIZE, b"[]", b"{}", b'"x"', new[: end - 1], new[: end // 2]):
        assert decode(torn) is None
    for cut in range(1, max(end, len(old.rstrip()))):
        mixed = new[:cut] + old[cut:]
        assert mixed in (old, new) or decode(mixed) in (None, decode(old), decode(new))
        assert decode(mixed) is None or mixed.strip() in (old.strip(), new.strip())
    assert decode(new.replace(b'"step": 10', b'"step": 11')) is None
    assert decode(new.replace(b'"lap"', b'"gap"')) is None


@pytest.mark.parametrize("character", ["x", '"', "\x00", "é", "🙂"])
def test_a_record_fits_whatever_the_error_says(character: str) -> None:
    sentence = failure(record(3), character * 5000, LOGS / "rank00003.log")
    found = decode(record(3, left=sentence, culprit=3, where=character * 5000).encode())
    assert found is not None
    assert found.left is not None
    assert found.left.startswith("rank 3 on node3 (pid 103) has left with an error in stage step of step 10: ")
    assert found.left.endswith("...; its log is /runs/a/logs/rank00003.log")


# (b) a heartbeat that stands still


def test_a_rank_is_silent_after_the_limit_of_own_looks_and_not_before() -> None:
    watch = observer(1, 2)
    assert watch.observe({1: sight(1, 5), 2: sight(2, 1)}) is None
    for look in range(1, LIMIT):
        assert watch.observe({1: sight(1, 5), 2: sight(2, 1 + look)}) is None
    verdict = watch.observe({1: sight(1, 5), 2: sight(2, 99)})
    assert verdict == Verdict(
        text="rank 1 on node1 (pid 101) has shown no sign of life for 5 s, last seen in stage step of step 10: its "
        "process is there but does not get to run; its log is /runs/a/logs/rank00001.log",
        culprit=1,
    )


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ("T", "its process is stopped by a signal"),
        ("D", "hangs in the kernel"),
        ("", "frozen or gone, or its machine is"),
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
    nothing = Sight(record=None)
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
        assert watch.observe({1: sight(1)}, counts=False) is None
    for _ in range(LIMIT - 1):
        assert watch.observe({1: sight(1)}) is None
    assert watch.observe({1: sight(1)}) is not None


def test_a_rank_that_left_cleanly_is_no_fault() -> None:
    watch = observer(1, 2)
    for look in range(5 * LIMIT):
        seen = {1: sight(1, 9, left="", process=GONE if look else "S"), 2: sight(2, look)}
        assert watch.observe(seen) is None
        assert not watch.alarmed


# (c) gone, (d) left with an error


def after_grace(watch: Observer, sights: dict[int, Sight]) -> Verdict | None:
    """The verdict after the grace, checking that there is none before."""
    for _ in range(GRACE_LOOKS):
        assert watch.observe(sights) is None
        assert watch.alarmed
    return watch.observe(sights)


def test_a_gone_process_is_a_verdict_after_the_grace() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1), 2: sight(2)})
    assert not watch.alarmed
    verdict = after_grace(watch, {1: sight(1, process=GONE), 2: sight(2, 2)})
    assert verdict == Verdict(
        text="the process of rank 1 on node1 (pid 101) is gone without a word, killed perhaps (it was in stage step of "
        "step 10); its log is /runs/a/logs/rank00001.log",
        culprit=1,
    )


def test_a_gone_process_whose_file_is_torn_for_good_is_judged_by_its_last_record() -> None:
    watch = observer(1)
    watch.observe({1: sight(1)})
    verdict = after_grace(watch, {1: Sight(record=None, process=GONE)})
    assert verdict is not None
    assert verdict.culprit == 1


def test_a_gone_process_that_turns_out_to_have_left_cleanly_is_no_fault() -> None:
    watch = observer(1)
    watch.observe({1: sight(1)})
    for _ in range(GRACE_LOOKS - 1):
        watch.observe({1: Sight(record=None, process=GONE)})
    for _ in range(3 * GRACE_LOOKS):
        assert watch.observe({1: sight(1, 2, left="", process=GONE)}) is None
        assert not watch.alarmed


def error(rank: int, text: str) -> str:
    return failure(record(rank), text, LOGS / f"rank{rank:05}.log")


def test_a_rank_that_left_with_an_error_is_quoted() -> None:
    watch = observer(1, 2)
    verdict = after_grace(watch, {1: sight(1, left=error(1, "OSError: disk\nfull"), culprit=1), 2: sight(2)})
    assert verdict == Verdict(
        text="rank 1 on node1 (pid 101) has left with an error in stage step of step 10: OSError: disk full; its log "
        "is /runs/a/logs/rank00001.log",
        culprit=1,
    )


def test_a_chain_of_leaving_ranks_quotes_the_first_word_for_word() -> None:
    sentence = error(5, "OSError: disk full")
    for rank in (4, 3, 2):
        watch = observer(rank)
        verdict = after_grace(watch, {rank: sight(rank, left=sentence, culprit=5)})
        assert verdict == Verdict(text=sentence, culprit=5)
        sentence = text_of(verdict)


def test_what_was_seen_first_is_the_cause() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1), 2: sight(2, left=error(2, "first"), culprit=2)})
    watch.observe({1: sight(1, process=GONE), 2: sight(2, left=error(2, "first"), culprit=2)})
    cause = watch.cause()
    assert cause is not None
    assert cause.culprit == 2


def test_of_what_is_seen_at_once_a_rank_that_knows_comes_first_and_one_that_does_not_last() -> None:
    lost = sight(1, left="rank 1 lost contact", culprit=None)
    own = sight(2, left=error(2, "RuntimeError: connection closed"), culprit=2)
    gone = sight(3, process=GONE)
    knows = sight(4, left="rank 7 is frozen", culprit=7)
    watch = observer(1, 2, 3, 4)
    for sights, culprit in (
        ({1: lost}, None),
        ({1: lost, 2: own}, 2),
        ({1: lost, 2: own, 3: gone}, 3),
        ({1: lost, 2: own, 3: gone, 4: knows}, 7),
    ):
        watch = observer(1, 2, 3, 4)
        watch.observe(sights)
        cause = watch.cause()
        assert cause is not None
        assert cause.culprit == culprit


def test_the_reason_may_still_improve_during_the_grace() -> None:
    watch = observer(1, 2)
    watch.observe({1: sight(1, left="rank 1 lost contact", culprit=None), 2: sight(2)})
    verdict = None
    for _ in range(GRACE_LOOKS):
        verdict = watch.observe({1: Sight(record=None), 2: sight(2, left=error(2, "the cause"), culprit=2)})
    assert "the cause" in text_of(verdict)


# Contact lost: what can be said of the others


def test_explain_finds_nothing_when_all_beat() -> None:
    watch = looked_at(alive(1), alive(2))
    assert watch.seen_alive
    assert watch.explain() is None


def test_explain_names_the_rank_that_does_not_beat() -> None:
    watch = looked_at(alive(1), (sight(2), sight(2)))
    assert not watch.seen_alive
    assert text_of(watch.explain()).startswith("rank 2 on node2 (pid 102) has shown no sign of life for 0.5 s")


def test_explain_names_the_rank_that_never_came() -> None:
    watch = observer(1, 2)
    for beat in (1, 2):
        watch.observe({1: sight(1, beat), 2: Sight(record=None)})
    assert not watch.seen_alive
    assert text_of(watch.explain()).startswith("no heartbeat of rank 2 from this start of the run can be read")


def test_explain_names_the_rank_that_is_done() -> None:
    done = sight(2, left="")
    watch = looked_at(alive(1), (done, done))
    assert watch.seen_alive
    assert text_of(watch.explain()).startswith("rank 2 on node2 (pid 102) has left the run as done, in stage step of")


def test_explain_prefers_what_is_known() -> None:
    watch = looked_at((sight(1), sight(1)), (sight(2), sight(2, process=GONE)))
    assert text_of(watch.explain()).startswith("the process of rank 2")


# (a) no mark for the timeout


@pytest.mark.parametrize(
    ("me", "others", "culprit"),
    [
        ({"step": 10, "stage": "agree"}, [{"step": 10, "stage": "agree"}, {"step": 9, "stage": "save"}], 2),
        ({"step": 10, "stage": "data"}, [{"step": 10, "stage": "agree"}, {"step": 10, "stage": "step"}], 0),
        ({"step": 10, "stage": "agree"}, [{"step": 10, "stage": "step"}, {"step": 10, "stage": "agree"}], 1),
        ({"step": 10, "stage": "save"}, [{"step": 10, "stage": "save"}, {"step": 10, "stage": "evaluate"}], 2),
        ({"step": 10, "stage": "evaluate"}, [{"step": 10, "stage": "read"}, {"step": 10, "stage": "evaluate"}], 1),
        ({"step": 1, "stage": "data"}, [{"step": -1, "stage": "start"}, {"step": 1, "stage": "data"}], 1),
        # The run went back to a checkpoint: who still is at the higher step has not.
        ({"step": 5, "stage": "data", "lap": 1}, [{"step": 20, "stage": "read"}, {"step": 5, "lap": 1}], 1),
        # A stage that is not known is behind only by its step.
        ({"step": 10, "stage": "rewind"}, [{"step": 9, "stage": "polish"}, {"step": 10, "stage": "step"}], 1),
    ],
)
def test_the_rank_that_is_behind_is_named(me: dict[str, object], others: list[dict[str, object]], culprit: int) -> None:
    watch = looked_at(*(alive(rank, **changes) for rank, changes in enumerate(others, start=1)))
    verdict = watch.stuck(record(0, **me))
    assert verdict.culprit == culprit
    assert verdict.text.startswith(f"rank {culprit} on node{culprit} (pid {100 + culprit}) is behind, ")
    assert verdict.text.endswith(f"; its stack is in /runs/a/logs/rank0000{culprit}.log")


def test_the_sentence_about_a_rank_that_is_behind() -> None:
    watch = looked_at(alive(1, stage="data", where="hang (job.py:7)"), alive(2), alive(3, stage="data"))
    assert watch.stuck(record(0)).text == (
        "rank 1 on node1 (pid 101) is behind (rank 3 too), in stage data of step 10 at hang (job.py:7), and has kept "
        "others, in stage step of step 10, waiting for 5 s; its stack is in /runs/a/logs/rank00001.log"
    )


def test_the_rank_that_stands_elsewhere_is_the_likely_one() -> None:
    watch = looked_at(*(alive(rank, where="hang (job.py:7)" if rank == 2 else "reduce (c.py:1)") for rank in (1, 2, 3)))
    verdict = watch.stuck(record(0, where="reduce (c.py:1)"))
    assert verdict == Verdict(
        text="no rank has gone on for 5 s; rank 2 on node2 (pid 102) stands elsewhere than most, in stage step of step "
        "10 at hang (job.py:7), and is the likely cause (rank 2 of 4 ranks stand there); its stack is in "
        "/runs/a/logs/rank00002.log",
        culprit=2,
    )


@pytest.mark.parametrize("wheres", [("a", "a", "a"), ("a", "b", "b", "a"), ("a", "b"), ("", "a", "a"), ("a", "b", "c")])
def test_it_says_plainly_when_it_cannot_tell(wheres: tuple[str, ...]) -> None:
    mine, *rest = wheres
    watch = looked_at(*(alive(rank, where=where) for rank, where in enumerate(rest, start=1)))
    verdict = watch.stuck(record(0, where=mine))
    assert verdict.culprit is None
    assert "which one is the cause cannot be told: rank" in verdict.text
    assert verdict.text.endswith("; the stacks are in /runs/a/logs")
    shown = re.findall(r"\d+", verdict.text.partition("told:")[2].partition("in stage")[0])
    assert shown[0] == "0"


def test_unknown_stages_of_one_step_are_compared_by_place_only() -> None:
    watch = looked_at(alive(1, stage="polish", where="b"), alive(2, stage="step", where="a"))
    assert watch.stuck(record(0, stage="step", where="a")).culprit == 1


def test_the_only_rank_blames_itself() -> None:
    verdict = observer().stuck(record(0, where="hang (job.py:7)"))
    assert verdict == Verdict(
        text="rank 0 on node0 (pid 100) has not gone on for 5 s, in stage step of step 10 at hang (job.py:7); its "
        "stack is in /runs/a/logs/rank00000.log",
        culprit=0,
    )


def test_known_causes_come_before_comparing() -> None:
    behind = alive(1, step=9)
    frozen = (sight(2), sight(2))
    done = (sight(2, left=""), sight(2, left=""))
    gone = (sight(2), sight(2, process=GONE))
    knows = (sight(2), sight(2, left="rank 3 is frozen", culprit=3))
    for found, culprit in ((frozen, 2), (done, 2), (gone, 2), (knows, 3)):
        assert looked_at(behind, found).stuck(record(0)).culprit == culprit


def test_a_record_of_one_rank_replaced_by_equal_values_but_a_new_beat_is_life() -> None:
    one = record(1)
    watch = observer(1)
    for beat in range(5 * LIMIT):
        assert watch.observe({1: Sight(record=replace(one, beat=beat))}) is None
