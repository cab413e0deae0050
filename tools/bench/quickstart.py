"""Duration of the quickstart by stage, and of a training command up to its first step.

    uv run python tools/bench/quickstart.py [--out docs/benchmarks/quickstart.md] [--steps N]

Runs one new quickstart in a temporary folder and reads its summary.json. Then, five times and alternating: a process
with only the imports of training, and a training process until its first step is printed. The difference of the medians
is the time of lt between imports and first step; nothing is compiled in it.
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
from typing import Any

from results import describe_machine

REPEATS = 5
IMPORT_STATEMENT = (
    "import lt_trainer.training.loop, lt_trainer_gpu.engine, lt_data.streaming.stream, lt_ckpt.save, torch._dynamo"
)
"""Imports of a training process; torch.optim imports torch._dynamo, which takes as long as torch itself."""


def time_command(command: list[str], *, until: str = "") -> tuple[float, float]:
    """Return wall seconds until a line that starts with `until` (or the end), and total CPU seconds."""
    before = os.times()
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        elapsed = None
        for line in process.stdout:
            if until and line.startswith(until) and elapsed is None:
                elapsed = time.perf_counter() - start
        code = process.wait()
    assert code == 0, f"{command} ended with {code}"
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start if elapsed is None else elapsed, cpu


def measure_first_step(quickstart: Path) -> dict[str, float]:
    """Return medians of imports alone and of a training command up to its first step, alternating."""
    imports, steps, cpu = [], [], []
    for i in range(REPEATS):
        imports.append(time_command([sys.executable, "-c", IMPORT_STATEMENT])[0])
        command = [sys.executable, "-m", "lt_trainer", "run", str(quickstart / "run.toml")]
        options = {
            "run.dir": quickstart / f"bench-{i}",
            "schedule.max_steps": 1,
            "schedule.warmup_steps": 1,
            "data.validation": "",
        }
        sets = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        wall, used = time_command([*command, *sets], until="step=1 ")
        steps.append(wall)
        cpu.append(used)
    found = {"imports_s": statistics.median(imports), "command_to_first_step_s": statistics.median(steps)}
    return found | {
        "first_step_after_imports_s": found["command_to_first_step_s"] - found["imports_s"],
        "one_step_command_cpu_s": statistics.median(cpu),
    }


def render_page(facts: str, summary: dict[str, Any], start: dict[str, float]) -> str:
    """Return the page as Markdown."""
    stages = "\n".join(f"| {name} | {value:.1f} |" for name, value in summary["seconds"].items())
    start_rows = "\n".join(f"| {name} | {value:.2f} |" for name, value in start.items())
    return f"""# Quickstart

Measured by `uv run python tools/bench/quickstart.py`. Wall seconds, one run; starts: median of {REPEATS}, interleaved.

{facts}

| stage | s |
|---|---|
{stages}

Training: {summary["steps"]} steps, {summary["tokens_per_sec"]:.0f} tokens/s at the end; validation loss
{summary["val_loss"]:.4f} nats per token.

| start of a training command | s |
|---|---|
{start_rows}

"""


def main() -> None:
    """Measure, print the page and optionally write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the page here")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the quickstart")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compile modules once, as for users
    facts = describe_machine("torch", "numpy", "tokenizers", "transformers", "lt-trainer")
    with tempfile.TemporaryDirectory() as folder:
        quickstart = Path(folder) / "quickstart"
        lt = str(Path(sys.executable).parent / "lt")
        done = subprocess.run(
            [lt, "quickstart", "--out", str(quickstart), "--steps", str(arguments.steps)], check=False
        )
        summary = json.loads((quickstart / "summary.json").read_text())
        start = measure_first_step(quickstart)
    page = render_page(facts, summary, start)
    print(page)
    if arguments.out:
        arguments.out.write_text(page)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
