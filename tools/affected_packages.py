"""Packages that a change can break, for CI: those that it touches and all that depend on them.

    python tools/affected_packages.py --base origin/main          # JSON of the packages to test
    python tools/affected_packages.py packages/lt-data/src/x.py   # the same for given paths

A package's own tests and texts concern it alone; its sources and its pyproject concern its dependents too, and a folder
that tests of packages read concerns those (`READ_BY_TESTS`). Texts of the root concern no package, every other file all
of them: a new folder is tested too much rather than too little. The diff is taken against the merge base and without
renames, so that a file that moves between packages concerns both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from members import ROOT, Member, read_members

READ_BY_TESTS = {
    "constraints/": ("lt-trainer-neuron",),
    "examples/": ("lt-data", "lt-launch", "lt-trainer", "lt-trainer-neuron"),
    "containers/": ("lt-launch",),
    "docs/": ("lt-model", "lt-trainer"),
    "packages/lt-ckpt/tests/": ("lt-ckpt", "lt-trainer-neuron"),
}
"""Folders and the packages whose tests read them."""


def affected_packages(paths: Iterable[str], members: Mapping[str, Member]) -> list[str]:
    """Return the packages to test for changed paths, relative to the root."""
    touched: set[str] = set()
    broken: set[str] = set()
    for path in paths:
        top, *rest = PurePosixPath(path).parts
        readers = [name for folder, names in READ_BY_TESTS.items() if path.startswith(folder) for name in names]
        touched.update(readers)
        if top == "packages" and len(rest) > 1 and rest[0] in members:
            (broken if rest[1] in ("src", "pyproject.toml") else touched).add(rest[0])
        elif not readers and not (path.endswith(".md") or path in ("LICENSE", ".gitignore", "mkdocs.yml")):
            broken.update(members)
    return sorted(touched | dependents(broken, members))


def dependents(names: set[str], members: Mapping[str, Member]) -> set[str]:
    """Return these packages and all that require one of them, directly or indirectly, in extras too."""
    required = {name: {r.name for group in m.requirements.values() for r in group} for name, m in members.items()}
    found = set(names)
    while more := {name for name in members if required[name] & found} - found:
        found |= more
    return found


def changed_paths(base: str, *, root: Path = ROOT) -> list[str]:
    """Return the paths that differ between HEAD and its merge base with `base`, both sides of a rename."""
    command = ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split("\0")[:-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="changed paths; default: those since --base, or all packages")
    parser.add_argument("--base", help="commit or branch that the change will be merged into")
    options = parser.parse_args()
    workspace = read_members()
    changed = changed_paths(options.base) if options.base else options.paths
    print(json.dumps(affected_packages(changed, workspace) if options.base or changed else list(workspace)))
