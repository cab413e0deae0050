"""Test of one package as users install it: its wheel in an environment of its own, for one Python and one resolution.

    python tools/check_package.py lt-data --out /tmp/x                                  # this Python, the lock
    python tools/check_package.py lt-data --out /tmp/x --python 3.14 --resolution highest
    python tools/check_package.py lt-data --out /tmp/x --resolution lowest-direct --only tests

Resolutions: `locked` (as in uv.lock), `highest` (the newest allowed versions), `lowest-direct` (the oldest version that
the package itself allows of each direct requirement, pinned; a lower bound that other requirements make unreachable is
an error, because nothing would test it). The environment has the package's wheel with all its extras, its siblings'
wheels (from the workspace, or with --index the published ones), the dev group, and what its tests import besides; it
lacks the workspace, so siblings that the package does not require are absent. `uv.lock` is not touched.

Stages: environment; with `locked` also lint and types; tests (the package's, not marked slow); artifacts
(tools/artifacts.py); tree (no new file in git status). The first failure ends it. Minutes, most of it torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from check_dependencies import DISTRIBUTION_NAMES, declared_distributions, imported_modules
from members import ROOT, Member, ToolError, get_member, read_members
from packaging.utils import canonicalize_name
from packaging.version import Version

RESOLUTIONS = ("locked", "lowest-direct", "highest")
SEPARATE_EXTRAS = {"lt-trainer-neuron": {"neuron"}, "lt-data": {"ray"}, "lt-trainer": {"eval", "release"}}
"""Extras of environments of their own: on no public index, a cluster with Pythons of its own, or a large tree."""
LOCK_GROUPS = {"lt-trainer-neuron": ["--no-group", "gpu", "--group", "neuron"]}
"""Dependency groups of packages with another torch version."""
TORCH_REQUIREMENT = {"lt-trainer-neuron": ["torch==2.9.*"]}
"""Version that torch-xla is built for but does not require; in the lock the group pins it."""
TEST_TOOLS = {"pytest", "hypothesis", "moto", "packaging", "botocore", "boto3"}
"""Distributions of the dev group."""
TEST_HELPERS = "lt_test_helpers"
"""Package in tests/helpers, which pytest puts on the path."""


def find_test_dependencies(member: Member, members: dict[str, Member]) -> list[str]:
    """Return distributions imported by a package's tests and provided by neither it nor the dev group."""
    return sorted(
        _imported_distributions(member.folder / "tests")
        - declared_distributions(member, members)
        - TEST_TOOLS
        - set(members)
    )


@cache
def _imported_distributions(folder: Path) -> frozenset[str]:
    """Return distributions imported by the modules of a folder, without its own and the standard library."""
    paths = sorted(folder.rglob("*.py"))
    packages = {path.parent.name for path in paths if path.name == "__init__.py"}
    own = {path.stem for path in paths} | packages | set(sys.stdlib_module_names) | {TEST_HELPERS}
    named = {
        name for path in paths for name, _ in imported_modules(path.read_text(encoding="utf-8"), filename=str(path))
    }
    return frozenset(canonicalize_name(DISTRIBUTION_NAMES.get(name, name)) for name in named - own)


def lowest_versions(member: Member, members: dict[str, Member], *, python: str) -> list[str]:
    """Return `name==version` of the oldest allowed version of each third-party requirement, extras included.

    Args:
        member: The package.
        members: All packages.
        python: Such as "3.13"; requirements of other Pythons are ignored.

    Raises:
        ToolError: a requirement without a lower bound.
    """
    found: dict[str, Version] = {}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for extra, requirements in member.requirements.items():
        for r in requirements:
            if extra in SEPARATE_EXTRAS.get(member.name, ()) or canonicalize_name(r.name) in members:
                continue
            if r.marker and not r.marker.evaluate(environment):
                continue
            stated = [Version(part.version) for part in r.specifier if part.operator == ">="]
            if not stated:
                raise ToolError(f"{member.name} requires {r} without a lower bound; write {r.name}>=VERSION")
            found[r.name] = max([*stated, *([found[r.name]] if r.name in found else [])])
    return sorted(f"{name}=={version}" for name, version in found.items())


