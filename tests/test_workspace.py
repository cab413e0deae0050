"""The workspace: what the lock holds, what packages are, and that nothing names a machine."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-distributed": "0.1", "neuronx-cc": "1.0.post1", "libneuronxla": "1.0"}
"""Newest versions of Neuron's names outside the AWS Neuron pip repository: packages that only say where to look."""


def test_every_package_has_its_parts() -> None:
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project, name = tomllib.loads(path.read_text())["project"], path.parent.name
        assert project["name"] == name
        assert (project["license"], project["requires-python"]) == ("Apache-2.0", ">=3.11")
        assert (path.parent / "src" / name.replace("-", "_") / "py.typed").is_file()
        assert re.search(rf"pip install ['\"]?{name}\b", (path.parent / "README.md").read_text())


def test_the_lock_is_current_and_holds_both_torch_lines() -> None:
    done = subprocess.run(["uv", "lock", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    versions = sorted(p["version"].rpartition(".")[0] for p in LOCK["package"] if p["name"] == "torch")
    assert versions == ["2.15", "2.9"]


def test_neurons_own_packages_stay_out_of_the_lock_and_no_placeholder_is_enough() -> None:
    assert not {p["name"] for p in LOCK["package"]} & set(PLACEHOLDERS)
    project = tomllib.loads((ROOT / "packages" / "lt-trainer-neuron" / "pyproject.toml").read_text())["project"]
    floors = [Requirement(text) for text in project["optional-dependencies"]["neuron"]]
    assert [r for r in floors if r.name in PLACEHOLDERS and r.specifier.contains(PLACEHOLDERS[r.name])] == []


def test_no_machine_paths_and_no_index_addresses_outside_the_lock() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    address = re.compile(r"https?://[^\s\"')]*(?:pypi|pythonhosted|/simple\b)[^\s\"')]*|(?:pip|apt)\.repos\.")
    for name in set(listed) - {"uv.lock", "tests/test_workspace.py"}:
        if Path(name).suffix in {".py", ".md", ".toml", ".yml", ".json", ".sh", ".Dockerfile", ""}:
            text = (ROOT / name).read_text(errors="ignore")
            assert not re.search(r"(?<![\w.])/(?:root|home/\w+|work)/|" + address.pattern, text), name


CALENDAR = re.compile(r"\bdate(?:time)?\.(?:today|now|utcnow)\b|\btoordinal\b")
CLOCKS = {"time", "time_ns", "monotonic", "perf_counter", "urandom", "token_hex", "uuid4"}


def test_no_test_takes_its_cases_from_the_calendar_and_no_property_its_inputs_from_a_clock() -> None:
    """The same commit is tested by the same cases on every day."""
    for path in [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = path.read_text()
        assert path == Path(__file__) or not CALENDAR.search(text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "given(" in " ".join(map(ast.unparse, node.decorator_list)):
                read = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
                assert not read & CLOCKS, f"{path}: {node.name}"
