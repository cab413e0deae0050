"""Probe of one setting: `lt train bench` in processes of its own.

A setting that runs out of memory, is killed, hangs or is refused is a result like any other: nothing of it stays on the
device, since its processes are gone. Output of failed probes is kept to their last line of error.

Cost: the start of a run, and its warmup and timed steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lt_trainer.constants import EXIT_USER
from lt_trainer.tuning.search import TunedSetting

OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|RESOURCE_EXHAUSTED", re.I)
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: *)?(?:error: |[\w.]*(?:Error|Exception)\b).*$", re.M)

SHUTDOWN_S = 5
"""Seconds between torchrun's SIGTERM and SIGKILL to its ranks."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        setting: what was tried.
        outcome: "ok", or why there is no time: out_of_memory, killed, timed_out, refused, failed.
        step_s: seconds of a step; None unless ok.
        tokens_per_s: tokens of the global batch over `step_s`.
        peak_bytes: peak memory of the fullest rank's device, as `lt train bench` reports it.
        message: error of a probe that is not ok.
    """

    setting: TunedSetting
    outcome: str
    step_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Command line of probes; `arguments` are RUN.toml and the options before those of the setting."""

    arguments: Sequence[str]
    ranks: int = 1
    timeout_s: float = 600.0

    def run(self, setting: TunedSetting) -> ProbeResult:
        """Run a probe to its end; an exception ends its processes."""
        command, environ = [sys.executable, "-P", "-u", "-m", "lt_trainer", "bench", *self.arguments], dict(os.environ)
        command += [word for text in setting.to_set_options() for word in ("--set", text)]
        if self.ranks > 1:
            torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node", str(self.ranks), "--no-python", *command]
            environ.setdefault("OMP_NUM_THREADS", "1")
            environ |= dict.fromkeys(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"), str(SHUTDOWN_S))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, env=environ, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                message = f"not finished after {self.timeout_s:g} s"
                return ProbeResult(setting=setting, outcome="timed_out", message=message)
            finally:
                _end(process, self.ranks)
        return parse_probe(setting, process.returncode, out, err)


def _end(process: subprocess.Popen[str], ranks: int) -> None:
    """End a probe's processes; the ranks of torchrun have sessions of their own, so it has to end them."""
    if ranks > 1 and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2 * SHUTDOWN_S + 10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def parse_probe(setting: TunedSetting, code: int, out: str, err: str) -> ProbeResult:
    """Return the result of a probe that ended with an exit code and this output."""
    if code == 0:
        report = json.loads(out[out.index("{") :])
        if not report["all_finite"]:
            return ProbeResult(setting=setting, outcome="failed", message="loss or gradient norm is not finite")
        return ProbeResult(
            setting=setting,
            outcome="ok",
            step_s=report["step_s"],
            tokens_per_s=report["tokens_per_s"],
            peak_bytes=int(report["memory"]["peak_bytes"]),
        )
    errors = ERROR_LINE.findall(err)
    message = errors[-1].strip() if errors else f"exit code {code}"
    if OUT_OF_MEMORY.search(err):
        return ProbeResult(setting=setting, outcome="out_of_memory", message=message)
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "SIGKILL" in err:  # the system's answer to too little memory
        return ProbeResult(setting=setting, outcome="killed", message="killed, as systems do when memory runs out")
    return ProbeResult(setting=setting, outcome="refused" if code == EXIT_USER else "failed", message=message)
