"""Process with the null device that runs jobs in forked ranks; pickles over stdin and stdout, a job and its results.

Ranks are forked from a process that has loaded torch: loading it with CUDA's libraries takes seconds for each.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from null_device.ranks import Job, RankResult, train

MAX_RANKS = 8
TIMEOUT_S = 500


class NullDeviceServer:
    """Handle of the process; started by the first job.

    Args:
        environment: what `build` returned.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        self._environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the engine's spec asks
        paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: Job) -> list[RankResult]:
        """Return the results by rank; raises what a rank raised."""
        if self._process is None:
            command = [sys.executable, "-m", "null_device.server"]
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()
        try:
            found: Any = pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(f"the process with the null device ended with {self._process.wait()}") from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=30)


def main() -> None:
    """Run the jobs of stdin until it ends."""
    from lt_test_helpers.pool import RankPool

    pool = RankPool(MAX_RANKS, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print
    while True:
        try:
            job: Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found: Any = pool.run(train, job, ranks=job.ranks, timeout_s=TIMEOUT_S)
        except Exception as exc:  # noqa: BLE001 - process boundary: raised in the test
            found = exc
        pickle.dump(found, results)
        results.flush()


if __name__ == "__main__":
    main()
