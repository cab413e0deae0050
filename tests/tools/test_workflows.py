"""The workflow files: pinned, without rights that they do not need, covering every package, linted."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from members import ROOT, read_members

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXTS = {path.name: path.read_text() for path in FILES}
FLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
ON = True
"""YAML 1.1 reads the key `on` as true."""


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [(file, name, job) for file, flow in FLOWS.items() for name, job in flow["jobs"].items()]


def steps() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{file}:{name}", step) for file, name, job in jobs() for step in job.get("steps", [])]


def test_there_are_three() -> None:
    assert list(FLOWS) == ["ci.yml", "package.yml", "release.yml"]


def test_every_action_is_pinned_by_hash_and_by_the_same_everywhere() -> None:
    found: dict[str, set[str]] = {}
    for name, text in TEXTS.items():
        for line in re.findall(r"^ *(?:- )?uses: (.*)$", text, re.M):
            if line.startswith("./"):
                assert (ROOT / line).is_file(), line
                continue
            pin = re.fullmatch(r"([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line)
            assert pin, f"{name}: {line} is not pinned as owner/name@HASH # vX.Y.Z"
            found.setdefault(pin[1], set()).add(pin[2])
    assert found
    assert {action: hashes for action, hashes in found.items() if len(hashes) != 1} == {}


def test_nothing_has_more_rights_than_it_needs() -> None:
    for file, flow in FLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, file
    own = {(file, name): job["permissions"] for file, name, job in jobs() if "permissions" in job}
    assert own == {
        ("release.yml", "publish"): {"id-token": "write"},
        ("release.yml", "announce"): {"contents": "write"},
    }
    for where, step in steps():
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False, where


def test_what_publishes_runs_nothing_of_the_repository() -> None:
    release = FLOWS["release.yml"]["jobs"]
    assert release["publish"]["needs"] == "build"
    assert release["publish"]["environment"] == "pypi"
    for job in ("publish", "announce"):
        assert not [s for s in release[job]["steps"] if s.get("uses", "").startswith("actions/checkout")]
    assert [s["run"] for s in release["publish"]["steps"] if "run" in s] == [
        "uv publish --trusted-publishing always dist/*"
    ]
    assert "secrets." not in TEXTS["release.yml"]


def test_nothing_from_outside_is_pasted_into_a_command() -> None:
    for where, step in steps():
        assert "${{" not in step.get("run", ""), f"{where}: hand it over by env"


def test_nothing_that_fails_is_taken_for_passed() -> None:
    """No step goes on after a failure, and a job or step is left out only where the plan or the event says so."""
    for file, name, job in jobs():
        assert "continue-on-error" not in job, f"{file}:{name}"
        assert job.get("strategy", {"fail-fast": False})["fail-fast"] is False, f"{file}:{name}"
    for where, step in steps():
        assert "continue-on-error" not in step, where
        assert not re.search(r"\|\||;\s*true|set \+e", step.get("run", "")), where
    conditions = {(file, name): job["if"] for file, name, job in jobs() if "if" in job}
    assert conditions == {
        ("ci.yml", "package"): "needs.plan.outputs.packages != '[]'",
        ("ci.yml", "workspace"): "needs.plan.outputs.workspace == 'true'",
        ("ci.yml", "gate"): "always()",
    }
    assert {step["if"] for _, step in steps() if "if" in step} == {"github.event_name == 'pull_request'"}


def test_what_starts_a_workflow() -> None:
    """Code of a fork runs by `pull_request` alone, which hands it neither secrets nor rights."""
    assert {name: sorted(flow[ON]) for name, flow in FLOWS.items()} == {
        "ci.yml": ["pull_request", "push"],
        "package.yml": ["workflow_call"],
        "release.yml": ["push"],
    }
    assert FLOWS["ci.yml"][ON] == {"pull_request": None, "push": {"branches": ["main"]}}, "no path is left out"


def test_what_asks_the_history_has_it() -> None:
    """In a shallow checkout there is neither the fork point of a change nor the tag of the release before."""
    deep = {
        where for where, step in steps() if "actions/checkout" in step.get("uses", "") and "fetch-depth" in step["with"]
    }
    asks = re.compile(r"--base|release_check|merge-base|tools/check\.py")
    assert {where for where, step in steps() if asks.search(step.get("run", ""))} == deep
    assert {
        step["with"]["fetch-depth"]
        for where, step in steps()
        if where in deep and "actions/checkout" in step.get("uses", "")
    } == {0}


def test_no_tag_that_waits_is_ended_by_another() -> None:
    """GitHub ends the run that waits in a group when one more comes."""
    assert FLOWS["release.yml"]["concurrency"] == {"group": "release-${{ github.ref }}", "cancel-in-progress": False}
    assert FLOWS["ci.yml"]["concurrency"] == {
        "group": "ci-${{ github.event_name == 'pull_request' && github.ref || github.sha }}",
        "cancel-in-progress": "${{ github.event_name == 'pull_request' }}",
    }


def test_a_release_runs_nothing_of_a_commit_that_is_not_on_main() -> None:
    runs = [step["run"] for step in FLOWS["release.yml"]["jobs"]["build"]["steps"] if "run" in step]
    assert runs[0] == "git merge-base --is-ancestor HEAD origin/main"


def test_the_oldest_siblings_that_are_published_are_tried() -> None:
    """Before a merge by what is imported, before a release by the tests."""
    (oldest,) = [step for where, step in steps() if where == "ci.yml:workspace" and "--oldest" in step.get("run", "")]
    assert oldest["run"].endswith('--index "$INDEX"')
    assert oldest["env"]["INDEX"] == "${{ vars.PACKAGE_INDEX }}"
    tests = [
        step["run"] for where, step in steps() if where == "release.yml:build" and "package.py" in step.get("run", "")
    ]
    assert len(tests) == 2
    assert all('--only tests --index "$INDEX"' in " ".join(run.split()) for run in tests)
    assert "--resolution lowest-direct" in tests[1]


def test_every_job_does_all_its_parts() -> None:
    """Each command once, in this order; one that went missing would leave its guard to nobody."""
    parts = {
        "ci.yml:plan": ['tools/affected_packages.py --github "$BASE"', 'tools/changelog.py --base "$BASE"'],
        "ci.yml:workspace": [
            *("tools/check.py tests", "tools/check_ranges.py", "tools/check_dependencies.py", "tools/api_surface.py"),
            *("tools/check_ranges.py --oldest", "actionlint"),
        ],
        "ci.yml:gate": ["python3 tools/ci_gate.py"],
        "package.yml:test": [
            'tools/check_package.py "$PACKAGE" --out "$RUNNER_TEMP/package" --python "$PYTHON" '
            '--resolution "$RESOLUTION"'
        ],
        "release.yml:build": [
            "git merge-base --is-ancestor HEAD origin/main",
            'tools/release_check.py "$TAG" --index "$INDEX" >> "$GITHUB_OUTPUT"',
            'tools/release_check.py "$TAG" --notes > notes.md',
            'tools/check_package.py "$PACKAGE" --out "$RUNNER_TEMP/package" --only tests --index "$INDEX"',
            'tools/check_package.py "$PACKAGE" --out "$RUNNER_TEMP/oldest" --only tests --index "$INDEX"',
            'tools/artifacts.py "$PACKAGE" --out dist --no-cache --index "$INDEX"',
        ],
        "release.yml:publish": ["uv publish --trusted-publishing always dist/*"],
        "release.yml:announce": ['gh release create "$TAG" --repo "$REPOSITORY" --verify-tag'],
    }
    for job in {where for where, _ in steps()} | set(parts):
        text = " ".join(" ".join(step.get("run", "") for where, step in steps() if where == job).split())
        at = -1
        for part in parts[job]:
            found = re.compile(re.escape(part) + r"(?=$|\s|\")").search(text, at + 1)
            assert found, f"{job}: {part}"
            at = found.start()
    assert FLOWS["release.yml"]["jobs"]["announce"]["needs"] == ["build", "publish"]


def test_every_job_has_an_end() -> None:
    for file, name, job in jobs():
        assert "uses" in job or "timeout-minutes" in job, f"{file}:{name}"


def test_every_package_is_planned_tested_and_released() -> None:
    """The plan knows all members, the matrix is the plan's, and the tag of each starts a release."""
    ci = FLOWS["ci.yml"]["jobs"]
    assert ci["package"]["strategy"]["matrix"]["package"] == "${{ fromJSON(needs.plan.outputs.packages) }}"
    assert ci["package"]["uses"] == "./.github/workflows/package.yml"
    (pattern,) = FLOWS["release.yml"][ON]["push"]["tags"]
    command = [sys.executable, ROOT / "tools" / "affected_packages.py", "--all"]
    planned = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    folders = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    assert planned["packages"] == folders == sorted(read_members())
    assert [name for name in folders if not fnmatch.fnmatch(f"{name}-v1.2.3", pattern)] == []


