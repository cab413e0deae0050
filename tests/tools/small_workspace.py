"""A workspace of four little packages, and git on it."""

import subprocess
from pathlib import Path

GIT = ["git", "-c", "user.name=A Person", "-c", "user.email=person@example.com", "-c", "commit.gpgsign=false"]
PYPROJECT = """[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.11"
dependencies = [{dependencies}]

[project.optional-dependencies]
cli = ["typer>=0.26"]
"""
CHANGELOG = """# Changelog of {name}

## [Unreleased]

### Added

- Something that is pending.

## [0.1.0] - 2026-01-02

### Added

- The first version.
"""


def git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([*GIT, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def write_package(root: Path, name: str, *requires: str, version: str = "0.1.0") -> None:
    module = name.replace("-", "_")
    source = root / "packages" / name / "src" / module
    source.mkdir(parents=True, exist_ok=True)
    dependencies = ", ".join(f'"{text}"' for text in requires)
    text = PYPROJECT.format(name=name, version=version, dependencies=dependencies)
    (root / "packages" / name / "pyproject.toml").write_text(text)
    (root / "packages" / name / "CHANGELOG.md").write_text(CHANGELOG.format(name=name))
    (root / "packages" / name / "API.txt").write_text(f"# names\nfunction {module}.go\n")
    (source / "__init__.py").write_text('"""A package."""\n\n__all__ = ["go"]\n\n\ndef go() -> None: ...\n')


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace one place of a file; a text that is not there is a mistake of the test."""
    text = path.read_text()
    assert text.count(old) >= 1, f"{path}: no {old!r}"
    path.write_text(text.replace(old, new, 1))
