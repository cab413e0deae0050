"""The members of the workspace as their pyproject files tell them: versions, requirements, who stands on whom.

Everything else under tools/ that asks about packages asks here. Milliseconds; nothing is imported or built.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

__all__ = ["ROOT", "Member", "ToolError", "chosen", "dependants", "in_order", "read", "siblings"]

ROOT = Path(__file__).resolve().parent.parent


class ToolError(ValueError):
    """Something that the person at the keyboard can mend; the message says how."""

    exit_code: int = 64


@dataclass(frozen=True, kw_only=True)
class Member:
    """One package of the workspace."""

    name: str
    """As it is published, `lt-data`."""
    folder: Path
    version: Version
    dependencies: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    scripts: Mapping[str, str]
    entry_points: Mapping[str, Mapping[str, str]]

    @property
    def module(self) -> str:
        """As it is imported, `lt_data`."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the import package."""
        return self.folder / "src" / self.module

    @property
    def requirements(self) -> dict[str, tuple[Requirement, ...]]:
        """What is required, by extra; the key of what is always required is the empty string."""
        return {"": self.dependencies, **self.extras}


def read(root: Path = ROOT) -> dict[str, Member]:
    """All members by name, in the order of their names.

    Raises:
        ToolError: a folder under packages/ that holds files but no pyproject.toml, or one named unlike its project.
    """
    found: dict[str, Member] = {}
    for folder in sorted((root / "packages").iterdir()):
        if not folder.is_dir() or not any(folder.iterdir()):
            continue
        pyproject = folder / "pyproject.toml"
        if not pyproject.is_file():
            raise ToolError(f"{folder.relative_to(root)} has no pyproject.toml: make it a package or move it away")
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


def chosen(members: Mapping[str, Member], name: str) -> Member:
    """The member of that name.

    Raises:
        ToolError: there is none.
    """
    if name not in members:
        raise ToolError(f"{name!r} is no package here; there are {', '.join(members)}")
    return members[name]


def siblings(member: Member, members: Mapping[str, Member]) -> set[str]:
    """Names of other members that this one requires, with or without an extra."""
    named: set[str] = {canonicalize_name(r.name) for group in member.requirements.values() for r in group}
    return (named & set(members)) - {member.name}


def dependants(names: Iterable[str], members: Mapping[str, Member]) -> set[str]:
    """These members and all that stand on one of them, directly or not."""
    found = set(names)
    while more := {name for name, member in members.items() if siblings(member, members) & found} - found:
        found |= more
    return found


def in_order(members: Mapping[str, Member]) -> list[str]:
    """All names, each after those that it stands on; ties by name.

    Raises:
        ToolError: packages that stand on each other in a ring.
    """
    done: list[str] = []
    while len(done) < len(members):
        ready = [n for n in members if n not in done and siblings(members[n], members) <= set(done)]
        if not ready:
            raise ToolError(f"packages that stand on each other: {', '.join(sorted(set(members) - set(done)))}")
        done.append(min(ready))
    return done