def environment_commands(
    member: Member,
    members: dict[str, Member],
    *,
    python: str,
    resolution: str,
    out: Path,
    index: str | None = None,
) -> list[list[str]]:
    """Return the commands that create the environment in `out`/venv; nothing is run."""
    venv, wheels, lock = str(out / "venv"), str(out / "wheels"), str(out / "locked.txt")
    interpreter = str(out / "venv" / "bin" / "python")
    install = ["uv", "pip", "install", "--quiet", "--python", interpreter, "--find-links", wheels]
    install += [part for name in members for part in ("--refresh-package", name)]
    install += ["--index", index] if index else []
    built = ["--package", member.name] if index else ["--all-packages"]
    commands = [
        ["uv", "build", "--quiet", *built, "--wheel", "--no-sources", "--out-dir", wheels],
        ["uv", "venv", "--quiet", "--python", python, venv],
    ]
    pins: list[str] = []
    if resolution == "locked":
        groups = LOCK_GROUPS.get(member.name, [])
        # Not --all-packages, which excludes the group neuron: the groups list all members with their extras.
        export = ["uv", "export", "--quiet", "--locked", "--no-emit-workspace", "--no-hashes"]
        commands.append([*export, *groups, "--format", "requirements.txt", "--output-file", lock])
        pins = ["--constraint", lock]
    extras = [part for e in member.extras if e not in SEPARATE_EXTRAS.get(member.name, ()) for part in ("--extra", e)]
    wanted = ["--requirements", str(member.folder / "pyproject.toml"), *extras, "--no-sources"]
    wanted += ["--group", f"{ROOT / 'pyproject.toml'}:dev"]
    wheel = str(out / "wheels" / f"{member.module}-{member.version}-py3-none-any.whl")
    if resolution == "lowest-direct":
        pins = ["--constraint", str(out / "floors.txt")]
    direct = pins
    if resolution != "locked":
        direct = [*pins, "--resolution", resolution, *TORCH_REQUIREMENT.get(member.name, [])]
    commands.append([*install, *direct, *wanted])
    commands.append([*install, "--no-deps", "--reinstall", wheel])
    if needed := find_test_dependencies(member, members):
        commands.append([*install, *pins, *needed])
    return commands


def stage_commands(member: Member, out: Path, *, python: str, resolution: str) -> dict[str, list[list[str]]]:
    """Return the commands by stage, without environment and tree."""
    programs = out / "venv" / "bin"
    interpreter, folder = str(programs / "python"), str(member.folder)
    checker = str(programs / "basedpyright")
    # the checkout's src is not on the path: tests must import the installed package
    where = f"import {member.module} as m, sys; sys.exit(not m.__file__.startswith({str(out / 'venv')!r}))"
    tests = [interpreter, "-m", "pytest", "-q", "-m", "not slow", "--hypothesis-profile=ci", f"{folder}/tests"]
    found: dict[str, list[list[str]]] = {
        "lint": [
            [interpreter, "-m", "ruff", "check", folder],
            [interpreter, "-m", "ruff", "format", "--check", folder],
        ],
        "types": [[checker, "--level", "error", "--pythonpath", interpreter, "--project", str(out / "types.json")]],
        "tests": [[interpreter, "-c", where], tests],
        "artifacts": [
            [sys.executable, "tools/artifacts.py", member.name, "--python", python, "--out", str(out / "dist")]
        ],
    }
    return found if resolution == "locked" else {name: found[name] for name in ("tests", "artifacts")}


def pyright_settings(member: Member, *, root: Path = ROOT) -> dict[str, object]:
    """Return the workspace's type-checker settings for one package, with the checkout as source of its modules.

    Otherwise the installed wheel would be a second copy of the sources, with classes of its own.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["basedpyright"]
    sources = [str(member.folder / "src")]
    return {**settings, "include": sources, "extraPaths": sources}


def git_status(root: Path = ROOT) -> str:
    """Return the changed and new files of git status."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def _run_all(commands: list[list[str]]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("VIRTUAL_ENV", None)
    for command in commands:
        print(f"  {' '.join(command)}", flush=True)
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code:
            raise ToolError(f"exit code {code}: {' '.join(command)}")


def main(arguments: list[str]) -> int:
    """Run the stages of one package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for wheels and environments")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--resolution", choices=RESOLUTIONS, default="locked")
    parser.add_argument("--index", help="simple index with the siblings' releases; else they are built here")
    parser.add_argument("--only", action="append", default=[], help="only these stages, after the environment")
    options = parser.parse_args(arguments)
    members = read_members()
    member, out = get_member(members, options.package), options.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise ToolError(f"--out {out}: is not empty; give an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / "types.json").write_text(json.dumps(pyright_settings(member)), encoding="utf-8")
    oldest = lowest_versions(member, members, python=options.python)
    (out / "floors.txt").write_text("\n".join(oldest) + "\n", encoding="utf-8")
    before = git_status()
    found = stage_commands(member, out, python=options.python, resolution=options.resolution)
    if unknown := set(options.only) - set(found):
        names = ", ".join(sorted(unknown))
        raise ToolError(f"--only {names}: no such stage with {options.resolution}; the stages are {', '.join(found)}")
    chosen_python, resolution = options.python, options.resolution
    environment = environment_commands(
        member, members, python=chosen_python, resolution=resolution, out=out, index=options.index
    )
    for name, commands in {"environment": environment, **found}.items():
        if options.only and name not in ("environment", *options.only):
            continue
        print(f"--- {name}", flush=True)
        _run_all(commands)
    if (after := git_status()) != before:
        raise ToolError(f"the tests left or changed files in the tree; before:\n{before}\nafter:\n{after}")
    print(f"--- {member.name} {member.version}: ok with Python {options.python}, {options.resolution}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"check_package: {exc}")
