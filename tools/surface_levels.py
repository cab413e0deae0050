"""What a change of the frozen names means for the version: nothing, an addition, or a break.

The frozen list of a package (`packages/*/API.txt`, written by tools/api_surface.py) says one thing a line, so a line
that is gone or different is a break and a line that is new an addition, but for one case: a parameter, option or field
that must be given, on something that was there before. Pure functions on lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from packaging.version import Version

__all__ = ["Level", "bumped", "compare", "level_of"]


class Level(IntEnum):
    """How much a version moves."""

    PATCH = 0
    MINOR = 1
    MAJOR = 2


REQUIRED = " required"
"""How the line of a parameter, option or field ends that must be given."""


def compare(before: Iterable[str], after: Iterable[str]) -> tuple[list[str], list[str]]:
    """The breaks and the additions between two frozen lists, each a line with a sign before it."""
    old, new = set(before), set(after)
    owners = {line.split(" ")[1] for line in old}
    gone = [f"- {line}" for line in sorted(old - new)]
    forced = [line for line in sorted(new - old) if line.endswith(REQUIRED) and _owner(line) in owners]
    added = [f"+ {line}" for line in sorted(new - old) if line not in forced]
    return gone + [f"+ {line}" for line in forced], added


def _owner(line: str) -> str:
    """What the thing of a line belongs to: the name before its parenthesis, or else before its last dot."""
    name = line.split(" ")[1]
    return name.partition("(")[0] if "(" in name else name.rpartition(".")[0]


def level_of(breaks: list[str], additions: list[str], *, version: Version) -> Level:
    """The least that a version must move: below 1.0 a break moves the minor, and an addition may come with a patch."""
    if breaks:
        return Level.MAJOR if version.major else Level.MINOR
    return Level.MINOR if additions and version.major else Level.PATCH


def bumped(version: Version, level: Level) -> Version:
    """The version after a move: 0.1.2 by MINOR is 0.2.0."""
    parts = [version.major, version.minor, version.micro]
    at = 2 - level
    return Version(".".join(str(n) for n in [*parts[:at], parts[at] + 1, *[0] * level]))
