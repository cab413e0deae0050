"""Which packages a change can break: those it touches and all that stand on them, from the pyproject files.

    python tools/affected.py --base origin/main          # JSON of what CI has to run
    python tools/affected.py packages/lt-data/src/x.py   # the same for paths that are named

A package's own tests, README and changelog concern that package alone; its sources and its pyproject concern its
dependants too. What all packages share (the lock, the tools, the workflows) concerns all. A path that no rule knows is
an error, so that a new folder cannot slip past CI. The diff is taken against the merge base and without renames: a file
that moves from one package to another concerns both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from members import ROOT, Member, ToolError, dependants, read

__all__ = ["Plan", "changed_paths", "plan"]

EVERYTHING = {
    *("uv.lock", "pyproject.toml", "justfile", ".pre-commit-config.yaml", "tools/", ".ci/", ".github/", "tests/"),
}
"""What every package's checks run with."""
READ_BY_TESTS = {
    "constraints/": ("lt-trainer-neuron",),
    "examples/": ("lt-data", "lt-launch", "lt-trainer", "lt-trainer-neuron"),
    "containers/": ("lt-launch",),
    "docs/": ("lt-launch", "lt-trainer"),
}
"""Folders outside a package that its own tests read."""
TEXT = {"LICENSE", ".gitignore", "mkdocs.yml", "zensical.toml"}
"""At the root; Markdown there too. Only the tests of the workspace look at them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What has to be run for a change."""

    packages: tuple[str, ...]
    """Each gets its own environments."""
    workspace: bool
    """Whether the tests that cross packages run, and lint and types over everything."""


def plan(paths: Iterable[str], members: Mapping[str, Member]) -> Plan:
    """What a change of these paths, relative to the root with forward slashes, has to run.

    Raises:
        ToolError: a path that belongs to nothing known.
    """
    paths = list(paths)
    alone: set[str] = set()
    below: set[str] = set()
    for text in paths:
        top, *rest = PurePosixPath(text).parts
        key = f"{top}/" if rest else top
        if key == "packages/":
            name = rest[0]
            if name not in members or len(rest) == 1:
                raise ToolError(f"{text}: packages/{name} is no package; give it a pyproject.toml or move it")
            (below if rest[1] in ("src", "pyproject.toml") else alone).add(name)
        elif key in EVERYTHING:
            below |= set(members)
        elif key in READ_BY_TESTS:
            alone |= set(READ_BY_TESTS[key])
        elif not (key in TEXT or (not rest and key.endswith(".md"))):
            raise ToolError(f"{text}: tools/affected.py does not know {key}; say there what it concerns")
    return Plan(packages=tuple(sorted(alone | dependants(below, members))), workspace=bool(paths))


def changed_paths(base: str, *, root: Path = ROOT) -> list[str]:
    """Paths that differ between HEAD and the point where it left `base`, both sides of a rename.

    Raises:
        ToolError: git does not know `base`, or has no history in common with it (a shallow clone).
    """
    command = ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(command)}: {done.stderr.strip()}; fetch the whole history (fetch-depth: 0)")
    return [path for path in done.stdout.split("\0") if path]


def main(arguments: list[str]) -> int:
    """Print the plan as JSON; with --github as lines for $GITHUB_OUTPUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="changed paths, instead of asking git")
    parser.add_argument("--base", help="commit or branch that the change will be merged into")
    parser.add_argument("--all", action="store_true", help="everything, as after a merge to main")
    parser.add_argument("--github", action="store_true", help="lines NAME=JSON for $GITHUB_OUTPUT")
    options = parser.parse_args(arguments)
    if bool(options.paths) + bool(options.base) + options.all != 1:
        parser.error("give paths, --base or --all")
    members = read()
    if options.all:
        found = Plan(packages=tuple(members), workspace=True)
    else:
        found = plan(options.paths or changed_paths(options.base), members)
    values = {"packages": list(found.packages), "workspace": found.workspace}
    if options.github:
        print("\n".join(f"{name}={json.dumps(value)}" for name, value in values.items()))
    else:
        print(json.dumps(values))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"affected: {exc}")
