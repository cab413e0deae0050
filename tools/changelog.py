"""The changelogs: what is pending, cutting it into a release, and that a change of the sources is told.

    python tools/changelog.py --base origin/main     # fails where src/ changed and the changelog says nothing new

Format: Keep a Changelog. The top section is what is pending: `## [Unreleased]`, or `## [0.1.0] - unreleased` before a
package's first release. Below stand releases, `## [0.1.0] - 2026-11-21`, newest first. No other heading has this level.

A change that no user can notice needs no entry: each of its commits that touches the package's sources then carries the
trailer `Changelog: none` in its message. One that changes the public names (`API.txt`) is always told.
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

from affected import changed_paths
from members import ROOT, Member, ToolError, read

__all__ = ["Section", "cut", "missing_entries", "notes", "pending", "released", "sections", "with_entry"]

HEADING = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<when>\S+))?[ \t]*$", re.M)
LEVEL = re.compile(r"^##(?!#)", re.M)
ENTRY = re.compile(r"^- (.+(?:\n(?:  .*|(?=\n  )))*)", re.M)
UNRELEASED = "unreleased"
FILE = "CHANGELOG.md"
NAMES = "API.txt"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One heading and what stands below it."""

    name: str
    """A version, or `Unreleased`."""
    when: str | None
    """A date, `unreleased`, or None where the heading says nothing."""
    body: str

    @property
    def is_pending(self) -> bool:
        """Whether this is not released yet."""
        return self.name.lower() == UNRELEASED or self.when == UNRELEASED

    @property
    def entries(self) -> list[str]:
        """The list items, each as one line."""
        return [" ".join(text.split()) for text in ENTRY.findall(self.body)]


def sections(text: str) -> list[Section]:
    """All sections of a changelog, in the order of the file.

    Raises:
        ToolError: a heading of another form, which would make one release a part of the one above it.
    """
    found = list(HEADING.finditer(text))
    if odd := {match.start() for match in LEVEL.finditer(text)} - {match.start() for match in found}:
        heading = text[min(odd) :].partition("\n")[0]
        raise ToolError(f"changelog: write {heading!r} as ## [VERSION] - {date.today()}, or ## [Unreleased]")
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [
        Section(name=match["name"], when=match["when"], body=text[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]


def pending(text: str) -> Section | None:
    """What is not released yet, None where the changelog has no such section at its top."""
    top = next(iter(sections(text)), None)
    return top if top is not None and top.is_pending else None


def released(text: str) -> list[Section]:
    """The releases, newest first.

    Raises:
        ToolError: a heading below the pending section without a date, or with one that is none.
    """
    found = [section for section in sections(text) if not section.is_pending]
    for section in found:
        try:
            date.fromisoformat(section.when or "")
        except ValueError as exc:
            raise ToolError(f"changelog: ## [{section.name}] needs a date, as - {date.today()}") from exc
    return found


def cut(text: str, *, version: str, when: date) -> str:
    """The changelog with what was pending under its version and date, and nothing pending.

    Raises:
        ToolError: nothing is pending, or the version is there already.
    """
    top = pending(text)
    if top is None or not top.entries:
        raise ToolError(
            f"changelog: nothing is pending; write what changed for users under ## [Unreleased] before {version}"
        )
    if version in [section.name for section in released(text)]:
        raise ToolError(f"changelog: {version} is released already")
    heading = HEADING.search(text)
    assert heading is not None
    return f"{text[: heading.start()]}## [Unreleased]\n\n## [{version}] - {when}{text[heading.end() :]}"


def with_entry(text: str, entry: str) -> str:
    """The changelog with one more entry at the end of what is pending.

    Raises:
        ToolError: there is no pending section at its top.
    """
    top = pending(text)
    if top is None:
        raise ToolError("changelog: there is no ## [Unreleased] at its top")
    heading = HEADING.search(text)
    assert heading is not None
    body = f"{top.body}\n{entry}" if top.entries else f"### Changed\n\n{entry}"
    rest = text[heading.end() :].lstrip("\n")[len(top.body) :].lstrip("\n")
    return f"{text[: heading.end()]}\n\n{body}\n" + (f"\n{rest}" if rest else "")


def notes(text: str, *, version: str) -> str:
    """What one release says, as Markdown.

    Raises:
        ToolError: there is no such release.
    """
    for section in released(text):
        if section.name == version:
            return section.body + "\n"
    raise ToolError(f"changelog: there is no release {version}")


def told(before: str, after: str) -> list[str]:
    """Entries that a change added, to what is pending or to releases that it made."""
    known = {section.name for section in sections(before) if not section.is_pending}
    old = {entry for section in sections(before) for entry in section.entries}
    return [e for section in sections(after) if section.name not in known for e in section.entries if e not in old]


def missing_entries(base: str, members: Sequence[Member], *, root: Path = ROOT) -> list[str]:
    """One sentence for each package whose sources or names differ from `base` while its changelog tells nothing new.

    Raises:
        ToolError: git does not know `base`.
    """
    changed = changed_paths(base, root=root)
    fork = _git("merge-base", base, "HEAD", root=root).strip()
    problems: list[str] = []
    for member in members:
        folder = f"packages/{member.name}"
        names = f"{folder}/{NAMES}" in changed
        if not names and not any(path.startswith(f"{folder}/src/") for path in changed):
            continue
        after = (member.folder / FILE).read_text(encoding="utf-8")
        there = _git("ls-tree", "--name-only", fork, f"{folder}/{FILE}", root=root).strip()
        before = _git("show", f"{fork}:{folder}/{FILE}", root=root) if there else ""
        if not told(before, after) and (names or not _silent(fork, f"{folder}/src", root=root)):
            what = f"{folder}/{NAMES if names else 'src'} changed and {folder}/{FILE} tells nothing new"
            silent = "" if names else ", or the trailer `Changelog: none` to commits that no user can notice"
            problems.append(f"{what}: add a line under its top heading{silent}")
    return problems


def _silent(fork: str, folder: str, *, root: Path) -> bool:
    """Whether all commits that touch a folder say that there is nothing to tell."""
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
    """Check that changed sources are told; returns 1 if one is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit or branch that the change will be merged into")
    options = parser.parse_args(arguments)
    problems = missing_entries(options.base, list(read().values()))
    print("\n".join(problems) or "changelogs tell what changed")
    return bool(problems)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"changelog: {exc}")
