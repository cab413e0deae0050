"""Which packages a change can break: those it touches and all that stand on them, from the pyproject files.

    python tools/affected.py --base origin/main          # JSON of what CI has to run
    python tools/affected.py packages/lt-data/src/x.py   # the same for paths that are named

A package's own tests, README and changelog concern that package alone; its sources and its pyproject concern its
dependants too. What all packages share (the lock, the tools, the workflows) concerns all. A path that no rule knows is
an error, so that a new folder cannot slip past CI; one of a package or folder that the change removes concerns all. The
diff is taken against the merge base and without renames: a file that moves from one package to another concerns both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
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
    "examples/": ("lt-data", "lt-launch", "lt-trainer-neuron"),
    "containers/": ("lt-launch",),
    "docs/": ("lt-trainer",),
    "packages/lt-ckpt/tests/": ("lt-trainer-neuron",),
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


def plan(paths: Iterable[str], members: Mapping[str, Member], *, removed: Collection[str] = ()) -> Plan:
    """What a change of these paths, relative to the root with forward slashes, has to run.

    Args:
        paths: What the change touches.
        members: The packages after the change.
        removed: Those of the paths that it removes. One whose package or folder is not known any more concerns all.

    Raises:
        ToolError: a path that belongs to nothing known.
    """
    paths = list(paths)
    alone: set[str] = set()
    below: set[str] = set()
    for text in paths:
        top, *rest = PurePosixPath(text).parts
        key = f"{top}/" if rest else top
        alone |= {name for folder, names in READ_BY_TESTS.items() if text.startswith(folder) for name in names}
        if key == "packages/":
            name = rest[0]
            if name not in members or len(rest) == 1:
                if text not in removed:
                    raise ToolError(f"{text}: packages/{name} is no package; give it a pyproject.toml or move it")
                below |= set(members)
            else:
                (below if rest[1] in ("src", "pyproject.toml") else alone).add(name)
        elif key in EVERYTHING or (text in removed and not _known(key)):
            below |= set(members)
        elif not _known(key):
            raise ToolError(f"{text}: tools/affected.py does not know {key}; say there what it concerns")
    return Plan(packages=tuple(sorted(alone | dependants(below, members))), workspace=bool(paths))


def _known(key: str) -> bool:
    """Whether some rule knows a folder, or a file, of the root."""
    return key in EVERYTHING or key in READ_BY_TESTS or key in TEXT or key.endswith(".md")


def changed_paths(base: str, *, root: Path = ROOT, removed: bool = False) -> list[str]:
    """Paths that differ between HEAD and the point where it left `base`, both sides of a rename.

    Args:
        base: A commit or branch.
        root: The workspace.
        removed: Only those that are not there any more.

    Raises:
        ToolError: git does not know `base`, or has no history in common with it (a shallow clone).
    """
    only = ["--diff-filter=D"] if removed else []
    command = ["git", "diff", "--name-only", "--no-renames", *only, "-z", f"{base}...HEAD"]
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
    elif options.base:
        found = plan(changed_paths(options.base), members, removed=changed_paths(options.base, removed=True))
    else:
        found = plan(options.paths, members)
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
