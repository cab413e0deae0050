"""Do all trainers learn the same? The losses of 100 steps of the shape of litespark-default, with several seeds.

    uv run python tools/bench/train_losses.py                  # the runs, one after another: 45 CPU-minutes a seed
    uv run python tools/bench/train_losses.py --jobs 2 --write # two at a time, and the page with its JSON

Trainers, shape, rows, optimizer and precision are those of `train.py`; the learning rate is whole after 20 steps. With
each seed all start from the same weights. How far apart losses may lie without a reason is what the same runs show:
another seed, and transformers beside itself from weights that are changed by a millionth of each. (Two threads instead
of one change nothing: bit by bit the same losses.) A finished run is kept in `--keep` as a line of JSON and not made
again.
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

from train import LABELS, PAGE, TRAINERS, Trainer, environment, machine

OUT = PAGE.with_name("training-losses.md")
ITSELF, NOISE = "transformers, weights changed by 1e-6", 1e-6
"""The reference beside itself."""


def tail(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def run(label: str, seed: int, steps: int, python: str) -> dict[str, Any]:
    """One trainer from one seed."""
    name, noise = ("transformers", NOISE) if label == ITSELF else (label, 0.0)
    trainer = Trainer(name, python if name == "litgpt" else sys.executable, seed, noise)
    try:
        for index in range(steps):
            trainer.step(index)
    finally:
        trainer.close()
    return {"trainer": label, "seed": seed, "losses": [round(step["loss"], 4) for step in trainer.steps]}


def page(runs: list[dict[str, Any]], told: dict[str, object]) -> str:
    """docs/benchmarks/training-losses.md."""
    by = {(run["trainer"], run["seed"]): run["losses"] for run in runs}
    labels = [name for name in (*TRAINERS, ITSELF) if any(label == name for label, _ in by)]
    seeds, steps = sorted({seed for _, seed in by}), len(runs[0]["losses"])
    lines = [
        "# Losses of a run, beside others",
        "",
        "Made by `uv run python tools/bench/train_losses.py --write`, which says how; every loss:",
        f"[training-losses.json](training-losses.json). {steps} steps of litespark-default (134.8 M parameters), one",
        "row of 1024 tokens each, bfloat16 compute with fp32 weights, learning rate whole after 20 steps. With each",
        "seed all start from the same weights.",
        "",
        ", ".join(f"{name} {value}" for name, value in told.items() if name != "load_before") + ".",
        "",
        "Mean loss of the last tenth:",
        "",
        f"| trainer | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        f"|---|{'---|' * (len(seeds) + 1)}",
    ]
    for label in labels:
        ends = [tail(by[label, seed]) if (label, seed) in by else None for seed in seeds]
        cells = " | ".join("" if end is None else f"{end:.3f}" for end in ends)
        known = [end for end in ends if end is not None]
        lines.append(f"| {LABELS.get(label, label)} | {cells} | {statistics.mean(known):.3f} |")
    lines += ["", "The first loss differs by " + first_differences(by, seeds) + ".", ""]
    lines.append(verdict(by, seeds))
    return "\n".join(lines) + "\n"


def first_differences(by: dict[tuple[str, int], list[float]], seeds: list[int]) -> str:
    """How far apart the trainers' first losses lie: the forward alone, from the same weights."""
    spans = [
        max(first) - min(first) for seed in seeds if (first := [ls[0] for (_, of), ls in by.items() if of == seed])
    ]
    return f"{max(spans):.4f} at most between trainers of one seed"


def verdict(by: dict[tuple[str, int], list[float]], seeds: list[int]) -> str:
    """Ours beside each peer, and what the reference differs by from itself."""
    parts = []
    for peer in ("litgpt", "transformers"):
        apart = [tail(by["lt", s]) - tail(by[peer, s]) for s in seeds if ("lt", s) in by and (peer, s) in by]
        parts.append(f"ours less {LABELS[peer]} " + ", ".join(f"{value:+.3f}" for value in apart))
    own = [tail(by[ITSELF, s]) - tail(by["transformers", s]) for s in seeds if (ITSELF, s) in by]
    parts.append("transformers from changed weights less itself " + ", ".join(f"{value:+.3f}" for value in own))
    return "By seed: " + "; ".join(parts) + "."


def main() -> int:
    """Make the runs that are missing, and write the page when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--keep", type=Path, default=Path("train-losses.jsonl"), help="finished runs, a line each")
    parser.add_argument("--python", help="an interpreter that has litgpt already")
    parser.add_argument("--write", action="store_true", help="write the page and its JSON")
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.keep.read_text().splitlines()] if options.keep.exists() else []
    done = {(run["trainer"], run["seed"]) for run in runs}
    wanted = [(label, seed) for seed in range(options.seeds) for label in (*TRAINERS, ITSELF)]
    with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        missing = [one for one in wanted if one not in done]
        python = options.python or (environment(Path(folder) / "env") if missing else "")

        def make(one: tuple[str, int]) -> None:
            found = run(*one, options.steps, python)
            with options.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            runs.append(found)
            print(f"{one[0]}, seed {one[1]}: {tail(found['losses']):.3f}", file=sys.stderr)

        list(pool.map(make, missing))
    if options.write:
        told = machine()
        text = json.dumps({"machine": told, "runs": runs}) + "\n"
        OUT.with_suffix(".json").write_text(text, encoding="utf-8")
        OUT.write_text(page(runs, told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
