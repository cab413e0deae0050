"""Processes of gpu.py and gpus.py: a time budget, and commands with a timeout that leave nothing running.

A command that hangs is interrupted, so that pytest still writes its report, then killed with its process group.
torchrun is asked to end instead: its ranks have sessions of their own, which only it knows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_trainer.tuning.probe import OUT_OF_MEMORY

ROOT = Path(__file__).resolve().parents[2]
RESERVE_S = 5.0
INTERRUPT_S, KILL_S = 15.0, 30.0
"""Seconds that an interrupted command has until it is killed, and a killed one until it is left."""
TORCHRUN_SHUTDOWN_S = 5
"""Seconds between torchrun's SIGTERM and SIGKILL to its ranks."""
OUTPUT_CHARACTERS, KEPT_CHARACTERS = 200_000, 3000


class Budget:
    """Remaining time of a run."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s

    def remaining_s(self) -> float:
        """Return the remaining seconds, less the time to write the report."""
        return max(0.0, self._end - time.monotonic() - RESERVE_S)


def log(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def exit_on_sigterm() -> None:
    """Make SIGTERM an exception, so that it ends the running command too."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def run_with_timeout(
    command: list[str], limit_s: float, env: dict[str, str] | None = None, *, is_torchrun: bool = False
) -> tuple[int | None, str]:
    """Run a command; return its exit code, or None after a timeout, and the end of its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (env or {}), stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code: int | None = process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            terminate(process, is_torchrun=is_torchrun)
        output.seek(0)
        return code, output.read().decode(errors="replace")[-OUTPUT_CHARACTERS:]


def terminate(process: subprocess.Popen[bytes], *, is_torchrun: bool = False) -> None:
    """End a process and its group; does nothing if they have ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if is_torchrun:
                process.terminate()
            else:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=INTERRUPT_S + is_torchrun * TORCHRUN_SHUTDOWN_S)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=KILL_S)


def run_for_result(
    command: list[str],
    spec: dict[str, Any],
    folder: Path,
    limit_s: float,
    env: dict[str, str] | None = None,
    *,
    is_torchrun: bool = False,
) -> dict[str, Any]:
    """Run a command that reads spec.json and writes result.json in `folder`, its last argument.

    A crash, too little memory or a timeout is a result too.
    """
    result, begin = folder / "result.json", time.monotonic()
    (folder / "spec.json").write_text(json.dumps(spec | {"limit_s": limit_s}))
    code, output = run_with_timeout([*command, str(folder)], limit_s, env, is_torchrun=is_torchrun)
    seconds = {"seconds": time.monotonic() - begin}
    if code == 0 and result.exists():
        return json.loads(result.read_text()) | seconds
    ended = "out_of_memory" if OUT_OF_MEMORY.search(output) else "crashed"
    status = "timed_out" if code is None else ended
    log(f"{status}, exit code {code}: {' '.join(command)}\n{output[-KEPT_CHARACTERS:]}")
    return {"status": status, "exit_code": code, "output_end": output[-KEPT_CHARACTERS:]} | seconds


def torchrun_command(ranks: int, arguments: list[str]) -> list[str]:
    """Return the command line of torchrun on this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]


def torchrun_environment() -> dict[str, str]:
    """Return the environment of torchrun: it ends its ranks soon; each uses one thread."""
    shutdown = dict.fromkeys(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"), str(TORCHRUN_SHUTDOWN_S))
    return shutdown | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
