"""Workspace members as their pyproject files describe them: versions, requirements, dependency order.

The other tools read packages through this module. Milliseconds; nothing is imported or built.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


class ToolError(ValueError):
    """User error of a tool; the message says how to fix it."""

    exit_code: int = 64


@dataclass(frozen=True, kw_only=True)
class Member:
    """One package of the workspace."""

    name: str
    """Distribution name, such as `lt-data`."""
    folder: Path
    version: Version
    dependencies: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    scripts: Mapping[str, str]
    entry_points: Mapping[str, Mapping[str, str]]

    @property
    def module(self) -> str:
        """Import name, such as `lt_data`."""
        return self.name.replace("-", "_")

    @property
    def source_dir(self) -> Path:
        """Folder of the import package."""
        return self.folder / "src" / self.module

    @property
    def requirements(self) -> dict[str, tuple[Requirement, ...]]:
        """Requirements by extra; the key "" holds the unconditional ones."""
        return {"": self.dependencies, **self.extras}


def read_members(root: Path = ROOT) -> dict[str, Member]:
    """Return all members by name, in alphabetical order.

    Raises:
        ToolError: a folder under packages/ that holds files but no pyproject.toml, or one named unlike its project.
    """
    found: dict[str, Member] = {}
    for folder in sorted((root / "packages").iterdir()):
        if not folder.is_dir() or not any(folder.iterdir()):
            continue
        pyproject = folder / "pyproject.toml"
        if not pyproject.is_file():
            raise ToolError(f"{folder.relative_to(root)} has no pyproject.toml; make it a package or move it")
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        if project["name"] != folder.name:
            raise ToolError(f"{pyproject.relative_to(root)} names {project['name']!r}; name it {folder.name!r}")
        extras = project.get("optional-dependencies", {})
        found[folder.name] = Member(
            name=folder.name,
            folder=folder,
            version=Version(project["version"]),
            dependencies=tuple(Requirement(text) for text in project.get("dependencies", [])),
            extras={extra: tuple(Requirement(text) for text in texts) for extra, texts in extras.items()},
            scripts=project.get("scripts", {}),
            entry_points=project.get("entry-points", {}),
        )
    return found


def get_member(members: Mapping[str, Member], name: str) -> Member:
    """Return the member with that name.

    Raises:
        ToolError: there is none.
    """
    if name not in members:
        raise ToolError(f"{name!r} is not a package of this workspace; the packages are {', '.join(members)}")
    return members[name]


def sibling_dependencies(member: Member, members: Mapping[str, Member]) -> set[str]:
    """Return the names of the other members that this one requires, extras included."""
    named: set[str] = {canonicalize_name(r.name) for group in member.requirements.values() for r in group}
    return (named & set(members)) - {member.name}


def dependents(names: Iterable[str], members: Mapping[str, Member]) -> set[str]:
    """Return these members and all that depend on one of them, directly or indirectly."""
    found = set(names)
    while more := {name for name, member in members.items() if sibling_dependencies(member, members) & found} - found:
        found |= more
    return found


def topological_order(members: Mapping[str, Member]) -> list[str]:
    """Return all names, each after its dependencies; ties by name.

    Raises:
        ToolError: the dependencies have a cycle.
    """
    done: list[str] = []
    while len(done) < len(members):
        ready = [n for n in members if n not in done and sibling_dependencies(members[n], members) <= set(done)]
        if not ready:
            raise ToolError(f"dependency cycle: {', '.join(sorted(set(members) - set(done)))}")
        done.append(min(ready))
    return done
