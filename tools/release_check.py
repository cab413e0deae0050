"""Checks of a release tag before anything is built from it. The workflow of the tag runs this.

    python tools/release_check.py lt-data-v0.2.0 --index URL      # fails, or prints package and version
    python tools/release_check.py lt-data-v0.2.0 --notes                         # its changelog section

The tag names a package and the version in its pyproject, and is the checked-out commit; the newest release in the
changelog is that version, with no unreleased entries above it; all ranges between packages are valid; the version bump
is as large as the change of public names requires; the required siblings are published, the version itself is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from api_surface import diff_since_tag
from changelog import CHANGELOG_FILE, release_notes, release_sections, unreleased_section
from check_ranges import find_range_problems
from members import ROOT, Member, ToolError, read_members
from package_index import published_versions
from packaging.utils import canonicalize_name
from packaging.version import Version
from release import last_tag
from version_bump import bump_version, required_bump


def parse_tag(tag: str, members: Mapping[str, Member]) -> tuple[Member, str]:
    """Return the package and the version that a tag names, split at the last `-v`.

    Raises:
        ToolError: it names no package of the workspace.
    """
    name, separator, version = tag.rpartition("-v")
    if not separator or name not in members:
        raise ToolError(f"tag {tag}: write PACKAGE-vVERSION with one of {', '.join(members)}")
    return members[name], version


def check_release(tag: str, members: Mapping[str, Member], *, index: str | None, root: Path = ROOT) -> Member:
    """Return the package of a tag if it may be released.

    Raises:
        ToolError: a check fails; the message lists all failures.
    """
    member, version = parse_tag(tag, members)
    wrong = [*_check_tag(tag, member, version, root=root), *_check_changelog(tag, member, version)]
    wrong += [f"ranges: {text}" for text in find_range_problems(members)]
    if not wrong:
        wrong = [*_check_version_bump(member, root=root), *_check_published(member, members, index=index)]
    if wrong:
        raise ToolError("\n".join([f"{tag} cannot be released:", *(f"- {text}" for text in wrong)]))
    return member


def _check_tag(tag: str, member: Member, version: str, *, root: Path) -> list[str]:
    found: list[str] = []
    if version != str(member.version):
        found.append(f"the tag has {version}, packages/{member.name}/pyproject.toml {member.version}")
    tagged, head = (_resolve_commit(name, root=root) for name in (f"refs/tags/{tag}", "HEAD"))
    if tagged is not None and tagged != head:
        found.append(f"the tag is commit {tagged[:12]}, checked out is {(head or 'nothing')[:12]}")
    return found


def _resolve_commit(name: str, *, root: Path) -> str | None:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _check_changelog(tag: str, member: Member, version: str) -> list[str]:
    text = (member.folder / CHANGELOG_FILE).read_text(encoding="utf-8")
    place = f"packages/{member.name}/{CHANGELOG_FILE}"
    found: list[str] = []
    top = unreleased_section(text)
    if top is not None and top.entries:
        found.append(f"{place} still has unreleased entries under ## [{top.name}]; run tools/release.py")
    newest = next(iter(release_sections(text)), None)
    if newest is None or newest.name != version:
        found.append(f"the newest release in {place} is {newest.name if newest else 'none'}, the tag is {tag}")
    elif not newest.entries:
        found.append(f"{place} has no entry for {version}")
    return found


def _check_version_bump(member: Member, *, root: Path) -> list[str]:
    before = last_tag(member.name, root=root, before=member.version)
    if before is None:
        return []
    old = Version(before.rpartition("-v")[2])
    breaks, added = diff_since_tag(before, member, root=root)
    least = bump_version(old, required_bump(breaks, added, version=old))
    if member.version >= least:
        return []
    shown = "; ".join([*breaks, *added][:5])
    return [f"{member.version} is too small a bump from {old}, at least {least} is required: {shown}"]


def _check_published(member: Member, members: Mapping[str, Member], *, index: str | None) -> list[str]:
    found: list[str] = []
    if member.version in published_versions(member.name, index=index):
        found.append(f"{member.name} {member.version} is already published")
    for requirement in dict.fromkeys(r for group in member.requirements.values() for r in group):
        name = canonicalize_name(requirement.name)
        if name in members and name != member.name:
            known = published_versions(name, index=index)
            if not any(requirement.specifier.contains(version) for version in known):
                has = ", ".join(map(str, known)) or "none"
                found.append(f"it requires {requirement}, and the index has {has}; release {name} first")
    return found


def main(arguments: list[str]) -> int:
    """Check a tag and print `package=...` and `version=...` for $GITHUB_OUTPUT, or print the notes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--index", help="simple index with our releases; none is published if not given")
    parser.add_argument("--notes", action="store_true", help="print the changelog section instead of checking")
    options = parser.parse_args(arguments)
    members = read_members()
    if options.notes:
        member, version = parse_tag(options.tag, members)
        print(release_notes((member.folder / CHANGELOG_FILE).read_text(encoding="utf-8"), version=version), end="")
        return 0
    member = check_release(options.tag, members, index=options.index)
    print(f"package={member.name}\nversion={member.version}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"release_check: {exc}")
