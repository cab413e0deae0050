"""The packages of the workspace, from their pyproject files; milliseconds, nothing is imported or built."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Member:
    """One package: its folder, its version and its requirements by extra; the key "" has those of the base."""

    folder: Path
    version: Version
    requirements: dict[str, list[Requirement]]


def read_members(root: Path = ROOT) -> dict[str, Member]:
    """Return the packages by name, in alphabetical order."""
    found: dict[str, Member] = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        texts = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
        requirements = {extra: [Requirement(text) for text in group] for extra, group in texts.items()}
        found[project["name"]] = Member(
            folder=path.parent, version=Version(project["version"]), requirements=requirements
        )
    return found
