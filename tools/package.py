"""One package tested as its users have it: its wheel in an environment of its own, for one Python and one resolution.

    python tools/package.py lt-data --out /tmp/x                                  # this Python, the lock
    python tools/package.py lt-data --out /tmp/x --python 3.13 --resolution highest
    python tools/package.py lt-data --out /tmp/x --resolution lowest-direct --only tests

Resolutions: `locked` (what uv.lock says), `highest` (the newest that the ranges allow), `lowest-direct` (the oldest
that the package itself allows of each thing it requires, held there: a floor that the other requirements do not let
be reached is an error, for nothing would test it). The environment has the package's wheel with all its extras,
its siblings' wheels (of what stands here, or with --index what is published), the dev group, and what its tests import
besides; not the workspace, so a sibling that it does not require is not there. `uv.lock` is not touched.

Stages: environment; with `locked` also lint and types; tests (those of the package, not marked slow); artefacts
(tools/artefacts.py); tree (git sees no file that was not there before). The first failure ends it. Minutes, most of
it torch.
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

from declared import DISTRIBUTIONS, declared, imported
from members import ROOT, Member, ToolError, chosen, read
from packaging.utils import canonicalize_name
from packaging.version import Version

__all__ = ["environment_commands", "floors", "needed_by_tests"]

RESOLUTIONS = ("locked", "lowest-direct", "highest")
NOT_PUBLIC = {"lt-trainer-neuron": {"neuron"}}
"""Extras that no public index can fill."""
LOCK_GROUPS = {"lt-trainer-neuron": ["--no-group", "gpu", "--group", "neuron"]}
"""The torch line of a package where it is not the default one."""
TORCH_LINE = {"lt-trainer-neuron": ["torch==2.9.*"]}
"""What torch-xla is built for and does not ask for; in the lock the group says it."""
TEST_TOOLS = {"pytest", "hypothesis", "moto", "packaging", "botocore", "boto3"}
"""What the dev group brings."""


def needed_by_tests(member: Member, members: dict[str, Member]) -> list[str]:
    """Distributions that a package's tests import and that neither the package nor the dev group brings."""
    return sorted(_imported_by(member.folder / "tests") - declared(member, members) - TEST_TOOLS - set(members))


@cache
def _imported_by(folder: Path) -> frozenset[str]:
    """Distributions that the modules of a folder import, but for each other and the standard library."""
    paths = sorted(folder.rglob("*.py"))
    own = {path.stem for path in paths} | set(sys.stdlib_module_names)
    named = {name for path in paths for name, _ in imported(path.read_text(encoding="utf-8"), filename=str(path))}
    return frozenset(canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in named - own)


def floors(member: Member, members: dict[str, Member], *, python: str) -> list[str]:
    """`name==version` of the oldest that the package allows of each thing from outside, its extras included.

    Args:
        member: The package.
        members: All of them.
        python: "3.13"; what is required of other Pythons alone does not count.

    Raises:
        ToolError: a requirement without a floor.
    """
    found: dict[str, Version] = {}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for extra, requirements in member.requirements.items():
        for r in requirements:
            if extra in NOT_PUBLIC.get(member.name, ()) or canonicalize_name(r.name) in members:
                continue
            if r.marker and not r.marker.evaluate(environment):
                continue
            stated = [Version(part.version) for part in r.specifier if part.operator == ">="]
            if not stated:
                raise ToolError(f"{member.name} requires {r}, which says no oldest version; write {r.name}>=VERSION")
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
    """The commands that make the environment in `out`/venv; nothing is run."""
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
        # Not --all-packages, which excludes the group neuron: the groups name all members with their extras.
        export = ["uv", "export", "--quiet", "--locked", "--no-emit-workspace", "--no-hashes"]
        commands.append([*export, *groups, "--format", "requirements.txt", "--output-file", lock])
        pins = ["--constraint", lock]
    extras = [part for e in member.extras if e not in NOT_PUBLIC.get(member.name, ()) for part in ("--extra", e)]
    wanted = ["--requirements", str(member.folder / "pyproject.toml"), *extras, "--no-sources"]
    wanted += ["--group", f"{ROOT / 'pyproject.toml'}:dev"]
    wheel = str(out / "wheels" / f"{member.module}-{member.version}-py3-none-any.whl")
    if resolution == "lowest-direct":
        pins = ["--constraint", str(out / "floors.txt")]
    direct = pins
    if resolution != "locked":
        direct = [*pins, "--resolution", resolution, *TORCH_LINE.get(member.name, [])]
    commands.append([*install, *direct, *wanted])
    commands.append([*install, "--no-deps", "--reinstall", wheel])
    if needed := needed_by_tests(member, members):
        commands.append([*install, *pins, *needed])
    return commands


