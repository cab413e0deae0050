"""Runner of the tests marked slow, which the test command leaves out: `uv run python tools/slow.py`.

Tests run one after another and print their output: most of them start several ranks, which parallel tests would only
slow down. Arguments are passed on to pytest, so `tools/slow.py tests/test_kill.py` narrows it. LT_KILLS and LT_SEED set
number and choice of the kills in `tests/test_kill.py`, lt-data's and lt-ckpt's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow", "--durations=0", "--durations-min=1"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
"""One thread per process, as in tools/check.py."""
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""


def main(pytest_arguments: list[str]) -> int:
    """Run the slow tests; return pytest's exit code, or 0 if none was selected."""
    command = [*COMMAND, *pytest_arguments]
    print(f"--- slow: {' '.join(command[1:])}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode
    words = {0: "ok", NO_TESTS: "no test is marked slow there"}.get(code, f"failed with {code}")
    print(f"--- slow: {words} in {time.monotonic() - start:.0f} s", flush=True)
    return 0 if code == NO_TESTS else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
