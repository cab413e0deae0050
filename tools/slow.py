"""Everything marked slow: full counts that the test command leaves out. Run as `uv run python tools/slow.py`.

One test after the other, with what they print as they go: most of them start several ranks at a time, which two tests
side by side would only slow down. Arguments are passed on to pytest, so `tools/slow.py tests/test_kill.py` narrows it.
LT_KILLS and LT_SEED choose how many kills `tests/test_kill.py` and lt-ckpt's own count, and which; LT_FUZZ how many
changes of files lt-ckpt's `test_hostile.py` makes per format.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow", "--durations=0", "--durations-min=1"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""As in tools/check.py: ranks run side by side."""
NO_TESTS = 5
"""Pytest's exit code when nothing was selected."""


def main(pytest_arguments: list[str]) -> int:
    """Run the slow tests; returns pytest's exit code, 0 also where no test is slow."""
    command = [*COMMAND, *pytest_arguments]
    print(f"--- slow: {' '.join(command[1:])}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode
    words = {0: "ok", NO_TESTS: "nothing is marked slow there"}.get(code, f"failed with {code}")
    print(f"--- slow: {words} in {time.monotonic() - start:.0f} s", flush=True)
    return 0 if code == NO_TESTS else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
