"""Tests with the older versions of torch that the packages allow, each in an environment of its own.

    python tools/older_torch.py OUT                          # all versions, one after the other
    python tools/older_torch.py OUT --torch 2.11             # only this version
    python tools/older_torch.py OUT --torch 2.14 -- -x       # what follows -- goes to pytest

    2.9     Trainium's version, the oldest of all packages but lt-trainer-gpu
    2.11    the oldest of lt-trainer-gpu
    2.14    compiled models only: its place in `lt_trainer_gpu.checks.COMPILE_TORCH_VERSIONS`

2.11 runs the compiled models too. The newest torch is the lock's, which tools/check.py and tools/slow.py test.

An environment is that of the lock with torch and its libraries replaced, in OUT/TORCH. It is kept, so that a second run
only tests. 2.9 is the lock's own group `neuron`. Packages are installed from this checkout.

Part of the slow set, not of CI: about 15 GB and an hour on two cores. In CI, `tools/check_package.py --resolution
lowest-direct` runs each package's default tests with the oldest versions of everything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from members import ROOT, Member, ToolError, read_members


@dataclass(frozen=True, kw_only=True)
class OlderTorch:
    """An older version of torch and what is tested with it.

    Attributes:
        packages: their default tests.
        compiled: packages whose tests of compiled models run, those marked slow among them.
        sync: options of `uv sync` that choose the version from the lock; without any, torch is replaced.
    """

    packages: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    sync: tuple[str, ...] = ()


COMPILING = ("lt-model", "lt-trainer-gpu")
VERSIONS: Mapping[str, OlderTorch] = {
    "2.9": OlderTorch(
        packages=("lt-data", "lt-model", "lt-ckpt", "lt-trainer", "lt-trainer-neuron"),
        sync=("--no-group", "gpu", "--group", "neuron"),
    ),
    "2.11": OlderTorch(packages=("lt-model", "lt-trainer", "lt-trainer-gpu"), compiled=COMPILING),
    "2.14": OlderTorch(compiled=COMPILING),
}
BASES = ("lt-data", "lt-ckpt")
"""Packages that mostly need no torch: only their test files that name it run."""


def find_torch_tests(member: Member) -> list[str]:
    """Return what pytest is given of a package's tests: the folder, or of `BASES` the files that name torch."""
    folder = member.folder / "tests"
    if member.name not in BASES:
        return [str(folder)]
    paths = sorted(folder.rglob("test_*.py"))
    return [str(path) for path in paths if re.search(r"\btorch\b", path.read_text(encoding="utf-8"))]


def environment_commands(torch: str, python: str) -> list[list[str]]:
    """Return the commands that make the environment that UV_PROJECT_ENVIRONMENT names; nothing is run."""
    version = VERSIONS[torch]
    commands = [["uv", "sync", "--quiet", "--locked", "--python", python, *version.sync]]
    if not version.sync:
        commands.append(["uv", "pip", "install", "--quiet", f"torch=={torch}.*"])
    return commands


def pytest_commands(torch: str, members: Mapping[str, Member], environment: Path) -> list[list[str]]:
    """Return the commands that test with this version, in its environment."""
    pytest = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "--hypothesis-profile=ci", "--durations=5"]
    version = VERSIONS[torch]
    found = [[*pytest, "-m", "not slow", *find_torch_tests(members[name])] for name in version.packages]
    return found + [[*pytest, "-k", "compil", str(members[name].folder / "tests")] for name in version.compiled]


def main(arguments: list[str]) -> int:
    """Make the environments and run the tests; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the environments; kept")
    parser.add_argument("--torch", action="append", choices=list(VERSIONS), help="only this version; may be repeated")
    parser.add_argument("--python", default=sys.executable, help="interpreter, at most 3.12 for torch-xla 2.9")
    parser.usage = "%(prog)s OUT [--torch VERSION] [--python PYTHON] [-- PYTEST...]"
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, for_pytest = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    members, failed = read_members(), []
    for torch in options.torch or VERSIONS:
        environment = options.out.resolve() / torch
        variables = os.environ | {"OMP_NUM_THREADS": "1", "UV_PROJECT_ENVIRONMENT": str(environment)}
        variables["VIRTUAL_ENV"] = str(environment)  # where uv pip installs
        for command in environment_commands(torch, options.python):
            if subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode:
                raise ToolError(f"{' '.join(command)}: failed; the environment is {environment}")
        for command in pytest_commands(torch, members, environment):
            line = " ".join([*command[1:], *for_pytest])
            start = time.monotonic()
            print(f"--- torch {torch}: {line}", flush=True)
            code = subprocess.run([*command, *for_pytest], cwd=ROOT, env=variables, check=False).returncode
            print(f"--- torch {torch}: exit code {code} in {time.monotonic() - start:.0f} s", flush=True)
            failed += [f"torch {torch}: {line}"] if code else []
    print("\n".join(["--- failed:", *failed]) if failed else "--- ok")
    return bool(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"older_torch: {exc}")
