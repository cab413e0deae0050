"""Real training under `lt launch run --on local`: two gloo ranks, one of them killed, end with a quiet run's bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lt_test_helpers.rank_processes import start_training
from lt_test_helpers.run_files import read_losses


@pytest.fixture
def recipe(prepared: Path, tmp_path: Path) -> Path:
    text = (prepared / "run.toml").read_text(encoding="utf-8").replace("max_steps = 20", "max_steps = 40")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    return tmp_path / "run.toml"


def test_a_killed_rank_is_named_and_the_run_ends_with_the_losses_of_a_quiet_one(recipe: Path, tmp_path: Path) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    for folder in (quiet, disturbed):
        folder.mkdir()
    with start_training(recipe, quiet) as run:
        run.end([0, 0])
    command = [sys.executable, "-m", "lt_launch", "launch"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LT_LAUNCH_HOME": str(tmp_path)}
    out, launch = disturbed / "run", disturbed / "run" / "launch"
    with (
        open(tmp_path / "said.txt", "w", encoding="utf-8") as said,
        subprocess.Popen(
            [*command, "run", str(recipe), "--nproc-per-node", "2"],
            cwd=disturbed,
            env=environ,
            stdout=said,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        deadline = time.monotonic() + 240
        while not (out / "checkpoints" / "step-00000008" / "COMMIT").exists():
            assert process.poll() is None, (tmp_path / "said.txt").read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(json.loads((out / "alive" / "rank00001.json").read_bytes())["pid"], signal.SIGKILL)
        code = process.wait(400)
    text = (tmp_path / "said.txt").read_text(encoding="utf-8")
    assert code == 0, text
    assert f"rank 1 on {os.uname().nodename} was the first to fail: killed by SIGKILL" in text
    kinds = [json.loads(file.read_bytes())["kind"] for file in sorted(launch.glob("stages/*/attempt-*/exit.json"))]
    assert kinds == ["killed", "done"]
    expected = read_losses(quiet / "run")
    assert sorted(expected) == list(range(1, 41))
    assert read_losses(out) == expected
    done = subprocess.run(
        [*command, "status", "run", "--json"], cwd=disturbed, env=environ, capture_output=True, text=True, check=True
    )
    (row,) = json.loads(done.stdout)
    assert (row["state"], row["attempt"], row["progress"]["step"]) == ("completed", 1, 40)
    assert row["progress"]["loss"] == expected[40]
