"""Probe of one setting: `lt train bench` in processes of its own.

A setting that runs out of memory, is killed, hangs or is refused is a result like any other: nothing of it stays on the
device, since its processes are gone. Of the output of failed probes the last line of error is kept.

Cost: the start of a run, and its warmup and timed steps.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|RESOURCE_EXHAUSTED", re.I)
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: *)?(?:error: |[\w.]*(?:Error|Exception)\b).*$", re.M)

SHUTDOWN_S = 5
"""Seconds between torchrun's SIGTERM and SIGKILL to its ranks."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        step_s: seconds of a step; None if the setting does not work.
        tokens_per_s: tokens of the global batch over `step_s`.
        peak_bytes: peak memory of the fullest rank's device, as `lt train bench` reports it.
        message: why the setting does not work.
    """

    step_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    message: str = ""


def run_probe(
    arguments: Sequence[str], sets: Sequence[str], *, ranks: int = 1, timeout_s: float = 600.0
) -> ProbeResult:
    """Run `lt train bench` to its end; an exception ends its processes.

    Args:
        arguments: RUN.toml and options.
        sets: values of `--set` after those among the options.
        ranks: ranks, on this machine.
        timeout_s: time after which the probe is ended.
    """
    command, environ = [sys.executable, "-P", "-u", "-m", "lt_trainer", "bench", *arguments], dict(os.environ)
    command += [word for text in sets for word in ("--set", text)]
    if ranks > 1:
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(ranks), "--no-python", *command]
        environ.setdefault("OMP_NUM_THREADS", "1")
        environ |= dict.fromkeys(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"), str(SHUTDOWN_S))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, env=environ, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return ProbeResult(message=f"not finished after {timeout_s:g} s")
        finally:
            _end(process, ranks)
    return parse_probe(process.returncode, out, err)


def _end(process: subprocess.Popen[str], ranks: int) -> None:
    """End a probe's processes; the ranks of torchrun have sessions of their own, so it has to end them."""
    if ranks > 1 and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2 * SHUTDOWN_S + 10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def parse_probe(code: int, out: str, err: str) -> ProbeResult:
    """Return the result of a probe that ended with an exit code and this output."""
    if code == 0:
        report = json.loads(out[out.index("{") :])
        if not report["all_finite"]:
            return ProbeResult(message="loss or gradient norm is not finite")
        peak = int(report["memory"]["peak_bytes"])
        return ProbeResult(step_s=report["step_s"], tokens_per_s=report["tokens_per_s"], peak_bytes=peak)
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "SIGKILL" in err:
        return ProbeResult(message="killed, as systems do when memory runs out")
    errors = ERROR_LINE.findall(err)
    message = errors[-1].strip() if errors else f"exit code {code}"
    return ProbeResult(message=f"out of memory: {message}" if OUT_OF_MEMORY.search(err) else message)
