"""Everything that must hold for a commit: lint, format, types, layers, tests. Run as `uv run python tools/check.py`.

Each stage is a command that can be run alone; its wall time is printed. The first failure ends the run with its code.
Arguments are passed on to pytest, so `tools/check.py packages/lt-data` narrows only the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest"]
STAGES: dict[str, list[str]] = {
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "types": [sys.executable, "-m", "basedpyright", "--level", "error"],
    "layers": [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
    "tests": [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-n",
        "3",  # on two cores: half of the time tests wait for processes that they have started
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--durations=30",  # what to look at when the whole grows too long
        "--hypothesis-profile=ci",  # the same examples each time; tools/slow.py and plain pytest look for new ones
    ],
}

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""Tests run side by side; a process that took all cores for itself would only wait for the others."""


def main(pytest_arguments: list[str]) -> int:
    """Run every stage; returns the exit code of the first that fails."""
    for name, command in STAGES.items():
        if name == "tests":
            command = [*command, *pytest_arguments]
        print(f"--- {name}: {' '.join(command[1:] if command[0] == sys.executable else command)}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode
        print(
            f"--- {name}: {'ok' if code == 0 else f'failed with {code}'} in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
