"""Version level of an API change: none, an addition, or a break.

The frozen list of a package (`packages/*/API.txt`, written by tools/api_surface.py) describes one thing per line, so a
removed or changed line is a break and a new line an addition, with one exception: a new required parameter, option or
field of something that existed before is a break. Pure functions on lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from packaging.version import Version

__all__ = ["BumpLevel", "bump_version", "diff_api", "required_bump"]


class BumpLevel(IntEnum):
    """Part of the version to increase."""

    PATCH = 0
    MINOR = 1
    MAJOR = 2


REQUIRED_SUFFIX = " required"
"""Suffix of the line of a required parameter, option or field."""


def diff_api(before: Iterable[str], after: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the breaks and the additions between two frozen lists, each line with a sign."""
    old, new = set(before), set(after)
    owners = {line.split(" ")[1] for line in old}
    gone = [f"- {line}" for line in sorted(old - new)]
    forced = [line for line in sorted(new - old) if line.endswith(REQUIRED_SUFFIX) and _owner(line) in owners]
    added = [f"+ {line}" for line in sorted(new - old) if line not in forced]
    return gone + [f"+ {line}" for line in forced], added


def _owner(line: str) -> str:
    """Return the owner of a line's name: the part before its parenthesis, or else before its last dot."""
    name = line.split(" ")[1]
    return name.partition("(")[0] if "(" in name else name.rpartition(".")[0]


def required_bump(breaks: list[str], additions: list[str], *, version: Version) -> BumpLevel:
    """Return the smallest allowed level; below 1.0 a break needs a minor and an addition a patch."""
    if breaks:
        return BumpLevel.MAJOR if version.major else BumpLevel.MINOR
    return BumpLevel.MINOR if additions and version.major else BumpLevel.PATCH


def bump_version(version: Version, level: BumpLevel) -> Version:
    """Return the version after a bump: 0.1.2 by MINOR is 0.2.0."""
    parts = [version.major, version.minor, version.micro]
    at = 2 - level
    return Version(".".join(str(n) for n in [*parts[:at], parts[at] + 1, *[0] * level]))