def test_the_gate_waits_for_every_job() -> None:
    ci = FLOWS["ci.yml"]["jobs"]
    assert set(ci["gate"]["needs"]) == set(ci) - {"gate"}
    assert ci["gate"]["if"] == "always()"


def test_the_pythons_are_the_ends_of_what_is_promised() -> None:
    matrix = FLOWS["package.yml"]["jobs"]["test"]["strategy"]["matrix"]
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert promised == ">=3.11,<3.15"
    assert matrix["python"] == ["3.11", "3.14"]
    assert sorted(matrix["resolution"]) == ["highest", "locked", "lowest-direct"]
    assert set(matrix) == {"python", "resolution"}, "nothing is left out"


def commands() -> list[str]:
    """Every call of a tool of ours, in workflows and in the list of commands."""
    texts = [step["run"] for _, step in steps() if "run" in step]
    texts += [(ROOT / name).read_text() for name in ("justfile", ".pre-commit-config.yaml")]
    return sorted({" ".join(line.split()) for text in texts for line in re.findall(r"tools/[^\n>#{]+", text)})


@pytest.mark.parametrize("command", commands())
def test_every_tool_that_is_called_has_the_options_that_it_gets(command: str) -> None:
    """Read, not run: the parser of each tool names its options in the source."""
    name, *words = command.split()
    source = (ROOT / name).read_text()
    for word in words:
        if option := re.match(r"--[a-z][a-z-]*", word):
            assert f'"{option[0]}"' in source or "pytest_arguments" in source, f"{name} has no {option[0]}"


