"""Benchmark of parallel layouts on the GPUs of one machine: equal to one GPU, then how fast.

    python tools/bench/gpus.py --out gpus.json                      # at most 8 minutes; again until it exits with 0
    python tools/bench/gpus.py --out gpus.json --limit-s 14400      # all of it at once
    python tools/bench/gpus.py --out gpus.json --stage float32      # one stage (repeatable)
    python tools/bench/gpus.py --device cpu --gpus 2 --quick        # the same path over gloo

The stages `float32`, `float64` and `bfloat16` train a small model eagerly in every layout that the number of GPUs
allows, and compare losses, gradient norms, gradients and weights with one GPU. The stages `speed-1b` and `speed-8b`
measure the layouts with `lt train bench`: tokens/s of a GPU, MFU, peak memory of the fullest rank.

Every layout is a torchrun of its own, with NCCL; one that hangs is ended after its time. The JSON is written after
every result. A run starts nothing that the rest of its time may not suffice for; it exits with 3 while something
remains, and the same command goes on. Exit code 1: a layout differs from one GPU, or did not run. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu_processes import (
    Budget,
    exit_on_sigterm,
    log,
    run_for_result,
    torchrun_command,
    torchrun_environment,
)
from gpu_report import REMAINS_EXIT_CODE, Report, Task, describe_machine, limit_of_tries, run_tasks, software_versions
from gpus_compare import compare_layout
from gpus_layouts import (
    LAYOUTS,
    QUICK_SPEED_CASES,
    SPEED_CASES,
    TOLERANCES,
    Layout,
    SpeedCase,
    layout_spec,
    reference_of,
    speed_layouts,
    speed_tries,
)

FOLDER = Path(__file__).resolve().parent
LAYOUT_S, FACTS_S = 120.0, 60.0
SPEED_PREFIX = "speed-"
METHODS = {
    "errors": "largest relative differences from one GPU in the same dtype: loss and grad_norm of every step, and the "
    "validation loss; gradient: of every parameter's first moment after the first step, max|a - b| / max|b|; weights: "
    "of every parameter after the last step, ||a - b|| / ||b||; all compared in float64",
    "equal": "all errors are at most their tolerance, and the initial weights have the same bits",
    "speed": "rows of lt train bench, defined in their `how`; memory.peak_bytes is that of the fullest rank",
    "tokens_per_s_per_device": "tokens of the global batch over the time of a step and the number of GPUs",
    "fsdp-1, -2, ...": "the same rows for each GPU, so that tokens_per_s_per_device shows how FSDP scales",
    "attempts": "sizes that did not fit; those that do not by lt train plan are not tried",
    "nccl_environment": "variables NCCL_* and TORCH_NCCL_* of this run",
}


class Launcher:
    """Runs layouts under torchrun, and keeps those of one device for the comparisons of this run."""

    def __init__(self, folder: Path, device: str, *, quick: bool) -> None:
        self._folder, self._device, self._quick = folder, device, quick
        self._references: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def run(self, spec: dict[str, Any], ranks: int, limit_s: float) -> tuple[Path, dict[str, Any]]:
        """Run `gpus_worker.py` on that many ranks; return its folder and result."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        command = torchrun_command(ranks, [str(FOLDER / "gpus_worker.py")])
        return folder, run_for_result(command, spec, folder, limit_s, torchrun_environment(), is_torchrun=True)

    def compare(self, layout: Layout, dtype: str, limit_s: float) -> dict[str, Any]:
        """Train a layout and one device; return how far they are apart."""
        begin, reference = time.monotonic(), reference_of(layout)
        key = (dtype, *reference.sets)
        if key not in self._references:
            spec = layout_spec(reference, dtype, self._device, quick=self._quick)
            self._references[key] = self.run(spec, 1, limit_s / 2)
        one_folder, one = self._references[key]
        head = {"ranks": layout.ranks, "sets": list(layout.sets)}
        if one["status"] != "ok":
            return head | {"status": "crashed", "reason": "one device failed", "one": one}
        spec = layout_spec(layout, dtype, self._device, quick=self._quick)
        folder, found = self.run(spec, layout.ranks, limit_s - (time.monotonic() - begin))
        if found["status"] == "ok":
            found |= compare_layout(found, folder, layout.ranks, one, one_folder, TOLERANCES[dtype])
            found["one"] = {name: one[name] for name in ("losses", "grad_norms", "validation_loss")}
        shutil.rmtree(folder)
        return head | found

    def measure(
        self, case: SpeedCase, layout: Layout, tries: list[list[str]], steps: tuple[int, int], limit_s: float
    ) -> dict[str, Any]:
        """Measure a layout at the first size that fits."""
        begin, attempts = time.monotonic(), []
        head = {"ranks": layout.ranks, "preset": case.preset, "attempts": attempts}
        for sets in tries:
            left_s = limit_s - (time.monotonic() - begin)
            if attempts and left_s < case.limit_s / 2:
                return head | {"status": "timed_out"}
            log(f"  {' '.join(sets)}")
            spec = {"kind": "speed", "preset": case.preset, "sets": sets, "warmup": steps[0], "steps": steps[1]}
            folder, found = self.run(spec, layout.ranks, min(left_s, case.limit_s))
            shutil.rmtree(folder)
            found = {"sets": sets} | found
            if found["status"] != "out_of_memory":
                return head | found
            attempts.append(found)
        return head | {"status": "out_of_memory"}


