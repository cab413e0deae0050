"""What a release tag must satisfy before anything is built from it. The workflow of the tag runs this.

    python tools/release_check.py lt-data-v0.2.0 --index URL      # fails, or prints package and version
    python tools/release_check.py lt-data-v0.2.0 --notes                         # its changelog section

The tag names a package and the version in its pyproject, and points at what is checked out; the newest release in the
changelog is that version, and nothing is pending above it; all ranges between packages hold; the version is as far
from the last tag's as the public names ask for; what it requires of its siblings is published, itself it is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from api_surface import changes_since
from changelog import FILE, notes, pending, released
from check_ranges import problems
from members import ROOT, Member, ToolError, read
from packaging.utils import canonicalize_name
from packaging.version import Version
from published import versions
from release import last_tag
from surface_levels import bumped, level_of

__all__ = ["check", "parse_tag"]


def parse_tag(tag: str, members: Mapping[str, Member]) -> tuple[Member, str]:
    """The package and the version that a tag names; package names have dashes too, so the last `-v` counts.

    Raises:
        ToolError: it names no package here.
    """
    name, separator, version = tag.rpartition("-v")
    if not separator or name not in members:
        raise ToolError(f"tag {tag}: write PACKAGE-vVERSION with one of {', '.join(members)}")
    return members[name], version


def check(tag: str, members: Mapping[str, Member], *, index: str | None, root: Path = ROOT) -> Member:
    """The package of a tag that may be released.

    Raises:
        ToolError: something does not hold; the message says all that does not.
    """
    member, version = parse_tag(tag, members)
    wrong = [*_names_what_is_here(tag, member, version, root=root), *_changelog(tag, member, version)]
    wrong += [f"ranges: {text}" for text in problems(members)]
    if not wrong:
        wrong = [*_moved_far_enough(member, root=root), *_published(member, members, index=index)]
    if wrong:
        raise ToolError("\n".join([f"{tag} cannot be released:", *(f"- {text}" for text in wrong)]))
    return member


def _names_what_is_here(tag: str, member: Member, version: str, *, root: Path) -> list[str]:
    found: list[str] = []
    if version != str(member.version):
        found.append(f"the tag says {version}, packages/{member.name}/pyproject.toml {member.version}")
    tagged, head = (_commit(name, root=root) for name in (f"refs/tags/{tag}", "HEAD"))
    if tagged is not None and tagged != head:
        found.append(f"the tag points at {tagged[:12]}, checked out is {(head or 'nothing')[:12]}")
    return found


def _commit(name: str, *, root: Path) -> str | None:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _changelog(tag: str, member: Member, version: str) -> list[str]:
    text = (member.folder / FILE).read_text(encoding="utf-8")
    place = f"packages/{member.name}/{FILE}"
    found: list[str] = []
    top = pending(text)
    if top is not None and top.entries:
        found.append(f"{place} still has pending entries under ## [{top.name}]: run tools/release.py")
    newest = next(iter(released(text)), None)
    if newest is None or newest.name != version:
        found.append(f"the newest release in {place} is {newest.name if newest else 'none'}, the tag is {tag}")
    elif not newest.entries:
        found.append(f"{place} says nothing about {version}")
    return found


def _moved_far_enough(member: Member, *, root: Path) -> list[str]:
    before = last_tag(member.name, root=root, before=member.version)
    if before is None:
        return []
    old = Version(before.rpartition("-v")[2])
    breaks, added = changes_since(before, member, root=root)
    least = bumped(old, level_of(breaks, added, version=old))
    if member.version >= least:
        return []
    shown = "; ".join([*breaks, *added][:5])
    return [f"{member.version} is too near to {old}, it has to be {least} at least: {shown}"]


def _published(member: Member, members: Mapping[str, Member], *, index: str | None) -> list[str]:
    found: list[str] = []
    if member.version in versions(member.name, index=index):
        found.append(f"{member.name} {member.version} is published already")
    for requirement in dict.fromkeys(r for group in member.requirements.values() for r in group):
        name = canonicalize_name(requirement.name)
        if name in members and name != member.name:
            known = versions(name, index=index)
            if not any(requirement.specifier.contains(version) for version in known):
                has = ", ".join(map(str, known)) or "none"
                found.append(f"it requires {requirement}, of which the index has {has}: release {name} first")
    return found


def main(arguments: list[str]) -> int:
    """Check a tag; prints `package=...` and `version=...`, as $GITHUB_OUTPUT takes them, or the notes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--index", help="the simple index that has our releases; without it none is released")
    parser.add_argument("--notes", action="store_true", help="print the changelog section instead of checking")
    options = parser.parse_args(arguments)
    members = read()
    if options.notes:
        member, version = parse_tag(options.tag, members)
        print(notes((member.folder / FILE).read_text(encoding="utf-8"), version=version), end="")
        return 0
    member = check(options.tag, members, index=options.index)
    print(f"package={member.name}\nversion={member.version}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"release_check: {exc}")
