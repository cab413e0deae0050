"""When a stage is done, how an attempt ended, when another one may help: on values and small files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_launch import policy
from lt_launch.policy import PIECE, WHOLE, Place, fingerprint, key, write_table

SPEC: dict[str, Any] = {"argv": ["a"], "env": {}, "inputs": [], "outputs": [], "cwd": ""}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "stages" / "train" / "spec.json")


# --- when a stage is done


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        *((one, True) for one in ({"argv": ["b"]}, {"env": {"A": "1"}}, {"recipe": "x"}, {"image": "x"})),
        *((one, True) for one in ({"setup": ["x"]}, {"array": 2})),
        *((one, False) for one in ({"nodes": 2}, {"grace_s": 1}, {"restart": {"max_restarts": 1}}, {"name": "x"})),
    ],
)
def test_what_is_run_is_part_of_the_key_where_and_how_long_is_not(
    place: Place, change: dict[str, Any], is_other: bool
) -> None:
    assert (key(SPEC | change, place) != key(SPEC, place)) is is_other


def test_a_stage_before_that_was_something_else_and_each_element_have_keys_of_their_own(place: Place) -> None:
    """Also where no file is named that the one makes and the other reads."""
    spec = SPEC | {"after": [{"name": "a", "array": 0}, {"name": "b", "array": 2}]}
    found = {key(spec, place)}
    for name in ("a", "b.0", "b.1"):
        write_table(place.folder.parent / name / "done.json", {"key": name})
        found.add(key(spec, place))
    assert len(found) == 4
    assert len({key(SPEC, Place(place.stage / "spec.json", index)) for index in (None, 0, 1)}) == 3


def test_a_fingerprint_is_the_content(tmp_path: Path) -> None:
    file = tmp_path / "d" / "e" / "f"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    first = fingerprint(tmp_path / "d")
    file.write_text("y")
    assert fingerprint(tmp_path / "d") != first
    file.write_text("x")
    os.utime(file, (1, 1))
    assert fingerprint(tmp_path / "d") == first
    file.rename(tmp_path / "d" / "e" / "g")
    assert fingerprint(tmp_path / "d") != first
    assert fingerprint(tmp_path / "gone") == "missing"
    os.mkfifo(tmp_path / "pipe")
    assert fingerprint(tmp_path / "pipe") == "no regular file"


@pytest.mark.parametrize(("at", "byte"), [(0, b"x"), (WHOLE + PIECE - 1, b"x"), (WHOLE + PIECE, b"\0")])
def test_a_large_file_is_told_by_its_ends_its_size_and_its_time(tmp_path: Path, at: int, byte: bytes) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(WHOLE + PIECE)
    os.utime(path, (1, 1))
    first = fingerprint(path)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(byte)
    os.utime(path, (1, 1))
    assert fingerprint(path) != first


# --- how an attempt ended


@pytest.mark.parametrize(
    ("codes", "code", "asked", "killed", "ending"),
    [
        ({}, 1, False, False, ("failed", 1, None)),
        ({}, 137, False, False, ("killed", 137, None)),
        ({}, 138, True, False, ("stopped", 75, None)),
        ({}, 142, False, False, ("requeued", 75, None)),
        ({}, 75, True, False, ("stopped", 75, None)),
        ({0: 75, 1: 75, 2: 75}, 75, False, False, ("requeued", 75, 0)),
        ({0: 75, 1: 75, 2: 75}, 75, True, False, ("stopped", 75, None)),
        ({0: 75, 1: 75, 2: 138}, 138, True, False, ("stopped", 75, None)),
        ({0: 75, 1: 142, 2: 75}, 142, False, False, ("requeued", 75, 0)),
        ({1: 137, 0: 75, 2: 75}, 137, False, False, ("killed", 137, 1)),
        ({2: 1, 1: 64, 0: 75}, 75, False, False, ("failed", 64, 1)),
        ({2: 1, 1: 64, 0: 75}, 75, True, False, ("failed", 64, 1)),
        ({0: 75, 1: 139, 2: 75}, 139, True, False, ("killed", 139, 1)),
        ({2: 7, 0: 143}, 143, False, True, ("failed", 7, 2)),
        ({0: 75, 1: 75}, 137, False, False, ("lost", 75, 2)),
        ({0: 75, 1: 75}, 137, True, True, ("stopped", 75, None)),
        ({0: 0, 1: 0, 2: 0}, 0, True, False, ("done", 0, None)),
        ({0: 0, 1: 0, 2: 0}, 138, False, False, ("done", 0, None)),
    ],
)
def test_how_an_attempt_ended(
    codes: dict[int, int], code: int, asked: bool, killed: bool, ending: tuple[str, int, int | None], tmp_path: Path
) -> None:
    leave(tmp_path, codes)
    notes = policy.read_notes(tmp_path)
    kind, ended, _, first = policy.judge(range(3), notes, code, asked=asked, killed=killed)
    assert (kind, ended, first) == ending


def leave(notes: Path, codes: dict[int, int]) -> None:
    """What the processes of an attempt leave: their exit codes, in the order given."""
    for at, (rank, code) in enumerate(codes.items()):
        (notes / str(rank)).write_text(f"{code} n{rank + 1}\n")
        os.utime(notes / str(rank), (at, at))


def begin(place: Place, wanted: dict[str, Any], restarts: int = 0) -> int | None:
    restart = {"max_restarts": 3, "max_without_progress": 2}
    wanted |= SPEC | {"nodes": 3, "procs_per_node": 1, "restart": restart} | wanted
    return policy.begin_attempt(wanted, place, restarts)


def test_an_attempt_that_was_cut_short_before_any_process_began_is_no_success(place: Place) -> None:
    """Of a job without a run directory nothing but its exit codes can prove that it has run."""
    wanted: dict[str, Any] = {}
    assert begin(place, wanted) == 0
    assert begin(place, wanted, restarts=1) == 1
    result = json.loads((place.attempt(0) / "exit.json").read_bytes())
    assert (result["kind"], result["code"], result["interrupted"]) == ("lost", 75, True)
    assert not place.stamp.exists()


def test_processes_that_nobody_started_are_no_success(place: Place) -> None:
    """As srun ends with 0 when a node was lost and the others had finished."""
    wanted: dict[str, Any] = {}
    for number, (present, kind) in enumerate([((0, 2), "lost"), ((0, 1, 2), "done")]):
        assert begin(place, wanted) == number
        leave(place.attempt(number) / "notes", dict.fromkeys(present, 0))
        result = policy.conclude(wanted, place, number, 0)
        assert result == json.loads((place.attempt(number) / "exit.json").read_bytes())
        assert (result["kind"], place.stamp.exists()) == (kind, kind == "done")
    assert begin(place, wanted) is None


def test_a_stage_whose_output_has_changed_runs_again(place: Place, tmp_path: Path) -> None:
    wanted = {"outputs": ["made"], "cwd": str(tmp_path), "nodes": 1}
    for number in range(2):
        assert begin(place, wanted) == number
        (tmp_path / "made").write_text("as it was made")
        leave(place.attempt(number) / "notes", {0: 0})
        assert policy.conclude(wanted, place, number, 0)["kind"] == "done"
        assert begin(place, wanted) is None
        (tmp_path / "made").write_text("changed")


def test_training_is_done_when_rank_0_noted_so_in_this_attempt(place: Place, tmp_path: Path) -> None:
    wanted = {"completion": "run_dir", "run_dir": "run", "cwd": str(tmp_path), "nodes": 1}
    (tmp_path / "run").mkdir()
    events = tmp_path / "run" / "events.jsonl"
    events.write_text('{"event": "completed"}\n')
    for number, kind in enumerate(["failed", "done"]):
        assert begin(place, wanted) == number
        leave(place.attempt(number) / "notes", {0: 0})
        events.write_text(events.read_text() + '{"event": "completed"}\n' * number)
        assert policy.conclude(wanted, place, number, 0)["kind"] == kind


# --- when another attempt may help


def ended(kind: str, before: int, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step_before": before, "step": step, "code": 75, "reason": "", **more}


def attempts(place: Place, *results: dict[str, Any]) -> Place:
    for result in results:
        write_table(place.attempt(place.new_attempt()) / "exit.json", result)
    return place


TRAINS = {"completion": "run_dir", "run_dir": "run", "restart": {"max_restarts": 3, "max_without_progress": 2}}


@pytest.mark.parametrize(
    ("results", "wise", "words"),
    [
        ([ended("failed", -1, 5)], False, "ended as failed is not started again"),
        ([ended("failed", -1, 5, interrupted=True)], False, "ended as failed is not started again"),
        ([ended("stopped", -1, 5)], True, "cut short by the queue; 0 of 3"),
        ([ended("lost", -1, 5)], True, "1 of 3"),
        ([ended("lost", i, i + 1) for i in range(3)], True, "3 of 3"),
        ([ended("lost", i, i + 1) for i in range(4)], False, "3 of 3 restarts are used up"),
        ([ended("stopped", i, i + 1) for i in range(50)], True, "0 of 3"),
        ([ended("killed", 5, 5)], True, "1 of 3"),
        ([ended("killed", -1, 5), ended("killed", 5, 5), ended("killed", 5, 5)], False, "made no new checkpoint"),
        ([ended("killed", 5, 5), ended("killed", 5, 6), ended("killed", 6, 6)], True, "3 of 3"),
        ([ended("stopped", 5, 5)] * 3, True, "0 of 3"),
        ([ended("stopped", 5, 5)] * 4, False, "4 attempt(s) in a row"),
        ([ended("lost", 5, 5, interrupted=True)] * 3, True, "0 of 3"),
    ],
)
def test_when_another_attempt_may_help(place: Place, results: list[dict[str, Any]], wise: bool, words: str) -> None:
    yes, why = policy.should_requeue(TRAINS, attempts(place, *results))
    assert yes is wise, why
    assert words in why


def test_what_was_before_a_person_launched_again_does_not_count(place: Place, tmp_path: Path) -> None:
    attempts(place, *[ended("lost", 5, 5)] * 5)
    wanted = {**TRAINS, "cwd": str(tmp_path)}
    assert not policy.should_requeue(TRAINS, place)[0]
    assert begin(place, wanted) == 5, "a person's start is never refused"
    write_table(place.attempt(5) / "exit.json", ended("lost", 5, 5))
    assert policy.should_requeue(TRAINS, place) == (True, "attempt 5 was ended as lost; 1 of 3 restarts are used")
    assert begin(place, wanted, restarts=1) == 6
    write_table(place.attempt(6) / "exit.json", ended("lost", 5, 5))
    assert not policy.should_requeue(TRAINS, place)[0]
    assert begin(place, wanted, restarts=2) is None


def test_a_cancelled_stage_is_not_started_again_by_the_queue(place: Place, tmp_path: Path) -> None:
    attempts(place, ended("lost", 5, 6))
    wanted = {**TRAINS, "cwd": str(tmp_path)}
    (place.stage / policy.CANCELLED).touch()
    assert begin(place, wanted, restarts=1) is None
    (place.stage / policy.CANCELLED).unlink()
    assert begin(place, wanted, restarts=1) == 1


def test_the_policy_runs_alone(tmp_path: Path) -> None:
    """As `python3 <out>/launch/policy.py`, isolated from what is installed."""
    copy = tmp_path / "policy.py"
    copy.write_bytes(Path(policy.__file__).read_bytes())
    command = [sys.executable, "-I", "-S", copy, "run", tmp_path / "missing.json", "--", "srun"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "submit this script in its own folder" in done.stderr