def list_tasks(arguments: argparse.Namespace, launcher: Launcher, devices: int, memory_bytes: int | None) -> list[Task]:
    """Return the tasks of all stages on that many devices."""
    tasks = [
        Task(
            stage=dtype,
            name=layout.name,
            limit_s=LAYOUT_S,
            run=partial(launcher.compare, layout, dtype),
        )
        for dtype in TOLERANCES
        for layout in LAYOUTS
        if layout.ranks <= devices
    ]
    steps = (1, 2) if arguments.quick else (4, 10)
    for name, case in (QUICK_SPEED_CASES if arguments.quick else SPEED_CASES).items():
        for layout in speed_layouts(devices):
            tries = speed_tries(case, layout, arguments.device, memory_bytes)
            limit_s = limit_of_tries(case.limit_s, len(tries), arguments.limit_s)
            run = partial(launcher.measure, case, layout, tries, steps)
            tasks.append(Task(stage=SPEED_PREFIX + name, name=layout.name, limit_s=limit_s, run=run))
    return tasks


def read_machine(device: str, folder: Path) -> dict[str, Any]:
    """Return the facts of gpu.py's machine, the links between its GPUs and the settings of NCCL."""
    command = [sys.executable, str(FOLDER / "gpu.py"), "--child", "facts"]
    found = run_for_result(command, {"device": device}, folder, FACTS_S)
    if found["status"] != "ok":
        raise SystemExit(found.get("output_end") or "no facts of the device in time")
    topology = ""
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=60)
        topology = done.stdout
    environment = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    return found | {"topology": topology, "nccl_environment": environment}


def is_failure(row: dict[str, Any]) -> bool:
    """Return whether a layout differs from one device, or did not run; a model that does not fit is a result."""
    return row["status"] not in ("ok", "out_of_memory") or row.get("equal") is False


def format_report(report: Report) -> str:
    """Format the results for display."""
    lines = [describe_machine(report.content["machine"])]
    for row in report.rows:
        text = f"{row['stage']}: {row['case']}, {row['ranks']} ranks: {row['status']}"
        if "equal" in row:
            errors = ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
            text += f", {'equal' if row['equal'] else 'DIFFERENT'}: {errors}"
        if "tokens_per_s_per_device" in row:
            text += f", {row['tokens_per_s_per_device']:.0f} tokens/s per GPU, MFU {row['mfu']['full']:.1%}"
            text += f", memory {row['memory']['peak_bytes'] / 2**30:.1f} GiB"
            if row["memory"]["planned_bytes"]:
                text += f", planned {row['memory']['planned_bytes'] / 2**30:.1f}"
        lines.append(text)
    compared = [row for row in report.rows if "equal" in row]
    lines.append(f"{sum(row['equal'] for row in compared)} of {len(compared)} compared layouts equal one GPU")
    return "\n".join(lines)


def run_benchmark(arguments: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Run what remains of the chosen stages; return the report, and the names of what still remains."""
    budget = Budget(arguments.limit_s)
    machine = read_machine(arguments.device, folder)
    devices = arguments.gpus or (machine["devices"] if arguments.device == "cuda" else 2)
    if arguments.device == "cuda" and devices > machine["devices"]:
        raise SystemExit(f"--gpus {devices}: this machine has {machine['devices']}")
    head = {
        "benchmark": "gpus",
        "versions": software_versions(arguments.commit),
        "options": {"device": arguments.device, "quick": arguments.quick},
        "how": METHODS,
    }
    report = Report(arguments.out, head, machine | {"devices": devices})
    if arguments.retry:
        report.forget_failures()
    launcher = Launcher(folder, arguments.device, quick=arguments.quick)
    tasks = list_tasks(arguments, launcher, devices, machine.get("memory_bytes"))
    chosen = [
        task
        for task in tasks
        if (not arguments.stage or task.stage in arguments.stage)
        and (not arguments.layout or task.name in arguments.layout)
    ]
    remaining = run_tasks(report, chosen, budget)
    report.content["complete"] = all(report.find(task.stage, task.name) for task in tasks)
    report.write()
    return report, remaining


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, written after every result and continued")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use: 2, 4 or 8; default all of this machine")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds of this run, at least 480 for all stages")
    names = [*TOLERANCES, *(SPEED_PREFIX + name for name in (*SPEED_CASES, *QUICK_SPEED_CASES))]
    parser.add_argument("--stage", action="append", default=[], choices=names, help="only this stage; repeatable")
    parser.add_argument("--layout", action="append", default=[], help="only this layout; repeatable")
    parser.add_argument("--retry", action="store_true", help="run crashes and timeouts of earlier runs again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models: tries the script itself")
    parser.add_argument("--commit", help="commit to note where there is no git")
    arguments = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lt-bench-") as folder:
        report, remaining = run_benchmark(arguments, Path(folder))
    log(format_report(report))
    print(json.dumps(report.content))
    if remaining:
        log(f"{len(remaining)} results remain: run the same command again")
        raise SystemExit(REMAINS_EXIT_CODE)
    if any(is_failure(row) for row in report.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
