"""The workspace: what the lock holds, what the packages declare, and that nothing names a machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
ROOT_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-distributed": "0.1", "neuronx-cc": "1.0.post1", "libneuronxla": "1.0"}
"""Newest versions of Neuron's names outside the AWS Neuron pip repository: packages that only say where to look."""


def test_the_seven_packages() -> None:
    names = ["lt-ckpt", "lt-data", "lt-launch", "lt-model", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron"]
    assert sorted(PROJECTS) == names
    assert sorted(ROOT_PROJECT["tool"]["uv"]["sources"]) == names


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_package_has_its_parts(name: str) -> None:
    project, folder = PROJECTS[name]["project"], ROOT / "packages" / name
    assert project["name"] == name
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert (folder / "src" / name.replace("-", "_") / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))


def test_the_lock_is_current_and_holds_both_torch_lines() -> None:
    done = subprocess.run(["uv", "lock", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    versions = sorted(Version(p["version"]) for p in LOCK["package"] if p["name"] == "torch")
    assert len(versions) == 2
    assert versions[0].release[:2] == (2, 9)
    assert versions[1] >= Version("2.15")
    markers = LOCK["supported-markers"]
    assert len(markers) == 3
    assert any("darwin" in m and "arm64" in m for m in markers)
    assert any("aarch64" in m for m in markers)


def test_neurons_own_packages_stay_out_of_the_lock_and_no_placeholder_is_enough() -> None:
    assert not {p["name"] for p in LOCK["package"]} & set(PLACEHOLDERS)
    texts = PROJECTS["lt-trainer-neuron"]["project"]["optional-dependencies"]["neuron"]
    floors = {Requirement(text).name: Requirement(text) for text in texts if not text.startswith("boto3")}
    assert set(floors) <= set(PLACEHOLDERS)
    for name, requirement in floors.items():
        assert not requirement.specifier.contains(PLACEHOLDERS[name]), requirement


def test_torch_xla_is_for_linux_x86_64_only() -> None:
    (text,) = PROJECTS["lt-trainer-neuron"]["project"]["optional-dependencies"]["xla-cpu"]
    marker = Requirement(text).marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux", "platform_machine": "x86_64"})
    assert not marker.evaluate({"sys_platform": "linux", "platform_machine": "aarch64"})
    assert not marker.evaluate({"sys_platform": "darwin", "platform_machine": "arm64"})


def test_ranges_between_members_admit_what_is_here() -> None:
    """uv ignores them inside the workspace, pip does not."""
    for name, project in PROJECTS.items():
        extras = project["project"].get("optional-dependencies", {}).values()
        for text in [*project["project"]["dependencies"], *(item for extra in extras for item in extra)]:
            requirement = Requirement(text)
            if requirement.name in PROJECTS and requirement.name != name:
                version = PROJECTS[requirement.name]["project"]["version"]
                assert requirement.specifier, f"{name}: {text} needs a range"
                assert requirement.specifier.contains(version), f"{name}: {text}"


def test_types_lint_and_layers_cover_every_package() -> None:
    assert ROOT_PROJECT["tool"]["basedpyright"]["include"] == ["packages", "tools"]
    assert set(ROOT_PROJECT["tool"]["importlinter"]["root_packages"]) == {name.replace("-", "_") for name in PROJECTS}


def test_no_machine_paths_and_no_index_addresses_outside_the_lock() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    address = re.compile(r"https?://[^\s\"')]*(?:pypi|pythonhosted|/simple\b)[^\s\"')]*|(?:pip|apt)\.repos\.")
    for name in listed:
        path = ROOT / name
        if name == "uv.lock" or path.suffix not in {".py", ".md", ".toml", ".yml", ".json", ".sh", ".Dockerfile", ""}:
            continue
        text = path.read_text(errors="ignore")
        assert not re.search(r"(?<![\w.])/(?:root|home/\w+|work)/", text), name
        if name != "tests/test_workspace.py":
            assert not address.search(text), name
