"""The READMEs: every python block runs as it stands, every command exists, and the tables are what the code says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/*.md")])
BLOCKS = [
    pytest.param(block, id=f"{path.parent.name}-{i}")
    for path in READMES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run_in_an_empty_folder(block: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_package_has_a_readme_with_an_example_and_a_changelog() -> None:
    for pyproject in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        readme = (pyproject.parent / "README.md").read_text()
        assert f"pip install {project['name']}" in readme or f"pip install '{project['name']}" in readme
        changelog = (pyproject.parent / "CHANGELOG.md").read_text()
        assert f"## [{project['version']}]" in changelog


def command_lines() -> list[str]:
    """Every indented line of a README that starts with one of our commands."""
    found = set()
    for path in READMES:
        for line in re.findall(
            r"^    (?:uv run )?((?:lt|lt-data|lt-model|lt-ckpt|lt-train) [^#\n]*)", path.read_text(), re.M
        ):
            found.add(re.split(r" {3,}", line.strip())[0])
    return sorted(found)


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_their_options_exist(line: str, tmp_path: Path) -> None:
    """The command's own help knows the subcommand and every option that the README gives it."""
    words = re.sub(r"\[|\]|[A-Z]\S*", " ", line).split()
    program = Path(sys.executable).parent / words[0]
    names = [word for word in words[1:3] if re.fullmatch(r"[a-z][a-z-]*", word)]
    if words[0] != "lt":
        names = names[:1]
    done = subprocess.run(
        [program, *names, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": "200", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    for option in re.findall(r"--[a-z-]+", line):
        assert option in done.stdout, f"{line}: {option} is not an option of {' '.join([words[0], *names])}"


def test_hyperparameter_table_is_generated() -> None:
    from lt_trainer.hyperparameters import markdown

    assert markdown().strip() in (ROOT / "packages" / "lt-trainer" / "README.md").read_text()


def test_gpu_options_table_names_every_option() -> None:
    from lt_trainer.fields import leaves
    from lt_trainer_gpu import GpuOptions

    rows = re.findall(
        r"^\| `(\w+)` \| `([^`]*)` \|", (ROOT / "packages" / "lt-trainer-gpu" / "README.md").read_text(), re.M
    )
    written = {name: default.strip('"') for name, default in rows}
    assert written == {leaf.name: str(leaf.default).lower() for leaf in leaves(GpuOptions).values()}


def test_links_between_documents_lead_somewhere() -> None:
    for path in READMES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"
