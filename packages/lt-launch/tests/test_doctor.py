"""Devices of a machine, and what a machine's description means for a run."""

from pathlib import Path
from typing import Any

import pytest

from lt_launch.doctor import machine_findings
from lt_launch.job import Job, Pipeline
from lt_launch.look import count_devices, look

GOOD: dict[str, Any] = {
    "python": "3.11.2",
    "executable": "/p",
    "devices": 8,
    "driver": "NVIDIA H100, 570.1",
    "folder": "/data",
    "writable": True,
    "free_gib": 5000.0,
    "packages": {"lt-trainer": "0.1.0", "lt-trainer-gpu": "0.1.0"},
}
TRAIN = Job(name="x", argv=("x",), completion="run_dir", run_dir="r", engine="gpu", procs_per_node=8, nodes=2)


@pytest.mark.parametrize(
    ("change", "what", "level"),
    [
        ({}, "", ""),
        ({"python": "3.9.1"}, "python", "error"),
        ({"packages": {"lt-trainer": "0.1.0"}}, "packages", "error"),
        ({"packages": {}}, "packages", "error"),
        ({"devices": 7}, "devices", "error"),
        ({"devices": 0}, "devices", "warning"),
        ({"writable": False}, "disk", "error"),
        ({"free_gib": 3.0}, "disk", "warning"),
    ],
)
def test_what_is_wrong_has_a_remedy(change: dict[str, Any], what: str, level: str) -> None:
    found = list(machine_findings(GOOD | change, Pipeline.from_job(TRAIN), host="h7"))
    assert [(one.check, one.level, bool(one.remedy)) for one in found if one.level != "ok"] == [(what, level, True)][
        : bool(what)
    ]
    assert {one.host for one in found} == {"h7"}


def test_a_job_that_does_not_train_needs_neither_devices_nor_engine() -> None:
    bare = GOOD | {"devices": 0, "packages": {}}
    found = machine_findings(bare, Pipeline.from_job(Job(name="x", argv=("x",))))
    assert {one.level for one in found} == {"ok"}


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    found = look(str(tmp_path), "token")
    assert (found["folder"], found["writable"], found["sees_token"]) == (str(tmp_path), True, True)
    assert "lt-trainer" in found["packages"]
    assert found.keys() == GOOD.keys() | {"sees_token"}
    assert look(str(tmp_path / "not" / "made"), "token")["folder"] == str(tmp_path)


NEURON = ["neuron0", "neuron1", "neuron2", "neuron10", "neuron_ctl"]


@pytest.mark.parametrize(
    ("devices", "cores", "environ", "expected"),
    [
        ([], 0, {}, 0),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 0, {}, 2),
        (["nvidia0", "nvidia1"], 0, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0", "nvidia1"], 0, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (NEURON[:4], 2, {}, 8),
        (NEURON, 0, {}, 8),
        (NEURON[:4], 8, {}, 16),
        (NEURON, 0, {"NEURON_RT_VISIBLE_CORES": "0-3,6"}, 5),
        (NEURON, 0, {"NEURON_RT_NUM_CORES": "3"}, 3),
    ],
)
def test_gpus_else_neuron_cores_are_counted_as_far_as_the_environment_shows_them(
    tmp_path: Path, devices: list[str], cores: int, environ: dict[str, str], expected: int
) -> None:
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
        if cores:
            folder = tmp_path / "sys" / "class" / "neuron_device" / name
            folder.mkdir(parents=True)
            (folder / "core_count").write_text(f"{cores}\n")
    assert count_devices(tmp_path, environ) == expected
