"""Packages that a change can break: those it touches and all that depend on them, from the pyproject files.

    python tools/affected_packages.py --base origin/main          # JSON of what CI has to run
    python tools/affected_packages.py packages/lt-data/src/x.py   # the same for given paths

A package's own tests, README and changelog affect that package alone; its sources and its pyproject affect its
dependents too. Shared files (the lock, the tools, the workflows) affect all packages. A path without a rule is an
error, so that a new folder cannot bypass CI; a removed path of a removed package or folder affects all packages. The
diff is taken against the merge base and without renames: a file moved between packages affects both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from members import ROOT, Member, ToolError, dependents, read_members

SHARED_PATHS = {
    *(
        "uv.lock",
        "pyproject.toml",
        "conftest.py",
        "justfile",
        ".pre-commit-config.yaml",
        "tools/",
        ".ci/",
        ".github/",
        "tests/",
    ),
}
"""Files that the checks of every package use."""
READ_BY_TESTS = {
    "constraints/": ("lt-trainer-neuron",),
    "examples/": ("lt-data", "lt-launch", "lt-trainer", "lt-trainer-neuron"),
    "containers/": ("lt-launch",),
    "docs/": ("lt-trainer",),
    "packages/lt-ckpt/tests/": ("lt-trainer-neuron",),
}
"""Folders outside a package that its own tests read."""
ROOT_TEXT_FILES = {"LICENSE", ".gitignore", "mkdocs.yml", "zensical.toml"}
"""Files at the root, with all Markdown there; only workspace tests read them."""


@dataclass(frozen=True, kw_only=True)
class CiPlan:
    """CI jobs to run for a change."""

    packages: tuple[str, ...]
    """Packages, each tested in its own environments."""
    workspace: bool
    """Whether the tests that cross packages run, and lint and types over everything."""


def plan_ci(paths: Iterable[str], members: Mapping[str, Member], *, removed: Collection[str] = ()) -> CiPlan:
    """Return the jobs to run for changed paths, relative to the root with forward slashes.

    Args:
        paths: Changed paths.
        members: The packages after the change.
        removed: The removed ones among the paths. One whose package or folder no longer exists affects all.

    Raises:
        ToolError: a path without a rule.
    """
    paths = list(paths)
    own: set[str] = set()
    with_dependents: set[str] = set()
    for text in paths:
        top, *rest = PurePosixPath(text).parts
        key = f"{top}/" if rest else top
        own |= {name for folder, names in READ_BY_TESTS.items() if text.startswith(folder) for name in names}
        if key == "packages/":
            name = rest[0]
            if name not in members or len(rest) == 1:
                if text not in removed:
                    raise ToolError(f"{text}: packages/{name} is not a package; give it a pyproject.toml or move it")
                with_dependents |= set(members)
            else:
                (with_dependents if rest[1] in ("src", "pyproject.toml") else own).add(name)
        elif key in SHARED_PATHS or (text in removed and not _has_rule(key)):
            with_dependents |= set(members)
        elif not _has_rule(key):
            raise ToolError(f"{text}: {key} has no rule; add one to tools/affected_packages.py")
    return CiPlan(packages=tuple(sorted(own | dependents(with_dependents, members))), workspace=bool(paths))


def _has_rule(key: str) -> bool:
    """Return whether a rule covers a folder or file of the root."""
    return key in SHARED_PATHS or key in READ_BY_TESTS or key in ROOT_TEXT_FILES or key.endswith(".md")


def changed_paths(base: str, *, root: Path = ROOT, removed: bool = False) -> list[str]:
    """Return the paths that differ between HEAD and its merge base with `base`, both sides of a rename.

    Args:
        base: A commit or branch.
        root: The workspace.
        removed: Only removed paths.

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
    """Print the plan as JSON, or with --github as lines for $GITHUB_OUTPUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="changed paths; default: from git")
    parser.add_argument("--base", help="commit or branch that the change will be merged into")
    parser.add_argument("--all", action="store_true", help="everything, as after a merge to main")
    parser.add_argument("--github", action="store_true", help="lines NAME=JSON for $GITHUB_OUTPUT")
    options = parser.parse_args(arguments)
    if bool(options.paths) + bool(options.base) + options.all != 1:
        parser.error("give paths, --base or --all")
    members = read_members()
    if options.all:
        found = CiPlan(packages=tuple(members), workspace=True)
    elif options.base:
        found = plan_ci(changed_paths(options.base), members, removed=changed_paths(options.base, removed=True))
    else:
        found = plan_ci(options.paths, members)
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
        sys.exit(f"affected_packages: {exc}")
