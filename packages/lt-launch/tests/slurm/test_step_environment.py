"""The environment of a Slurm job's step: what the script has, the job's own, and where its processes meet."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lt_launch.policy import Place, SlurmStart

SCONTROL = '#!/bin/sh\necho "NodeName=$4 Arch=x86_64\n   NodeAddr=10.0.0.7 NodeHostName=$4"\n'


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A start listens to the scheduler's signals; this process does not afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment of a step of a job, of an element of its array with an index."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def go(index: int | None = None, *, environ: Mapping[str, str] = {}, **values: Any) -> dict[str, str]:
        spec = {"nodes": 1, "procs_per_node": 1} | values
        start = SlurmStart(spec, Place(tmp_path / "train" / "spec.json", index), {"SLURM_JOB_ID": "9"} | environ)
        start.folder = start.place.attempt(2)
        return start._environment(2, "n1")

    return go


def test_an_element_of_an_array_knows_its_number_and_their_count(environment: Any) -> None:
    """With them the elements share the work; a job that is no array is told of none."""
    found = environment(4, array=5)
    assert (found["LT_ARRAY_INDEX"], found["LT_ARRAY_SIZE"]) == ("4", "5")
    assert [name for name in environment() if name.startswith("LT_ARRAY")] == []


def test_processes_meet_at_the_address_of_the_first_node(environment: Any, tmp_path: Path) -> None:
    found = environment()
    assert (found["MASTER_ADDR"], found["LT_ATTEMPT"]) == ("10.0.0.7", "2")
    assert 1024 <= int(found["MASTER_PORT"]) < 65536
    assert found["LT_NOTES"] == str(tmp_path / "train" / "attempt-002" / "notes")


def test_the_jobs_variables_go_before_the_scripts_and_both_before_defaults(environment: Any) -> None:
    found = environment(
        environ={"A": "script", "B": "script"}, env={"A": "job", "OMP_NUM_THREADS": "7"}, procs_per_node=2
    )
    assert (found["A"], found["B"], found["OMP_NUM_THREADS"]) == ("job", "script", "7")
    assert environment(procs_per_node=2)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(), "one process may have all cores"
