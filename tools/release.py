"""Preparation of a release: version bump, changelog and lock; prints the remaining steps.

    python tools/release.py lt-data minor              # 0.1.3 -> 0.2.0; also major, patch
    python tools/release.py lt-data first              # the current version, which was never released
    python tools/release.py lt-data minor --widen      # also widen the ranges of siblings that exclude it

Nothing is written unless all of this holds: the tree is committed; the changelog has unreleased entries; the bump is as
large as the change of public names requires (tools/api_surface.py, against the last tag); the tag does not exist; no
sibling's range excludes the new version, unless --widen raises that range's upper bound and adds a line to the
sibling's changelog. Files are edited in place: two lines and the changelog. The tag is made by hand after the change is
merged; its workflow runs tools/release_check.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from api_surface import diff_since_tag
from changelog import CHANGELOG_FILE, add_entry, cut_release, release_sections
from check_ranges import next_breaking_version
from members import ROOT, Member, ToolError, get_member, read_members
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from version_bump import BumpLevel, bump_version, required_bump

VERSION_LINE = re.compile(r'^version = "[^"]+"$', re.M)


def release_tag(name: str, version: Version) -> str:
    """Return the tag of a release, `lt-data-v0.2.0`."""
    return f"{name}-v{version}"


def last_tag(name: str, *, root: Path = ROOT, before: Version | None = None) -> str | None:
    """Return the newest release tag of a package, older than `before` if given, or None."""
    tags = _git("tag", "--list", f"{name}-v*", root=root).split()
    known = [version for tag in tags if (version := _tag_version(tag.removeprefix(f"{name}-v"))) is not None]
    return release_tag(name, max(older)) if (older := [v for v in known if before is None or v < before]) else None


def _tag_version(text: str) -> Version | None:
    """Return the version of a tag; None if it is not a version."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def prepare_release(
    members: Mapping[str, Member], name: str, bump: str, *, release_date: date, widen: bool = False, root: Path = ROOT
) -> dict[Path, str]:
    """Return the files of a release with their new content; nothing is written.

    Args:
        members: All packages.
        name: The package to release.
        bump: first, major, minor or patch.
        release_date: Date in the changelog.
        widen: Raise the upper bounds of siblings that exclude the new version.
        root: The workspace.

    Raises:
        ToolError: the release cannot be made; the message says what is missing.
    """
    member = get_member(members, name)
    changelog = (member.folder / CHANGELOG_FILE).read_text(encoding="utf-8")
    version = _next_version(member, bump, changelog, last_tag(name, root=root), root=root)
    if _git("tag", "--list", release_tag(name, version), root=root):
        raise ToolError(f"tag {release_tag(name, version)} exists already; update main first")
    files = {
        member.folder / CHANGELOG_FILE: cut_release(changelog, version=str(version), release_date=release_date),
        member.folder / "pyproject.toml": _set_version(member.folder / "pyproject.toml", version),
    }
    for sibling, texts in _excluding_requirements(members, name, version).items():
        if not widen:
            remedy = f"allow <{next_breaking_version(version)} there, or pass --widen"
            raise ToolError(f"{sibling} requires {', '.join(texts)}, which excludes {name} {version}; {remedy}")
        files |= _widen_range(members[sibling], name, version)
    return files


def _next_version(member: Member, move: str, changelog: str, tag: str | None, *, root: Path) -> Version:
    never = tag is None and not release_sections(changelog)
    if never != (move == "first"):
        state = "was never released" if never else f"was released as {tag or release_sections(changelog)[0].name}"
        raise ToolError(f"move = {move}: {member.name} {state}; use {'first' if never else 'major, minor or patch'}")
    if never:
        return member.version
    level = BumpLevel[move.upper()]
    if tag is not None:
        breaks, added = diff_since_tag(tag, member, root=root)
        least = required_bump(breaks, added, version=member.version)
        if level < least:
            shown = "\n  ".join([*breaks, *added][:20])
            raise ToolError(f"move = {move}: the API changed since {tag}; use {least.name.lower()}:\n  {shown}")
    return bump_version(member.version, level)


def uncommitted_files(*, root: Path = ROOT) -> list[str]:
    """Return the tracked files that differ from the last commit."""
    lines = _git("status", "--porcelain", "--untracked-files=no", root=root).splitlines()
    return [line[3:] for line in lines]


def _git(*arguments: str, root: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _set_version(pyproject: Path, version: Version) -> str:
    text, count = VERSION_LINE.subn(f'version = "{version}"', pyproject.read_text(encoding="utf-8"))
    if count != 1:
        raise ToolError(f"{pyproject}: {count} lines version = ...; expected one")
    return text


def _excluding_requirements(members: Mapping[str, Member], name: str, version: Version) -> dict[str, list[str]]:
    """Return the requirements that exclude a version of a package, by sibling."""
    found: dict[str, list[str]] = {}
    for sibling in members.values():
        for requirement in (r for group in sibling.requirements.values() for r in group):
            is_other = canonicalize_name(requirement.name) == name != sibling.name
            if is_other and not requirement.specifier.contains(version, prereleases=True):
                found.setdefault(sibling.name, []).append(str(requirement))
    return found


def _widen_range(sibling: Member, name: str, version: Version) -> dict[Path, str]:
    """Return a sibling's pyproject with raised upper bounds, and its changelog with a line about it."""
    path = sibling.folder / "pyproject.toml"
    cap = re.compile(rf'("{re.escape(name)}(?:\[[^\]"]*\])?>=[^,"]+),<[^"]+"')
    text, count = cap.subn(rf'\1,<{next_breaking_version(version)}"', path.read_text(encoding="utf-8"))
    if not count:
        raise ToolError(f"{path}: the ranges of {name} are not of the form >=A,<B; change them by hand")
    changelog = (sibling.folder / CHANGELOG_FILE).read_text(encoding="utf-8")
    entry = f"- Works with {name} {version.major}.{version.minor}."
    return {path: text, sibling.folder / CHANGELOG_FILE: add_entry(changelog, entry)}


def main(arguments: list[str]) -> int:
    """Write the files of a release and print the remaining steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("move", choices=["first", "major", "minor", "patch"])
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="default: today")
    parser.add_argument(
        "--widen", action="store_true", help="raise the upper bounds of siblings that exclude the new version"
    )
    options = parser.parse_args(arguments)
    name = options.package
    if changed := uncommitted_files():
        raise ToolError(f"uncommitted files: {', '.join(changed[:5])}; commit or stash them")
    files = prepare_release(read_members(), name, options.move, release_date=options.date, widen=options.widen)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
    tag = release_tag(name, read_members()[name].version)
    paths = " ".join(str(path.relative_to(ROOT)) for path in sorted(files))
    print(f"{tag} is prepared. Review the diff, then:")
    print(f"  git commit -m 'Release {tag}' -- {paths} uv.lock")
    print(f"  (merge it to main)  git tag {tag} && git push origin {tag}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"release: {exc}")
