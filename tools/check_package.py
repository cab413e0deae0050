"""Tests of one package as its users install it: its wheel with its extras in an environment of its own.

    python tools/check_package.py lt-data                                            # the newest versions
    python tools/check_package.py lt-data --python 3.11 --resolution lowest-direct   # the oldest that it allows
    python tools/check_package.py lt-data --published                                # siblings from the index

The environment has the wheel, its requirements in that resolution, then pytest and the package's dependency group
`test` beside them. The workspace is not on the path: a sibling that the package does not require is absent. Minutes,
most of it torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from members import ROOT, read_members

OTHER_EXTRAS = {"lt-trainer-neuron": ["neuron"], "lt-data": ["ray"], "lt-trainer": ["eval"]}
"""Extras that are not installed here: on no public index, or of a large tree."""
PINS = {"lt-trainer-neuron": ["torch==2.9.*"]}
"""What torch-xla is built for and does not require."""


def main() -> None:
    """Make the environment and run the package's tests there; the first command that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    members = read_members()
    parser.add_argument("package", choices=members)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--resolution", choices=["highest", "lowest-direct"], default="highest")
    parser.add_argument("--published", action="store_true", help="siblings from the package index, not from here")
    options, for_pytest = parser.parse_known_args()
    name, member = options.package, members[options.package]
    module = name.replace("-", "_")
    extras = [extra for extra in member.requirements if extra and extra not in OTHER_EXTRAS.get(name, [])]
    with tempfile.TemporaryDirectory(prefix="lt-package-") as out:
        wheels, python, frozen = f"{out}/wheels", f"{out}/venv/bin/python", f"{out}/frozen.txt"
        built = ["--package", name] if options.published else ["--all-packages"]
        run("uv", "build", "--quiet", "--wheel", "--no-sources", "--out-dir", wheels, *built)
        run("uv", "venv", "--quiet", "--python", options.python, f"{out}/venv")
        install = ["uv", "pip", "install", "--quiet", "--python", python, "--no-sources", "--find-links", wheels]
        install += [part for sibling in members for part in ("--refresh-package", sibling)]
        wanted = [f"{wheels}/{module}-{member.version}-py3-none-any.whl", *PINS.get(name, [])]
        wanted += ["--requirements", f"{member.folder}/pyproject.toml"]
        wanted += [part for extra in extras for part in ("--extra", extra)]
        run(*install, "--resolution", options.resolution, *wanted)
        Path(frozen).write_text(run("uv", "pip", "freeze", "--python", python, "--exclude", name), encoding="utf-8")
        # With these as they are: what the tests need besides must not lift what the package is tested with.
        groups = ["--group", f"{ROOT}/pyproject.toml:dev", "--group", f"{member.folder}/pyproject.toml:test"]
        run(*install, "--constraint", frozen, *groups)
        run(python, "-c", f"import {module}, sys; sys.exit(not {module}.__file__.startswith({out!r}))")
        tests = [python, "-m", "pytest", "-q", "-m", "not slow", "--hypothesis-profile=ci", *for_pytest]
        run(*tests, f"packages/{name}/tests", shown=True)


def run(*command: str, shown: bool = False) -> str:
    """Return what a command prints, if it is not shown as it comes; if it fails, end with its exit code."""
    print(f"--- {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=None if shown else subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    main()
