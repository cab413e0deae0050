"""One package in an environment of its own: what is installed there, and that nothing of the workspace slips in."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from check_package import (
    RESOLUTIONS,
    environment_commands,
    find_test_dependencies,
    git_status,
    lowest_versions,
    pyright_settings,
    stage_commands,
)
from members import ROOT, Member, ToolError, read_members
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_workspace import git

MEMBERS = read_members()


def environment_command_lines(name: str, resolution: str, out: Path) -> list[list[str]]:
    return environment_commands(MEMBERS[name], MEMBERS, python="3.13", resolution=resolution, out=out)


def test_what_the_tests_of_a_package_need_is_found() -> None:
    """What they import and neither the package with its extras nor the dev group brings."""
    assert "transformers" in find_test_dependencies(MEMBERS["lt-model"], MEMBERS)
    assert "transformers" not in find_test_dependencies(MEMBERS["lt-trainer"], MEMBERS)
    for name, member in MEMBERS.items():
        assert not set(find_test_dependencies(member, MEMBERS)) & {
            "pytest",
            "hypothesis",
            name,
            "json",
            "conftest",
            "null-device",
        }


@pytest.mark.parametrize("name", sorted(MEMBERS))
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_the_environment_has_wheels_alone(name: str, resolution: str, tmp_path: Path) -> None:
    made = environment_command_lines(name, resolution, tmp_path)
    words = [word for command in made for word in command]
    assert made[0][:2] == ["uv", "build"]
    assert "--no-sources" in made[0]
    assert made[1][:2] == ["uv", "venv"]
    assert made[1][-2:] == ["3.13", str(tmp_path / "venv")]
    installs = [command for command in made if command[1] == "pip"]
    assert all(str(tmp_path / "venv" / "bin" / "python") in command for command in installs)
    (own,) = [command for command in installs if "--no-deps" in command]
    assert own[-1] == str(tmp_path / "wheels" / f"{MEMBERS[name].module}-{MEMBERS[name].version}-py3-none-any.whl")
    assert not {"sync", "lock", "--editable", "-e", "--system"} & set(words)


def test_the_resolutions(tmp_path: Path) -> None:
    for resolution in RESOLUTIONS:
        made = environment_command_lines("lt-data", resolution, tmp_path)
        (first,) = [command for command in made if "--requirements" in command]
        given = first[first.index("--resolution") + 1] if "--resolution" in first else "locked"
        assert given == resolution
        held = {"locked": ["locked.txt"], "lowest-direct": ["floors.txt"], "highest": []}[resolution]
        installs = [c for c in made if c[1] == "pip" and "--no-deps" not in c]
        assert len(installs) == 2
        for command in installs:  # what the tests need besides must not lift what the package was tested with
            assert [command[i + 1] for i, w in enumerate(command) if w == "--constraint"] == [
                str(tmp_path / name) for name in held
            ]
        exported = [command for command in made if command[1] == "export"]
        assert len(exported) == (resolution == "locked")
        assert all("--locked" in command for command in exported)


def member_with(**requirements: list[str]) -> Member:
    groups = {name: tuple(map(Requirement, texts)) for name, texts in requirements.items()}
    dependencies = groups.pop("always")
    return replace(MEMBERS["lt-data"], dependencies=dependencies, extras=groups)


def test_the_oldest_that_is_allowed() -> None:
    """Of everything from outside, extras included; of two floors the one that binds."""
    member = member_with(
        always=["numpy>=1.26,<3", "lt-ckpt>=0.1,<0.2"], cli=["typer>=0.26"], full=["lt-data[cli]", "numpy>=2.0.1"]
    )
    assert lowest_versions(member, MEMBERS, python="3.13") == ["numpy==2.0.1", "typer==0.26"]
    marked = member_with(always=["numpy>=1.26", "numpy>=2.1 ; python_version >= '3.13'", "x>=1 ; os_name == 'none'"])
    assert lowest_versions(marked, MEMBERS, python="3.11") == ["numpy==1.26"]
    assert lowest_versions(marked, MEMBERS, python="3.13") == ["numpy==2.1"]
    with pytest.raises(ToolError, match=r"lt-data requires rich<15 without a lower bound; write rich>=VERSION"):
        lowest_versions(member_with(always=["rich<15"]), MEMBERS, python="3.11")


def test_every_member_says_its_floors() -> None:
    for member in MEMBERS.values():
        assert len(lowest_versions(member, MEMBERS, python="3.11")) >= 2, member.name
    neuron = lowest_versions(MEMBERS["lt-trainer-neuron"], MEMBERS, python="3.11")
    assert not [text for text in neuron if text.startswith("neuronx")]


def test_a_release_is_tested_with_what_is_published(tmp_path: Path) -> None:
    """No wheel of a sibling is built that could stand in for one that is not out yet."""
    member, index = MEMBERS["lt-ckpt"], "INDEX"
    made = environment_commands(member, MEMBERS, python="3.13", resolution="locked", out=tmp_path, index=index)
    assert "--all-packages" not in made[0]
    assert made[0][made[0].index("--package") + 1] == "lt-ckpt"
    assert all(command[command.index("--index") + 1] == index for command in made if command[1] == "pip")


def test_extras(tmp_path: Path) -> None:
    """All of them but those with environments of their own; the Trainium engine with its own torch line."""
    (data,) = [c for c in environment_command_lines("lt-data", "highest", tmp_path) if "--requirements" in c]
    assert [data[i + 1] for i, word in enumerate(data) if word == "--extra"] == [
        extra for extra in MEMBERS["lt-data"].extras if extra != "ray"
    ]
    made = environment_command_lines("lt-trainer-neuron", "locked", tmp_path)
    assert "neuron" not in [c[i + 1] for c in made for i, word in enumerate(c) if word == "--extra"]
    (export,) = [c for c in made if c[1] == "export"]
    assert "--no-group gpu --group neuron" in " ".join(export)
    (newest,) = [
        c for c in environment_command_lines("lt-trainer-neuron", "highest", tmp_path) if "--requirements" in c
    ]
    assert "torch==2.9.*" in newest


@pytest.mark.parametrize(("name", "line"), [("lt-trainer-gpu", "2.15"), ("lt-trainer-neuron", "2.9")])
def test_the_lock_is_exported(name: str, line: str, tmp_path: Path) -> None:
    """For real, but for `--locked`, which asks the index."""
    (export,) = [c for c in environment_command_lines(name, "locked", tmp_path) if c[1] == "export"]
    done = ["--frozen" if word == "--locked" else word for word in export]
    subprocess.run(done, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    locked = (tmp_path / "locked.txt").read_text(encoding="utf-8").splitlines()
    assert [text for text in locked if text.startswith(f"torch=={line}.")]
    for member in MEMBERS.values():
        required = {canonicalize_name(r.name) for r in member.dependencies} - set(MEMBERS)
        named = {text.partition("==")[0] for text in locked}
        assert required <= named, member.name


def test_lint_and_types_run_with_the_versions_of_the_lock(tmp_path: Path) -> None:
    assert list(stage_commands(MEMBERS["lt-data"], tmp_path, python="3.13", resolution="locked")) == [
        "lint",
        "types",
        "tests",
        "artifacts",
    ]
    for resolution in ("highest", "lowest-direct"):
        found = stage_commands(MEMBERS["lt-data"], tmp_path, python="3.13", resolution=resolution)
        assert list(found) == ["tests", "artifacts"]
        (artifacts,) = found["artifacts"]
        assert artifacts[artifacts.index("--python") + 1] == "3.13"
        assert found["tests"][-1][-1] == str(ROOT / "packages" / "lt-data" / "tests")


def test_types_are_those_of_the_workspace_for_the_sources_of_the_package() -> None:
    settings, source = pyright_settings(MEMBERS["lt-data"]), str(ROOT / "packages" / "lt-data" / "src")
    assert settings["include"] == settings["extraPaths"] == [source]
    assert settings["typeCheckingMode"] == "standard"
    assert settings["reportMissingTypeArgument"] == "error"


def test_what_tests_leave_behind_is_seen(small_workspace_dir: Path) -> None:
    before = git_status(small_workspace_dir)
    (small_workspace_dir / ".gitignore").write_text("ignored\n")
    git("add", ".", cwd=small_workspace_dir)
    clean = git_status(small_workspace_dir)
    (small_workspace_dir / "ignored").write_text("")
    assert git_status(small_workspace_dir) == clean != before
    (small_workspace_dir / "packages" / "lt-mid" / "left").write_text("")
    assert git_status(small_workspace_dir) != clean
