"""All checks of a commit: lint, format, types, layers, tests. Run as `uv run python tools/check.py`.

Each stage is a command of its own; its wall time is printed. The first failure ends the run with its exit code.
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
        "4",  # on two cores: tests wait more than half of the time for processes that they start
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--durations=30",  # the tests to shorten first
        "--hypothesis-profile=ci",  # fixed examples; tools/slow.py and plain pytest search for new ones
    ],
}

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
"""Tests run in parallel, so each process uses one thread; and each of the hundreds of processes that they start would
compile torch's sources anew, 3 s of a run's 6, where the machine's image forbids to keep the compiled ones.
"""


def main(pytest_arguments: list[str]) -> int:
    """Run every stage and return the exit code of the first that fails, else 0."""
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
