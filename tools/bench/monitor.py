"""Cost of observing a run: CPU time of the node's monitor, of a record to each sink, and of a stopwatch lap.

    uv run python tools/bench/monitor.py [--samples N] [--json FILE]

CPU seconds of the calling thread (`time.thread_time`), so other load on the machine matters little; the median of N
calls. The share is that of one core at the default interval of 10 s, without GPUs; with NVIDIA's driver their samples
are measured separately.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lt_trainer.config.sections.metrics import MetricsOptions
from lt_trainer.observability.monitor.host import HostSampler
from lt_trainer.observability.monitor.nvml import GpuSampler, GpusUnavailableError, load_nvml
from lt_trainer.observability.sinks import open_sinks
from lt_trainer.timing import STEP_PARTS, HostStopwatch

RECORD = dict.fromkeys(("loss", "learning_rate", "grad_norm", "tokens_per_sec", "mfu", "hfu", "memory_gib"), 1.5)


def median_us(call: Callable[[int], object], times: int) -> float:
    found = []
    for index in range(times):
        start = time.thread_time()
        call(index)
        found.append(time.thread_time() - start)
    return statistics.median(found) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    interval = MetricsOptions.monitor_interval_s
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in (1, 8):
            host = HostSampler(folder)
            pids = dict.fromkeys(range(ranks), os.getpid())
            found[f"sample of the host, {ranks} rank(s), us"] = median_us(
                lambda _, h=host, p=pids: h.sample(p), arguments.samples
            )
        try:
            gpus = GpuSampler(load_nvml(), count=1, environ=os.environ)
            found["sample of one GPU, us"] = median_us(lambda _: gpus.sample(0), arguments.samples)
        except GpusUnavailableError as exc:
            print(f"# GPUs are left out: {exc}")
        sinks, _ = open_sinks(("tensorboard",), folder, recipe={}, step=0)
        record = RECORD | {f"{part}_s": 1.0 for part in STEP_PARTS}
        found["record to TensorBoard, us"] = median_us(
            lambda i: sinks.log({"step": i + 1, **record}), arguments.samples
        )
        sinks.close()
        stopwatch = HostStopwatch()
        found["lap on the host, us"] = median_us(lambda _: [stopwatch.begin("data") for _ in range(100)], 100) / 100
    share = found["sample of the host, 8 rank(s), us"] / 1e6 / interval
    result = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "samples": arguments.samples,
        "interval_s": interval,
        "share_of_one_core_with_8_ranks": share,
        **found,
    }
    for key, value in found.items():
        print(f"{key:<42} {value:10.1f}")
    print(f"share of one core, 8 ranks, every {interval:g} s: {share:.4%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
