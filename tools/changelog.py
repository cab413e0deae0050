"""Changelogs: parse them, cut a release, and check that changed sources have an entry.

    python tools/changelog.py --base origin/main     # fails where src/ changed and the changelog has no new entry

Format: Keep a Changelog. The top section is unreleased: `## [Unreleased]`, or `## [0.1.0] - unreleased` before a
package's first release. Releases follow, `## [0.1.0] - 2026-11-21`, newest first. No other heading has this level.

A change invisible to users needs no entry: each of its commits that touch the package's sources then has the trailer
`Changelog: none` in its message. A change of the public names (`API.txt`) always needs an entry.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from affected_packages import changed_paths
from members import ROOT, Member, ToolError, read_members

HEADING = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<when>\S+))?[ \t]*$", re.M)
HEADING_LEVEL = re.compile(r"^##(?!#)", re.M)
ENTRY = re.compile(r"^- (.+(?:\n(?:  .*|(?=\n  )))*)", re.M)
UNRELEASED = "unreleased"
CHANGELOG_FILE = "CHANGELOG.md"
API_FILE = "API.txt"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Heading of a changelog and the text below it."""

    name: str
    """A version, or `Unreleased`."""
    release_date: str | None
    """A date, `unreleased`, or None."""
    body: str

    @property
    def is_unreleased(self) -> bool:
        """True for the unreleased section."""
        return self.name.lower() == UNRELEASED or self.release_date == UNRELEASED

    @property
    def entries(self) -> list[str]:
        """List items, each as one line."""
        return [" ".join(text.split()) for text in ENTRY.findall(self.body)]


def parse_sections(text: str) -> list[Section]:
    """Return all sections of a changelog, in file order.

    Raises:
        ToolError: a heading of another form, which would merge one release into the one above it.
    """
    found = list(HEADING.finditer(text))
    if odd := {match.start() for match in HEADING_LEVEL.finditer(text)} - {match.start() for match in found}:
        heading = text[min(odd) :].partition("\n")[0]
        raise ToolError(f"changelog: write {heading!r} as ## [VERSION] - {date.today()}, or ## [Unreleased]")
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [
        Section(name=match["name"], release_date=match["when"], body=text[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]


def unreleased_section(text: str) -> Section | None:
    """Return the unreleased section at the top, or None."""
    top = next(iter(parse_sections(text)), None)
    return top if top is not None and top.is_unreleased else None


def release_sections(text: str) -> list[Section]:
    """Return the releases, newest first.

    Raises:
        ToolError: a release heading without a valid date.
    """
    found = [section for section in parse_sections(text) if not section.is_unreleased]
    for section in found:
        try:
            date.fromisoformat(section.release_date or "")
        except ValueError as exc:
            raise ToolError(f"changelog: ## [{section.name}] needs a date, such as - {date.today()}") from exc
    return found


def cut_release(text: str, *, version: str, release_date: date) -> str:
    """Return the changelog with the unreleased entries under a version and date.

    Raises:
        ToolError: there are no unreleased entries, or the version exists.
    """
    top = unreleased_section(text)
    if top is None or not top.entries:
        raise ToolError(f"changelog: no unreleased entries; add the changes of {version} under ## [Unreleased]")
    if version in [section.name for section in release_sections(text)]:
        raise ToolError(f"changelog: {version} is already released")
    heading = HEADING.search(text)
    assert heading is not None
    return f"{text[: heading.start()]}## [Unreleased]\n\n## [{version}] - {release_date}{text[heading.end() :]}"


def add_entry(text: str, entry: str) -> str:
    """Return the changelog with one more entry at the end of the unreleased section.

    Raises:
        ToolError: there is no unreleased section at the top.
    """
    top = unreleased_section(text)
    if top is None:
        raise ToolError("changelog: no ## [Unreleased] at the top")
    heading = HEADING.search(text)
    assert heading is not None
    body = f"{top.body}\n{entry}" if top.entries else f"### Changed\n\n{entry}"
    rest = text[heading.end() :].lstrip("\n")[len(top.body) :].lstrip("\n")
    return f"{text[: heading.end()]}\n\n{body}\n" + (f"\n{rest}" if rest else "")


def release_notes(text: str, *, version: str) -> str:
    """Return the Markdown text of one release.

    Raises:
        ToolError: there is no such release.
    """
    for section in release_sections(text):
        if section.name == version:
            return section.body + "\n"
    raise ToolError(f"changelog: no release {version}")


def added_entries(before: str, after: str) -> list[str]:
    """Return the entries added by a change, unreleased or in new releases."""
    known = {section.name for section in parse_sections(before) if not section.is_unreleased}
    old = {entry for section in parse_sections(before) for entry in section.entries}
    return [
        e for section in parse_sections(after) if section.name not in known for e in section.entries if e not in old
    ]


def find_missing_entries(base: str, members: Sequence[Member], *, root: Path = ROOT) -> list[str]:
    """Return a sentence for each package with changed sources or names but no new changelog entry.

    Raises:
        ToolError: git does not know `base`.
    """
    changed = changed_paths(base, root=root)
    fork = _git("merge-base", base, "HEAD", root=root).strip()
    problems: list[str] = []
    for member in members:
        folder = f"packages/{member.name}"
        names = f"{folder}/{API_FILE}" in changed
        if not names and not any(path.startswith(f"{folder}/src/") for path in changed):
            continue
        after = (member.folder / CHANGELOG_FILE).read_text(encoding="utf-8")
        there = _git("ls-tree", "--name-only", fork, f"{folder}/{CHANGELOG_FILE}", root=root).strip()
        before = _git("show", f"{fork}:{folder}/{CHANGELOG_FILE}", root=root) if there else ""
        if not added_entries(before, after) and (names or not _is_opted_out(fork, f"{folder}/src", root=root)):
            what = f"{folder}/{API_FILE if names else 'src'} changed and {folder}/{CHANGELOG_FILE} has no new entry"
            opt_out = "" if names else ", or the trailer `Changelog: none` to commits invisible to users"
            problems.append(f"{what}; add a line under its top heading{opt_out}")
    return problems


def _is_opted_out(fork: str, folder: str, *, root: Path) -> bool:
    """Return whether all commits that touch a folder have the trailer `Changelog: none`."""
    trailer = "%(trailers:key=Changelog,valueonly,separator=%x2C)"
    commits = _git(
        "log", "--no-merges", f"--format=%h {trailer}", f"{fork}..HEAD", "--", folder, root=root
    ).splitlines()
    return bool(commits) and all(line.partition(" ")[2].strip().lower() == "none" for line in commits)


def _git(*arguments: str, root: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Check that changed sources have changelog entries; return 1 if one is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit or branch that the change will be merged into")
    options = parser.parse_args(arguments)
    problems = find_missing_entries(options.base, list(read_members().values()))
    print("\n".join(problems) or "changelogs are up to date")
    return bool(problems)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"changelog: {exc}")
