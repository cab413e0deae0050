"""Scripts on torch-xla's CPU device, and their runs as forks of one process.

The forks are made when all is imported and before torch-xla has a device, since counters and device are a process's:
importing takes far more CPU time than what a run computes.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_on_xla(*arguments: str | Path) -> str:
    """Run this interpreter with arguments; return its output."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_worker(script: Path, folder: Path, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Run a script that calls `run_forks`; return what each run found, by name."""
    run_on_xla(script, folder, json.dumps(runs))
    return {run["name"]: json.loads((folder / f"{run['name']}.json").read_text()) for run in runs}


def run_forks(function: Callable[..., Any]) -> None:
    """Call `function` with the fields of each run of `run_worker`, in a fork; exit when all have ended."""
    folder = Path(sys.argv[1])
    running = [_fork(function, folder, run) for run in json.loads(sys.argv[2])]
    codes = [os.waitpid(child, 0)[1] for child in running]  # all are waited for
    sys.exit(any(codes))


def _fork(function: Callable[..., Any], folder: Path, run: Mapping[str, Any]) -> int:
    """Return the process id of a new run."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        (folder / f"{run['name']}.json").write_text(json.dumps(function(**run)))
        code = 0
    except BaseException as error:  # noqa: BLE001 - a fork must not go on as if it were the program
        error.add_note(f"in the run {run['name']}")
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
