"""Duration of the quickstart by stage, and of a training command up to its first step.

    uv run python tools/bench/quickstart.py [--steps N]

Runs one new quickstart in a temporary folder and reads its summary.json. Then, five times and alternating: a process
that imports torch, and a training process of one step. The difference of the medians is the time of lt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import describe_machine, format_table

REPEATS = 5


def time_command(command: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of a command."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu


def measure_first_step(quickstart: Path) -> dict[str, tuple[float, float]]:
    """Return median wall and CPU seconds of `import torch` and of a training command of one step, alternating."""
    times: dict[str, list[tuple[float, float]]] = {"import torch": [], "lt train run, one step": []}
    for i in range(REPEATS):
        options = (f"run.dir={quickstart / f'bench-{i}'}", "schedule.max_steps=1", "schedule.warmup_steps=1")
        sets = [word for one in (*options, "data.validation=") for word in ("--set", one)]
        train = [sys.executable, "-m", "lt_trainer", "run", str(quickstart / "run.toml"), *sets]
        for rows, command in zip(times.values(), ([sys.executable, "-c", "import torch"], train), strict=True):
            rows.append(time_command(command))
    walls, cpus = ({name: [row[i] for row in rows] for name, rows in times.items()} for i in range(2))
    return {name: (statistics.median(walls[name]), statistics.median(cpus[name])) for name in times}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the quickstart")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compile modules once, as for users
    print(describe_machine("torch", "numpy", "tokenizers", "transformers", "lt-trainer"))
    with tempfile.TemporaryDirectory() as folder:
        quickstart = Path(folder) / "quickstart"
        lt = str(Path(sys.executable).parent / "lt")
        subprocess.run([lt, "quickstart", "--out", str(quickstart), "--steps", str(arguments.steps)], check=True)
        summary = json.loads((quickstart / "summary.json").read_text())
        start = measure_first_step(quickstart)
    stages = [[name, f"{value:.1f}"] for name, value in summary["seconds"].items()]
    starts = [[name, f"{wall:.2f}", f"{cpu:.2f}"] for name, (wall, cpu) in start.items()]
    print("", *format_table(["stage", "s"], stages), "", sep="\n")
    print(f"Training: {summary['steps']} steps, {summary['tokens_per_sec']:.0f} tokens/s at the end; validation loss")
    print(f"{summary['val_loss']:.4f} nats per token.")
    print("", *format_table(["start", "wall s", "CPU s"], starts), sep="\n")


if __name__ == "__main__":
    main()
