"""What holds between the packages: ranges, declared imports, layers, what a change concerns, what a release says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from affected_packages import READ_BY_TESTS, affected_packages, changed_paths
from check_ranges import find_range_problems, next_breaking_version
from members import ROOT, read_members
from packaging.version import Version
from release import check_release

MEMBERS = read_members()
GIT = ["git", "-c", "user.name=A Person", "-c", "user.email=person@example.com", "-c", "commit.gpgsign=false"]
PYPROJECT = '[project]\nname = "{}"\nversion = "{}"\ndependencies = [{}]\noptional-dependencies.cli = ["typer>=0.26"]\n'
CHANGELOG = "# Changelog\n\n## [{}] - 2026-01-02\n\n- It stops.\n\n## [0.0.9] - 2026-01-01\n\n- It goes.\n"


def git(root: Path, *arguments: str) -> None:
    subprocess.run([*GIT, *arguments], cwd=root, check=True, stdout=subprocess.DEVNULL)


def write_package(root: Path, name: str, *requirements: str, version: str = "0.1.0") -> Path:
    folder = root / "packages" / name
    source = folder / "src" / name.replace("-", "_")
    source.mkdir(parents=True, exist_ok=True)
    dependencies = ", ".join(f'"{text}"' for text in requirements)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name, version, dependencies))
    (folder / "CHANGELOG.md").write_text(CHANGELOG.format(version))
    (source / "__init__.py").write_text("def go() -> None: ...\n\n\ndef stop() -> None: ...\n")
    return source / "__init__.py"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """lt-top requires lt-mid, lt-mid lt-base, lt-side nothing; each was released as 0.1.0."""
    write_package(tmp_path, "lt-base")
    write_package(tmp_path, "lt-mid", "lt-base>=0.1,<0.2")
    write_package(tmp_path, "lt-top", "lt-mid[cli]>=0.1,<0.2")
    write_package(tmp_path, "lt-side")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "First")
    for name in read_members(tmp_path):
        git(tmp_path, "tag", f"{name}-v0.1.0")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "affected"),
    [
        ("packages/lt-base/src/lt_base/x.py", ["lt-base", "lt-mid", "lt-top"]),
        ("packages/lt-mid/pyproject.toml", ["lt-mid", "lt-top"]),
        ("packages/lt-base/tests/test_x.py", ["lt-base"]),
        ("packages/lt-base/README.md", ["lt-base"]),
        ("README.md", []),
        ("LICENSE", []),
        *((path, ["lt-base", "lt-mid", "lt-side", "lt-top"]) for path in ("uv.lock", "tests/test_x.py", ".ci/run")),
        *((path, ["lt-base", "lt-mid", "lt-side", "lt-top"]) for path in ("new/a.py", "packages/lt-gone/src/a.py")),
    ],
)
def test_what_a_change_concerns(workspace: Path, path: str, affected: list[str]) -> None:
    assert affected_packages([path], read_members(workspace)) == affected


def test_what_tests_of_another_package_read_concerns_both() -> None:
    assert affected_packages(["packages/lt-ckpt/tests/data/nxd/a"], MEMBERS) == ["lt-ckpt", "lt-trainer-neuron"]
    assert affected_packages(["examples/a/recipe.toml"], MEMBERS) == sorted(READ_BY_TESTS["examples/"])


def test_folders_that_packages_read_in_their_tests_are_known() -> None:
    found: set[tuple[str, str]] = set()
    for name, member in MEMBERS.items():
        for text in (path.read_text() for path in (member.folder / "tests").rglob("*.py")):
            folders = re.findall(r'"(constraints|examples|containers|docs)/', text)
            folders += re.findall(r'/ "(constraints|examples|containers|docs)"', text)
            found |= {(f"{folder}/", name) for folder in folders}
            others = re.findall(r'/ "(lt-[a-z-]+)" / "(\w+)"', text)
            found |= {(f"packages/{other}/{folder}/", name) for other, folder in others if other != name}
    found = {(folder, name) for folder, name in found if (ROOT / folder).is_dir()}
    assert found
    assert found <= {(folder, name) for folder, names in READ_BY_TESTS.items() for name in names}


def test_a_file_that_moves_concerns_where_it_was_too_and_what_main_did_since_does_not(workspace: Path) -> None:
    git(workspace, "switch", "--quiet", "-c", "work")
    git(workspace, "mv", "packages/lt-side/src/lt_side/__init__.py", "packages/lt-top/src/lt_top/x.py")
    git(workspace, "commit", "--quiet", "-m", "Move")
    git(workspace, "switch", "--quiet", "main")
    write_package(workspace, "lt-base", version="0.1.1")
    git(workspace, "commit", "--quiet", "-am", "Main goes on")
    git(workspace, "switch", "--quiet", "work")
    assert affected_packages(changed_paths("main", root=workspace), read_members(workspace)) == ["lt-side", "lt-top"]


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("lt-base>=0.2,<0.3", "write lt-base>=A,<0.2 that contains 0.1.0"),
        ("lt-base>=0.1", "write lt-base>=A,<0.2"),
        ("lt-base<0.2", "write lt-base>=A,<0.2"),
        ("lt-base", "write lt-base>=A,<0.2"),
        ("lt-base>=0.1,<0.3", "write lt-base>=A,<0.2"),
        ("lt-base[gpu]>=0.1,<0.2", "there is no extra gpu"),
    ],
)
def test_a_range_that_does_not_hold(workspace: Path, requirement: str, message: str) -> None:
    write_package(workspace, "lt-mid", requirement)
    (text,) = find_range_problems(read_members(workspace))
    assert text.startswith("lt-mid: lt-base")
    assert message in text


def test_two_ranges_for_the_same_sibling(workspace: Path) -> None:
    write_package(workspace, "lt-mid", "lt-base>=0.1,<0.2", "lt-base[cli]>=0.1.0,<0.2")
    assert "elsewhere <0.2,>=0.1; use one range" in find_range_problems(read_members(workspace))[0]


@pytest.mark.parametrize(("version", "after"), [("0.3.1", "0.4"), ("0.0.9", "0.1"), ("1.2.0", "2"), ("10.0", "11")])
def test_the_next_version_that_may_break(version: str, after: str) -> None:
    assert next_breaking_version(Version(version)) == Version(after)


def test_the_ranges_here_hold() -> None:
    assert find_range_problems(MEMBERS) == []


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_imported_is_declared(name: str) -> None:
    """In the workspace's environment every import works."""
    folder = MEMBERS[name].folder
    command = [Path(sys.executable).with_name("deptry"), "--config", folder / "pyproject.toml", folder / "src"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_package_stands_in_a_layer_and_an_import_across_the_layers_is_found(tmp_path: Path) -> None:
    """The contracts of the workspace on a copy of its sources, with one line added to lt-data."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [c for c in contracts if c["type"] == "layers" and "containers" not in c]
    modules = {name.replace("-", "_"): member.folder / "src" for name, member in MEMBERS.items()}
    assert sorted(part.strip() for layer in layers["layers"] for part in layer.split("|")) == sorted(modules)
    for module, sources in modules.items():
        for path in (sources / module).rglob("*.py"):
            copy = tmp_path / path.relative_to(sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    with (tmp_path / "lt_data" / "file_names.py").open("a") as file:
        file.write("\nimport lt_model\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert b"lt_data.file_names -> lt_model" in done.stdout


def test_a_release_is_what_its_tag_says(workspace: Path) -> None:
    """A patch may not take a name away, a minor version below 1.0 may."""
    source = write_package(workspace, "lt-side", version="0.1.1")
    assert check_release("lt-side-v0.1.1", root=workspace) == ("- It stops.", [])
    assert check_release("lt-side-v0.1.2", root=workspace)[1] == [
        "lt-side-v0.1.2: pyproject.toml has version 0.1.1",
        "CHANGELOG.md begins with '## [0.1.1] - 2026-01-02'; write ## [0.1.2] - DATE over its entries",
    ]
    assert check_release("lt-no-v0.1.1", root=workspace)[1][0].startswith("lt-no-v0.1.1: write PACKAGE-vVERSION")
    source.write_text("def go() -> None: ...\n")
    (problem,) = check_release("lt-side-v0.1.1", root=workspace)[1]
    assert "Public object was removed" in problem
    write_package(workspace, "lt-side", version="0.2.0").write_text("def go() -> None: ...\n")
    assert check_release("lt-side-v0.2.0", root=workspace)[1] == []
    write_package(workspace, "lt-base", version="0.2.0")
    assert "write lt-base>=A,<0.3 that contains 0.2.0" in check_release("lt-base-v0.2.0", root=workspace)[1][0]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_changelogs_here_can_be_released(name: str) -> None:
    """The heading that has to get its date is there, and nothing else is missing."""
    problems = check_release(f"{name}-v{MEMBERS[name].version}")[1]
    assert [text.partition(" begins")[0] for text in problems] in ([], ["CHANGELOG.md"])
