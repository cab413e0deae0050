"""Check of a release tag before anything is built from it; prints the changelog of the release.

    python tools/release.py lt-data-v0.2.0 > notes.md

The tag names a package and the version in its pyproject; the newest entry of its changelog is that version with a date;
the ranges between the packages hold; and a version that may not break anything changes no public name that the release
before it had (griffe, on the sources at that tag). Seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from check_ranges import find_range_problems, next_breaking_version
from members import ROOT, read_members
from packaging.version import Version

HEADING = re.compile(r"^## (.+)$", re.M)


def check_release(tag: str, *, root: Path = ROOT) -> tuple[str, list[str]]:
    """Return the text of the release in the changelog, and a sentence for each thing that does not hold."""
    members = read_members(root)
    name, _, version = tag.rpartition("-v")
    if name not in members:
        return "", [f"{tag}: write PACKAGE-vVERSION with one of {', '.join(members)}"]
    problems = find_range_problems(members)
    if version != str(members[name].version):
        problems.append(f"{tag}: pyproject.toml has version {members[name].version}")
    changelog = (members[name].folder / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *later = HEADING.finditer(changelog)
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", first[1]):
        problems.append(f"CHANGELOG.md begins with {first[0]!r}; write ## [{version}] - DATE over its entries")
    problems += find_breakages(name, Version(version), root=root)
    return changelog[first.end() : later[0].start() if later else None].strip(), problems


def find_breakages(name: str, version: Version, *, root: Path) -> Iterator[str]:
    """Yield what changed of the public names since the newest older release, if `version` may not break them."""
    done = subprocess.run(["git", "tag", "--list", f"{name}-v*"], cwd=root, capture_output=True, text=True, check=True)
    older = [v for tag in done.stdout.split() if (v := Version(tag.rpartition("-v")[2])) < version]
    if older and version < next_breaking_version(max(older)):
        module, sources = name.replace("-", "_"), f"packages/{name}/src"
        before = griffe.load_git(module, ref=f"{name}-v{max(older)}", repo=root, search_paths=[sources])
        after = griffe.load(module, search_paths=[root / sources])
        for change in griffe.find_breaking_changes(before, after):
            yield change.explain(griffe.ExplanationStyle.ONE_LINE)


if __name__ == "__main__":
    notes, found = check_release(sys.argv[1])
    if found:
        sys.exit("\n".join(found))
    print(notes)
