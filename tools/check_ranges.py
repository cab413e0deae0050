"""Check of the version ranges in which the packages require each other; uv ignores them in a workspace, pip does not.

    python tools/check_ranges.py     # a line for each range that does not hold, in milliseconds

A range has a lower bound and ends at most at the next version that semver allows to break (0.x breaks with the minor),
contains the version of this workspace, asks for extras that exist, and is the same wherever a package names a sibling.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from members import Member, read_members
from packaging.requirements import Requirement
from packaging.version import Version


def next_breaking_version(version: Version) -> Version:
    """Return the first later version that semver allows to break: 0.4 after 0.3.1, 2 after 1.2.0."""
    return Version(f"{version.major + 1}" if version.major else f"0.{version.minor + 1}")


def find_range_problems(members: Mapping[str, Member]) -> list[str]:
    """Return a sentence for each requirement on a sibling that does not hold."""
    found: list[str] = []
    for name, member in members.items():
        ranges: dict[str, str] = {}
        for requirement in (r for group in member.requirements.values() for r in group if r.name in members):
            sibling = members[requirement.name]
            if missing := requirement.extras - set(sibling.requirements):
                found.append(f"{name}: {requirement}: there is no extra {', '.join(sorted(missing))}")
            if requirement.name != name:
                if not _is_valid(requirement, sibling.version):
                    wanted = f">=A,<{next_breaking_version(sibling.version)} that contains {sibling.version}"
                    found.append(f"{name}: {requirement}: write {requirement.name}{wanted}")
                if ranges.setdefault(requirement.name, str(requirement.specifier)) != str(requirement.specifier):
                    found.append(f"{name}: {requirement}: elsewhere {ranges[requirement.name]}; use one range")
    return found


def _is_valid(requirement: Requirement, version: Version) -> bool:
    bounds = {s.operator: Version(s.version) for s in requirement.specifier}
    return (
        set(bounds) == {">=", "<"}
        and bounds["<"] <= next_breaking_version(version)
        and requirement.specifier.contains(version, prereleases=True)
    )


if __name__ == "__main__":
    problems = find_range_problems(read_members())
    print("\n".join(problems) or "ranges between packages are valid")
    sys.exit(bool(problems))
