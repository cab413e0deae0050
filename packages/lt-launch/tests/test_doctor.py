"""Doctor on this machine, what a machine's description means, and what a run would cost."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from lt_launch.costs import estimate_costs
from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Resources, Stage
from lt_launch.look import look
from lt_launch.machine import describe_machine, machine_findings
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file

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


PRICES = """
date = 2026-11-01
currency = "USD"
[per_node_hour]
big = 60.0
default = 2
[device]
big = "h100"
"""


@pytest.fixture
def prices(tmp_path: Path) -> Profile:
    (tmp_path / "prices.toml").write_text(PRICES)
    return Profile().with_values({"prices.file": str(tmp_path / "prices.toml")}, "test")


def pipeline_of(*jobs: Job, array: int = 0) -> Pipeline:
    return Pipeline(name="p", stages=tuple(Stage(job=job, array=array) for job in jobs))


TODAY = datetime.date(2026, 11, 21)


def test_the_most_that_a_run_can_cost(prices: Profile) -> None:
    small = Job(name="a", argv=("x",), time_limit_s=1800)
    large = Job(name="b", argv=("x",), nodes=4, time_limit_s=36000, resources=Resources(instance_type="big"))
    found = [finding.detail for finding in estimate_costs(pipeline_of(small, large), prices, today=TODAY)]
    assert found == [
        "a: at most 0.5 node hours x 2 = 1.00 USD",
        "b: at most 40 node hours x 60 = 2400.00 USD",
        "at most 2401.00 USD for one attempt of each stage, at prices of 2026-11-01",
    ]
    (array, _) = estimate_costs(pipeline_of(small, array=10), prices, today=TODAY)
    assert array.detail == "a: at most 5 node hours x 2 = 10.00 USD"


def test_what_is_not_known_is_said(prices: Profile) -> None:
    open_ended = Job(name="a", argv=("x",))
    (last,) = estimate_costs(pipeline_of(open_ended), prices, today=TODAY)
    assert (last.level, last.detail.endswith("without a")) == ("warning", True)
    limited = Job(name="a", argv=("x",), time_limit_s=60)
    *_, old = estimate_costs(pipeline_of(limited), prices, today=datetime.date(2027, 3, 1))
    assert (old.level, old.detail.endswith("120 days old")) == ("warning", True)
    assert list(estimate_costs(pipeline_of(limited), Profile())) == []


def test_what_the_plan_expects_a_training_job_to_take(prices: Profile, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[job]\nrecipe = "r.toml"\nprocs_per_node = 8\ntime_limit = "60s"\n[job.resources]\ninstance_type = "big"\n'
    )
    (tmp_path / "r.toml").write_text('[model]\npreset = "litespark-default"\n[data]\nstore = "s"\n')
    pipeline = read_run_file(tmp_path / "run.toml", Profile(), RunOverrides()).pipeline
    found = {finding.check: finding for finding in estimate_costs(pipeline, prices, today=TODAY)}
    assert "estimated by lt train plan" in found["plan"].detail
    assert (found["plan"].level, "more than its time limit" in found["plan"].detail) == ("warning", True)


@pytest.mark.parametrize("text", ["", "date = 2026-11-01", "date = 2026-11-01\n[per_node_hour]\na = 'x'", "= 1"])
def test_price_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    profile = Profile().with_values({"prices.file": str(tmp_path / "p.toml")}, "test")
    with pytest.raises(LaunchError, match=r"prices\.file"):
        list(estimate_costs(pipeline_of(Job(name="a", argv=("x",))), profile, today=TODAY))
