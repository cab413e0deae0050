"""Options of `lt launch` that shape a job: each changes what would be sent, or the printed text.

`lt launch run` is asked for what it would launch: `launch` itself is replaced, and prints the rendered job.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lt_launch import launcher
from lt_launch.target import get_target
from lt_test_helpers.option_cases import Call, OptionCase

SLURM = "--on slurm --profile {w}/slurm.toml"
SSH = "--on ssh --hostfile {w}/hosts"
ALGORITHM = "lt launch sagemaker-algorithm --name one --image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/lt:1"


def cases(command: str) -> list[OptionCase]:
    """Return the cases of the options that `render` and `run` share."""
    job, recipe, stages = (f"lt launch {command} {{w}}/{name}.toml" for name in ("job", "run", "stages"))
    return [
        OptionCase(f"lt launch {command} --on", f"{job} --profile {{w}}/slurm.toml", "--on slurm", "text"),
        OptionCase(f"lt launch {command} --profile", f"{job} {SLURM}", "--profile {w}/other.toml", "text"),
        OptionCase(f"lt launch {command} --nodes", f"{job} {SLURM}", "--nodes 2", "text"),
        OptionCase(f"lt launch {command} --nproc-per-node", job, "--nproc-per-node 2", "text"),
        OptionCase(f"lt launch {command} --env", job, "--env COLOR=red", "text"),
        OptionCase(f"lt launch {command} --set", recipe, "--set optimizer.lr=0.125", "text"),
        OptionCase(f"lt launch {command} --hostfile", f"{job} {SSH}", "--hostfile {w}/hosts2", "text"),
        OptionCase(f"lt launch {command} --out", job, "--out elsewhere", "text"),
        OptionCase(f"lt launch {command} --stage", stages, "--stage second", "text"),
    ]


CASES = [
    *cases("render"),
    OptionCase("lt launch render --output-dir", "lt launch render {w}/job.toml", "--output-dir files", "names"),
    *cases("run"),
    OptionCase("lt launch run --detach", "lt launch run {w}/job.toml", "--detach", "text"),
    OptionCase("lt launch run --include-untracked", "lt launch run {w}/job.toml", "--include-untracked", "text"),
    OptionCase("lt launch nodes --on", "lt launch nodes", SSH.replace("hosts", "nobody"), "text"),
    OptionCase("lt launch sagemaker-algorithm --name", ALGORITHM, "--name two", "text"),
    OptionCase(
        "lt launch sagemaker-algorithm --image",
        ALGORITHM,
        "--image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/lt:2",
        "text",
    ),
    OptionCase("lt launch sagemaker-algorithm --digest", ALGORITHM, f"--digest sha256:{'0' * 64}", "text"),
    OptionCase("lt launch sagemaker-algorithm --engine", ALGORITHM, "--engine neuron", "text"),
    OptionCase("lt launch sagemaker-algorithm --description", ALGORITHM, "--description mine", "text"),
]


@pytest.fixture(autouse=True)
def shown_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `launch` print what it would launch."""

    def show(pipeline: Any, profile: Any, on: str, **given: bool) -> int:
        sys.stdout.write(f"{launcher.format_rendered(get_target(on).render(pipeline, profile))}{given}\n")
        return 0

    monkeypatch.setattr(launcher, "launch", show)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_option_changes_what_is_launched(call: Call, capsys: pytest.CaptureFixture[str], case: OptionCase) -> None:
    call.check(capsys, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_an_ignored_option_is_noticed(
    call: Call, capsys: pytest.CaptureFixture[str], ignore: Callable[[str], None], case: OptionCase
) -> None:
    ignore(case.option)
    call.check_ignored(capsys, case)
