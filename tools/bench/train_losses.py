"""Comparison of what the trainers learn: losses of 100 steps of the shape of litespark-default, with several seeds.

    uv run python tools/bench/train_losses.py                  # the runs, one after another: 45 CPU-minutes a seed
    uv run python tools/bench/train_losses.py --jobs 2 --write # two at a time, and the page with its JSON

Trainers, shape, rows, optimizer and precision are those of `train.py`; the learning rate is reached after 20 steps.
Runs of one seed start from the same weights. The expected spread of losses is measured by the same runs: other seeds,
and transformers against itself with weights changed by a relative 1e-6. (Two threads instead of one change nothing: the
losses are bit-identical.) A finished run is saved in `--keep` as a line of JSON and not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train import LABELS, PAGE, SEQ_LENS, Trainer, create_environment, machine_info

TRAINERS = ("lt", "litgpt", "transformers")
OUTPUT_PAGE = PAGE.with_name("training-losses.md")
PERTURBED_REFERENCE, NOISE = "transformers, weights changed by 1e-6", 1e-6
"""Second run of the reference, with perturbed weights."""


def mean_tail_loss(losses: list[float]) -> float:
    """Return the mean of the last tenth."""
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def run_trainer(label: str, seed: int, steps: int, python: str) -> dict[str, Any]:
    """Run one trainer with one seed."""
    name, noise = ("transformers", NOISE) if label == PERTURBED_REFERENCE else (label, 0.0)
    trainer = Trainer(name, python if name == "litgpt" else sys.executable, seq_len=SEQ_LENS[0], seed=seed, noise=noise)
    try:
        for index in range(steps):
            trainer.step(index)
    finally:
        trainer.close()
    return {"trainer": label, "seed": seed, "losses": [round(step["loss"], 4) for step in trainer.steps]}


def render_page(runs: list[dict[str, Any]], machine: dict[str, object]) -> str:
    """Return the page docs/benchmarks/training-losses.md."""
    by = {(run["trainer"], run["seed"]): run["losses"] for run in runs}
    labels = [name for name in (*TRAINERS, PERTURBED_REFERENCE) if any(label == name for label, _ in by)]
    seeds, steps = sorted({seed for _, seed in by}), len(runs[0]["losses"])
    lines = [
        "# Losses of a run, compared with litgpt and transformers",
        "",
        "Measured by `uv run python tools/bench/train_losses.py --write`; every loss:",
        f"[training-losses.json](training-losses.json). {steps} steps of litespark-default (134.8 M parameters), one",
        "row of 1024 tokens each, bfloat16 compute with fp32 weights, warmup of 20 steps. Runs of one seed",
        "start from the same weights.",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items() if name != "load_before") + ".",
        "",
        "Mean loss of the last tenth:",
        "",
        f"| trainer | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        f"|---|{'---|' * (len(seeds) + 1)}",
    ]
    for label in labels:
        ends = [mean_tail_loss(by[label, seed]) if (label, seed) in by else None for seed in seeds]
        cells = " | ".join("" if end is None else f"{end:.3f}" for end in ends)
        known = [end for end in ends if end is not None]
        lines.append(f"| {LABELS.get(label, label)} | {cells} | {statistics.mean(known):.3f} |")
    lines += ["", "The first loss differs by " + first_differences(by, seeds) + ".", ""]
    lines.append(describe_differences(by, seeds))
    return "\n".join(lines) + "\n"


def first_differences(by: dict[tuple[str, int], list[float]], seeds: list[int]) -> str:
    """Describe the spread of the trainers' first losses: the forward pass alone, from the same weights."""
    spans = [
        max(first) - min(first) for seed in seeds if (first := [ls[0] for (_, of), ls in by.items() if of == seed])
    ]
    return f"{max(spans):.4f} at most between trainers of one seed"


def describe_differences(by: dict[tuple[str, int], list[float]], seeds: list[int]) -> str:
    """Describe the differences to each peer, and of the reference to itself."""
    parts = []
    for peer in ("litgpt", "transformers"):
        apart = [
            mean_tail_loss(by["lt", s]) - mean_tail_loss(by[peer, s])
            for s in seeds
            if ("lt", s) in by and (peer, s) in by
        ]
        parts.append(f"ours less {LABELS[peer]} " + ", ".join(f"{value:+.3f}" for value in apart))
    own = [
        mean_tail_loss(by[PERTURBED_REFERENCE, s]) - mean_tail_loss(by["transformers", s])
        for s in seeds
        if (PERTURBED_REFERENCE, s) in by
    ]
    parts.append("transformers with changed weights less itself " + ", ".join(f"{value:+.3f}" for value in own))
    return "By seed: " + "; ".join(parts) + "."


def main() -> int:
    """Run the missing runs, and optionally write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--keep", type=Path, default=Path("train-losses.jsonl"), help="finished runs, a line each")
    parser.add_argument("--python", help="interpreter with litgpt installed")
    parser.add_argument("--write", action="store_true", help="write the page and its JSON")
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.keep.read_text().splitlines()] if options.keep.exists() else []
    done = {(run["trainer"], run["seed"]) for run in runs}
    wanted = [(label, seed) for seed in range(options.seeds) for label in (*TRAINERS, PERTURBED_REFERENCE)]
    with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        missing = [run for run in wanted if run not in done]
        python = options.python or (create_environment(Path(folder) / "env") if missing else "")

        def make(run: tuple[str, int]) -> None:
            found = run_trainer(*run, options.steps, python)
            with options.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            runs.append(found)
            print(f"{run[0]}, seed {run[1]}: {mean_tail_loss(found['losses']):.3f}", file=sys.stderr)

        list(pool.map(make, missing))
    if options.write:
        machine = machine_info()
        text = json.dumps({"machine": machine, "runs": runs}) + "\n"
        OUTPUT_PAGE.with_suffix(".json").write_text(text, encoding="utf-8")
        OUTPUT_PAGE.write_text(render_page(runs, machine), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
