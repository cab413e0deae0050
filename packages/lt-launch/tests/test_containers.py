"""What lies in containers/: Dockerfiles and scripts through their linters, policies by shape and narrowness."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONTAINERS = Path(__file__).parents[3] / "containers"
POLICIES = sorted((CONTAINERS / "iam").glob("*.json"))
ANYWHERE = ("RegistryToken", "ListJobs", "WriteMetrics", "InsideTheVpc", "PullImage", "Subscriptions")
"""Actions that AWS itself lets nobody narrow to a resource, or not usefully."""
LINTERS = {".Dockerfile": "hadolint", ".sh": "shellcheck"}
LINTED = [path for suffix in LINTERS for path in sorted(CONTAINERS.glob(f"*{suffix}"))]


@pytest.mark.parametrize("path", LINTED, ids=lambda path: path.name)
def test_dockerfiles_and_scripts_are_clean(path: Path) -> None:
    linter = Path(sys.executable).with_name(LINTERS[path.suffix])
    done = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_policies_allow_named_actions_on_named_things(path: Path) -> None:
    policy = json.loads(path.read_text(encoding="utf-8"))
    assert policy["Version"] == "2012-10-17"
    for statement in policy["Statement"]:
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert statement["Effect"] == "Allow"
        assert not any("*" in action for action in statement["Action"]), "every action by its name"
        resources = statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
        assert resources != ["*"] or statement["Sid"] in ANYWHERE, statement["Sid"]
        if "iam:PassRole" in statement["Action"]:
            assert statement["Condition"]["StringEquals"] == {"iam:PassedToService": "sagemaker.amazonaws.com"}


def test_enroot_script_makes_a_file_that_is_whole_or_not_there(tmp_path: Path) -> None:
    """With an enroot that writes half a file and fails, and one that succeeds."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    enroot = bin_ / "enroot"
    environ = {"PATH": f"{bin_}:/usr/bin:/bin", "LT_SCRATCH": str(tmp_path)}
    script = [str(CONTAINERS / "enroot.sh"), "docker://registry#lt:1", str(tmp_path / "lt.sqsh")]
    enroot.write_text('#!/bin/sh\nprintf half > "$3"\nexit 1\n')
    enroot.chmod(0o755)
    assert subprocess.run(["bash", *script], env=environ, capture_output=True, check=False).returncode == 1
    assert not (tmp_path / "lt.sqsh").exists()
    enroot.write_text('#!/bin/sh\n[ "$1 $2 $4" = "import --output docker://registry#lt:1" ] && printf whole > "$3"\n')
    done = subprocess.run(["bash", *script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lt.sqsh").read_text() == "whole"
    assert not list(tmp_path.glob("lt-enroot.*")), "its scratch is gone"
    assert subprocess.run(["bash", *script], env=environ, capture_output=True, check=False).returncode == 64