def stages(member: Member, out: Path, *, python: str, resolution: str) -> dict[str, list[list[str]]]:
    """Commands by stage, without the environment; the tree is looked at by main."""
    programs = out / "venv" / "bin"
    interpreter, folder = str(programs / "python"), str(member.folder)
    checker = str(programs / "basedpyright")
    # "src" of the checkout is not on the path: what is imported must be what was installed.
    where = f"import {member.module} as m, sys; sys.exit(not m.__file__.startswith({str(out / 'venv')!r}))"
    tests = [interpreter, "-m", "pytest", "-q", "-m", "not slow", "--hypothesis-profile=ci", f"{folder}/tests"]
    found: dict[str, list[list[str]]] = {
        "lint": [
            [interpreter, "-m", "ruff", "check", folder],
            [interpreter, "-m", "ruff", "format", "--check", folder],
        ],
        "types": [[checker, "--level", "error", "--pythonpath", interpreter, "--project", str(out / "types.json")]],
        "tests": [[interpreter, "-c", where], tests],
        "artefacts": [
            [sys.executable, "tools/artefacts.py", member.name, "--python", python, "--out", str(out / "dist")]
        ],
    }
    return found if resolution == "locked" else {name: found[name] for name in ("tests", "artefacts")}


def types_settings(member: Member, *, root: Path = ROOT) -> dict[str, object]:
    """The workspace's settings for types, for one package whose own modules are those of the checkout.

    Without that the installed wheel would stand beside the sources, and its classes would be others.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["basedpyright"]
    sources = [str(member.folder / "src")]
    return {**settings, "include": sources, "extraPaths": sources}


def tree(root: Path = ROOT) -> str:
    """What git sees as changed or new."""
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
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for wheels and environments")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--resolution", choices=RESOLUTIONS, default="locked")
    parser.add_argument("--index", help="take siblings from this simple index, not from here")
    parser.add_argument("--only", action="append", default=[], help="only these stages, after the environment")
    options = parser.parse_args(arguments)
    members = read()
    member, out = chosen(members, options.package), options.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise ToolError(f"{out} is not empty; give an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / "types.json").write_text(json.dumps(types_settings(member)), encoding="utf-8")
    oldest = floors(member, members, python=options.python)
    (out / "floors.txt").write_text("\n".join(oldest) + "\n", encoding="utf-8")
    before = tree()
    found = stages(member, out, python=options.python, resolution=options.resolution)
    if unknown := set(options.only) - set(found):
        raise ToolError(
            f"no stage {', '.join(sorted(unknown))} with {options.resolution}; there are {', '.join(found)}"
        )
    chosen_python, resolution = options.python, options.resolution
    environment = environment_commands(
        member, members, python=chosen_python, resolution=resolution, out=out, index=options.index
    )
    for name, commands in {"environment": environment, **found}.items():
        if options.only and name not in ("environment", *options.only):
            continue
        print(f"--- {name}", flush=True)
        _run_all(commands)
    if (after := tree()) != before:
        raise ToolError(f"the tests left or changed files in the tree; before:\n{before}\nafter:\n{after}")
    print(f"--- {member.name} {member.version}: ok with Python {options.python}, {options.resolution}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"package: {exc}")