@pytest.mark.parametrize("name", ["justfile", ".pre-commit-config.yaml"])
def test_every_program_of_the_lists_of_commands_is_here(name: str) -> None:
    lines = re.findall(r"^(?:    |\s+entry: )(uv run .*)$", (ROOT / name).read_text(), re.M)
    assert len(lines) >= 7
    for line in lines:
        run = re.fullmatch(r"uv run --locked (\S+)(?: (tools/[\w/]+\.py))?.*", line)
        assert run, f"{name}: {line}: the lock is not looked at"
        assert shutil.which(run[1], path=str(Path(sys.executable).parent)), f"{name}: {line}"
        assert run[1] != "python" or (ROOT / run[2]).is_file(), f"{name}: {line}"


def test_hooks_look_at_files_that_there_are() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert len({hook["id"] for hook in hooks}) == len(hooks) >= 7
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for hook in hooks:
        if "files" in hook:
            assert any(re.search(hook["files"], file) for file in files), hook["id"]


SCHEMA = ("check-jsonschema", "--builtin-schema")
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (("actionlint",), FILES),
        (("zizmor", "--offline", "--no-progress", "--min-severity=medium"), FILES),
        ((*SCHEMA, "vendor.github-workflows"), FILES),
        ((*SCHEMA, "vendor.github-issue-forms"), FORMS),
        ((*SCHEMA, "vendor.dependabot"), [ROOT / ".github" / "dependabot.yml"]),
    ],
    ids=["actionlint", "zizmor", "workflows", "forms", "dependabot"],
)
def test_linters(command: tuple[str, ...], files: list[Path]) -> None:
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip(f"{command[0]} is not installed: {', '.join(path.name for path in files)} were not linted by it")
    done = subprocess.run([program, *command[1:], *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "unpinned-uses"),
        ("tools/ci_gate.py", "tools/ci_gate.py ${{ github.head_ref }}", "template-injection"),
        ("contents: read", "contents: write", "excessive-permissions"),
    ],
)
def test_a_careless_workflow_is_found(tmp_path: Path, old: str, new: str, finding: str) -> None:
    program = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("zizmor is not installed: it was not seen to find anything")
    assert old in TEXTS["ci.yml"]
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "ci.yml").write_text(TEXTS["ci.yml"].replace(old, new, 1))
    command = [program, "--offline", "--no-progress", folder / "ci.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert finding in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("needs: [plan,", "needs: [plans, plan,", "job-needs"),
        ("fromJSON(needs.plan.", "fromJSON(needs.plans.", "expression"),
        ("runs-on: ubuntu-24.04", "runs-on: ubuntu-42", "runner-label"),
    ],
)
def test_a_workflow_that_could_not_run_is_found(tmp_path: Path, old: str, new: str, finding: str) -> None:
    program = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("actionlint is not installed: it was not seen to find anything")
    assert old in TEXTS["ci.yml"]
    planted = tmp_path / "ci.yml"
    planted.write_text(TEXTS["ci.yml"].replace(old, new, 1))
    done = subprocess.run([program, planted], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"[{finding}]" in done.stdout


def test_a_workflow_of_another_form_is_found(tmp_path: Path) -> None:
    program = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("check-jsonschema is not installed: it was not seen to find anything")
    (tmp_path / "ci.yml").write_text(TEXTS["ci.yml"].replace("runs-on:", "run-on:", 1))
    command = [program, *SCHEMA[1:], "vendor.github-workflows", tmp_path / "ci.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
