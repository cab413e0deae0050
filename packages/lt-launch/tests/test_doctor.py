"""Doctor on this machine, and what a machine's description means."""

from pathlib import Path
from typing import Any

import pytest

from lt_launch.job import Job, Pipeline
from lt_launch.look import look
from lt_launch.machine import describe_machine, machine_findings

GOOD: dict[str, Any] = {
    "host": "h",
    "python": "3.11.2",
    "executable": "/p",
    "cpus": 96,
    "memory_gib": 1024.0,
    "devices": ["NVIDIA H100"] * 8,
    "driver": "570.1",
    "efa": True,
    "folder": "/data",
    "writable": True,
    "free_gib": 5000.0,
    "shm_gib": 64.0,
    "memlock": "unlimited",
    "packages": {"lt-trainer": "0.1.0", "lt-trainer-gpu": "0.1.0"},
}
TRAIN = Pipeline.from_job(
    Job(name="x", argv=("x",), completion="run_dir", run_dir="r", engine="gpu", procs_per_node=8, nodes=2)
)


def levels(found: dict[str, Any], pipeline: Pipeline | None = TRAIN) -> dict[str, str]:
    return {finding.check: finding.level for finding in machine_findings(found, pipeline)}


def test_a_good_machine() -> None:
    assert set(levels(GOOD).values()) == {"ok"}
    assert describe_machine(GOOD) == "96 cores, 1024 GiB, 8 x NVIDIA H100"


@pytest.mark.parametrize(
    ("change", "what", "level"),
    [
        ({"python": "3.9.1"}, "python", "error"),
        ({"packages": {"lt-trainer": "0.1.0"}}, "packages", "error"),
        ({"packages": {}}, "packages", "error"),
        ({"devices": ["NVIDIA H100"] * 7}, "devices", "error"),
        ({"devices": []}, "devices", "warning"),
        ({"writable": False}, "disk", "error"),
        ({"free_gib": 3.0}, "disk", "warning"),
        ({"shm_gib": 0.06}, "/dev/shm", "warning"),
        ({"memlock": "65536"}, "memlock", "error"),
    ],
)
def test_what_is_wrong_has_a_remedy(change: dict[str, Any], what: str, level: str) -> None:
    found = {finding.check: finding for finding in machine_findings(GOOD | change, TRAIN, host="h7")}
    assert (found[what].level, found[what].host) == (level, "h7")
    assert found[what].remedy
    assert [name for name, one in found.items() if one.level != "ok"] == [what]


def test_a_job_that_does_not_train_needs_neither_devices_nor_engine() -> None:
    bare = GOOD | {"devices": [], "packages": {}, "shm_gib": 0.06}
    assert set(levels(bare, None).values()) == {"ok"}


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    found = look(str(tmp_path), "token")
    assert (found["folder"], found["writable"], found["sees_token"]) == (str(tmp_path), True, True)
    assert "lt-trainer" in found["packages"]
    missing = look(str(tmp_path / "not" / "made"), "token")
    assert (missing["folder"], missing["sees_token"]) == (str(tmp_path), False)
    assert GOOD.keys() <= found.keys()
