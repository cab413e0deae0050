"""The workflow files: linted, covering every package, and publishing without code of the repository."""

import fnmatch
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from members import ROOT, read_members

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FLOWS: dict[str, dict[Any, Any]] = {path.name: yaml.safe_load(path.read_text()) for path in FILES}
ON = True
"""YAML 1.1 reads the key `on` as true."""


@pytest.mark.parametrize(
    "command", [("actionlint",), ("zizmor", "--offline", "--no-progress", "--min-severity=medium")], ids=lambda c: c[0]
)
def test_linters(command: tuple[str, ...]) -> None:
    """Among what zizmor finds: actions that are not pinned, rights that are not needed, texts pasted into commands."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{command[0]} is not installed: it has no wheel for this machine")
    done = subprocess.run([program, *command[1:], *FILES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_publishes_runs_nothing_of_the_repository() -> None:
    release = FLOWS["release.yml"]["jobs"]
    for job in ("publish", "announce"):
        assert not [step for step in release[job]["steps"] if "actions/checkout" in step.get("uses", "")]
    assert [step["run"] for step in release["publish"]["steps"] if "run" in step] == [
        "uv publish --trusted-publishing always dist/*"
    ]
    assert release["publish"]["needs"] == "build"
    assert release["publish"]["environment"] == "pypi"
    first = next(step["run"] for step in release["build"]["steps"] if "run" in step)
    assert first == "git merge-base --is-ancestor HEAD origin/main", "nothing of a commit that is not on main runs"


def test_nothing_that_fails_is_taken_for_passed() -> None:
    for file, flow in FLOWS.items():
        for name, job in flow["jobs"].items():
            assert not [part for part in (job, *job.get("steps", [])) if "continue-on-error" in part], f"{file}:{name}"
    ci = FLOWS["ci.yml"]["jobs"]
    assert set(ci["gate"]["needs"]) == set(ci) - {"gate"}
    assert ci["gate"]["if"] == "always()"
    assert ci["package"]["if"] == "needs.plan.outputs.packages != '[]'"
    assert "if" not in ci["workspace"]


def test_every_package_is_planned_tested_and_released() -> None:
    """The plan has all packages, the matrix is the plan's with the ends of what is promised, a tag starts a release."""
    matrix = FLOWS["ci.yml"]["jobs"]["package"]["strategy"]["matrix"]
    assert matrix == {"package": "${{ fromJSON(needs.plan.outputs.packages) }}"}
    environments = FLOWS["package.yml"]["jobs"]["test"]["strategy"]["matrix"]
    assert environments == {"python": ["3.11", "3.14"], "resolution": ["lowest-direct", "highest"]}
    command = [sys.executable, ROOT / "tools" / "affected_packages.py"]
    planned = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert planned == list(read_members())
    (pattern,) = FLOWS["release.yml"][ON]["push"]["tags"]
    assert all(fnmatch.fnmatch(f"{name}-v1.2.3", pattern) for name in planned)
