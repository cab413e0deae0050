"""Prepare a release: move the version, cut the changelog, relock. What is left to do is printed.

    python tools/release.py lt-data minor              # 0.1.3 -> 0.2.0; also major, patch
    python tools/release.py lt-data first              # the version that stands there, which was never released
    python tools/release.py lt-data minor --widen      # and let the siblings whose range excludes it have it

Nothing is written before all of this holds: the tree is committed; something is pending in the changelog; the move is
as far as the public names ask for (tools/api_surface.py, against the last tag); the tag is not there yet; no sibling's
range excludes the new version, unless --widen moves that range's cap and notes so in the sibling's changelog. Files are
edited in place: two lines and the changelog.
The tag is made by hand, after the change is merged; tools/release_check.py is what the tag's workflow runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from api_surface import changes_since
from changelog import FILE, cut, released, with_entry
from check_ranges import next_breaking
from members import ROOT, Member, ToolError, chosen, read
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from surface_levels import Level, bumped, level_of

__all__ = ["last_tag", "prepare", "tag_of", "uncommitted"]

VERSION = re.compile(r'^version = "[^"]+"$', re.M)


def tag_of(name: str, version: Version) -> str:
    """The tag of a release, `lt-data-v0.2.0`."""
    return f"{name}-v{version}"


def last_tag(name: str, *, root: Path = ROOT, before: Version | None = None) -> str | None:
    """The newest release tag of a package, older than `before` where that is given; None before the first release."""
    tags = _git("tag", "--list", f"{name}-v*", root=root).split()
    known = [version for tag in tags if (version := _version(tag.removeprefix(f"{name}-v"))) is not None]
    return tag_of(name, max(older)) if (older := [v for v in known if before is None or v < before]) else None


def _version(text: str) -> Version | None:
    """The version that a tag ends with; None for a tag of another package whose name begins alike, or of no release."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def prepare(
    members: Mapping[str, Member], name: str, move: str, *, when: date, widen: bool = False, root: Path = ROOT
) -> dict[Path, str]:
    """The files of a release with their new content; nothing is written.

    Args:
        members: All packages as they stand.
        name: The one to release.
        move: first, major, minor or patch.
        when: The date that the changelog gets.
        widen: Move the caps of siblings that exclude the new version.
        root: The workspace.

    Raises:
        ToolError: the release cannot be made as asked for; the message says what is missing.
    """
    member = chosen(members, name)
    changelog = (member.folder / FILE).read_text(encoding="utf-8")
    version = _next(member, move, changelog, last_tag(name, root=root), root=root)
    if _git("tag", "--list", tag_of(name, version), root=root):
        raise ToolError(f"there is a tag {tag_of(name, version)} already: is this the newest main?")
    files = {
        member.folder / FILE: cut(changelog, version=str(version), when=when),
        member.folder / "pyproject.toml": _with_version(member.folder / "pyproject.toml", version),
    }
    for sibling, texts in _excluding(members, name, version).items():
        if not widen:
            remedy = f"allow <{next_breaking(version)} there, or pass --widen"
            raise ToolError(f"{sibling} requires {', '.join(texts)}, which excludes {name} {version}: {remedy}")
        files |= _widened(members[sibling], name, version)
    return files


def _next(member: Member, move: str, changelog: str, tag: str | None, *, root: Path) -> Version:
    never = tag is None and not released(changelog)
    if never != (move == "first"):
        state = "was never released" if never else f"was released as {tag or released(changelog)[0].name}"
        raise ToolError(f"{member.name} {state}: say {'first' if never else 'major, minor or patch'} instead of {move}")
    if never:
        return member.version
    level = Level[move.upper()]
    if tag is not None:
        breaks, added = changes_since(tag, member, root=root)
        least = level_of(breaks, added, version=member.version)
        if level < least:
            shown = "\n  ".join([*breaks, *added][:20])
            raise ToolError(f"since {tag} {member.name} changed what users see; say {least.name.lower()}:\n  {shown}")
    return bumped(member.version, level)


def uncommitted(*, root: Path = ROOT) -> list[str]:
    """Files that git knows and that differ from the last commit; a release is made of what was looked at and merged."""
    lines = _git("status", "--porcelain", "--untracked-files=no", root=root).splitlines()
    return [line[3:] for line in lines]


def _git(*arguments: str, root: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _with_version(pyproject: Path, version: Version) -> str:
    text, count = VERSION.subn(f'version = "{version}"', pyproject.read_text(encoding="utf-8"))
    if count != 1:
        raise ToolError(f"{pyproject}: expected one line version = ..., found {count}")
    return text


def _excluding(members: Mapping[str, Member], name: str, version: Version) -> dict[str, list[str]]:
    """Requirements on a package that exclude a version of it, by the sibling that has them."""
    found: dict[str, list[str]] = {}
    for sibling in members.values():
        for requirement in (r for group in sibling.requirements.values() for r in group):
            is_other = canonicalize_name(requirement.name) == name != sibling.name
            if is_other and not requirement.specifier.contains(version, prereleases=True):
                found.setdefault(sibling.name, []).append(str(requirement))
    return found


def _widened(sibling: Member, name: str, version: Version) -> dict[Path, str]:
    """A sibling's pyproject with the caps moved past a version, and its changelog with the line that says so."""
    path = sibling.folder / "pyproject.toml"
    cap = re.compile(rf'("{re.escape(name)}(?:\[[^\]"]*\])?>=[^,"]+),<[^"]+"')
    text, count = cap.subn(rf'\1,<{next_breaking(version)}"', path.read_text(encoding="utf-8"))
    if not count:
        raise ToolError(f"{path}: the ranges of {name} are not written as >=A,<B; change them by hand")
    changelog = (sibling.folder / FILE).read_text(encoding="utf-8")
    entry = f"- Works with {name} {version.major}.{version.minor}."
    return {path: text, sibling.folder / FILE: with_entry(changelog, entry)}


def main(arguments: list[str]) -> int:
    """Write the files of a release and print what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("move", choices=["first", "major", "minor", "patch"])
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="today by default")
    parser.add_argument("--widen", action="store_true", help="move the caps of siblings that exclude the new version")
    options = parser.parse_args(arguments)
    name = options.package
    if changed := uncommitted():
        raise ToolError(f"commit these first, or set them aside: {', '.join(changed[:5])}")
    files = prepare(read(), name, options.move, when=options.date, widen=options.widen)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
    tag = tag_of(name, read()[name].version)
    paths = " ".join(str(path.relative_to(ROOT)) for path in sorted(files))
    print(f"{tag} is prepared. Look at the diff, then:")
    print(f"  git commit -m 'Release {tag}' -- {paths} uv.lock")
    print(f"  (merge it to main)  git tag {tag} && git push origin {tag}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"release: {exc}")
