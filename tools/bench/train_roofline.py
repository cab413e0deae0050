"""Roofline of a training step on one CPU thread: what each kind of kernel costs, and the least that it could cost.

    uv run python tools/bench/train_roofline.py            # JSON on stdout
    uv run python tools/bench/train_roofline.py --write    # also docs/benchmarks/training-roofline.md and its JSON

The trainers, shape and rows of `train.py`, each in a process of its own. Two steps run under torch's profiler, which
gives every operator's own time; several more run without it, for the step's true CPU seconds and the part of them that
the kernel of the operating system takes (fresh memory, page by page). A kind's floor is

- matrix products and attention: their FLOP, from the shapes (attention: the causal half, its backward pass 2.5 times
  its forward pass), at the speed of a product of 1024^3;
- the optimizer: 28 bytes a parameter (weight, gradient and two moments read, weight and moments written) at the speed
  of a pass that changes 256 MiB in place;
- everything else: nothing, since it could in principle be fused into a product.

So the table says what a trainer could still save, and where: in its own kernels, or in those of torch that all share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from train import LABELS, LR, PAGE, SEQ_LENS, TRAINERS, create_environment, machine_info, make_row, make_step

OUTPUT_PAGE = PAGE.with_name("training-roofline.md")
N_LAYERS, N_HEADS, HEAD_DIM, PARAMETERS = 12, 12, 64, 134_845_440
OPTIMIZER_BYTES = 28
PROFILED_STEPS = 2
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
KINDS = {
    "matrix products": "aten::mm aten::addmm aten::bmm aten::_addmm_activation",
    "attention": f"{_FLASH} {_FLASH}_backward",
    "optimizer": "aten::_fused_adamw_",
    "copies, casts, zeros": "aten::copy_ aten::fill_ aten::zero_ aten::cat aten::_to_copy aten::clone",
}
"""Operators of each kind; any other operator is "other kernels", and what is none is Python and autograd."""
OTHER, FUSED, OVERHEAD = "other kernels", "fused kernels", "Python, autograd"


def kind_of(operator: str) -> str:
    """Return the kind of a profiler's entry."""
    for kind, names in KINDS.items():
        if operator in names.split():
            return kind
    if operator.startswith("## Call CompiledFxGraph"):
        return FUSED
    return OTHER if operator.startswith("aten::") else OVERHEAD


def product_flops(operator: str, shapes: list[list[int]]) -> float:
    """Return the FLOP of a matrix product with these operands; 0 for another operator."""
    if kind_of(operator) != "matrix products":
        return 0.0
    a, b = shapes[1:3] if "addmm" in operator else shapes[:2]  # the sum's first operand comes before the factors
    return 2.0 * math.prod(a) * b[-1]


def attention_flops(seq_len: int) -> float:
    """Return the FLOP of causal attention of one row, forward and backward: half of all pairs, 2 + 5 products."""
    return N_LAYERS * N_HEADS * 7 * 2.0 * HEAD_DIM * seq_len * seq_len / 2


def measure_bandwidth() -> float:
    """Return the bytes per second, read and written, of a pass over 256 MiB in place: the best of five."""
    import torch

    numbers, seconds = torch.ones(1 << 26), []
    for _ in range(5):
        start = time.perf_counter()
        numbers.add_(1)
        seconds.append(time.perf_counter() - start)
    return 2.0 * numbers.nbytes / min(seconds)


def run_child(name: str, seq_len: int, steps: int) -> None:
    """Measure one trainer and print the result as JSON."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lt_trainer_gpu.peak_flops import measure_matmul_flops

    torch.set_num_threads(1)
    step = make_step(name, 0, seq_len)
    for index in range(3):
        step(make_row(index, seq_len), LR)
    cpu_s, system_s = [], []
    for index in range(3, 3 + steps):
        row, before = make_row(index, seq_len), resource.getrusage(resource.RUSAGE_SELF)
        step(row, LR)
        after = resource.getrusage(resource.RUSAGE_SELF)
        system_s.append(after.ru_stime - before.ru_stime)
        cpu_s.append(after.ru_utime - before.ru_utime + system_s[-1])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for index in range(PROFILED_STEPS):
            step(make_row(index, seq_len), LR)
    seconds, flops = dict.fromkeys((*KINDS, FUSED, OTHER, OVERHEAD), 0.0), 0.0
    for entry in profiled.key_averages(group_by_input_shape=True):
        seconds[kind_of(entry.key)] += entry.self_cpu_time_total / 1e6 / PROFILED_STEPS
        flops += product_flops(entry.key, entry.input_shapes) * entry.count / PROFILED_STEPS
    found = {
        "cpu_s": statistics.median(cpu_s),
        "system_s": statistics.median(system_s),
        "seconds": seconds,
        "product_flops": flops,
        "flops_per_s": measure_matmul_flops(torch.device("cpu"), torch.bfloat16)[0],
        "bytes_per_s": measure_bandwidth(),
    }
    print(json.dumps(found))


def measure(name: str, seq_len: int, steps: int, python: str) -> dict[str, Any]:
    """Measure one trainer in a process of its own."""
    command = [python, "-W", "ignore", str(Path(__file__).resolve())]
    command += ["--child", name, "--seq-len", str(seq_len), "--steps", str(steps)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def floors(row: dict[str, Any], seq_len: int) -> dict[str, float]:
    """Return the least seconds of each kind that has a floor."""
    return {
        "matrix products": row["product_flops"] / row["flops_per_s"],
        "attention": attention_flops(seq_len) / row["flops_per_s"],
        "optimizer": OPTIMIZER_BYTES * PARAMETERS / row["bytes_per_s"],
    }


def render_table(seq_len: int, trainers: dict[str, Any]) -> list[str]:
    """Return the table of rows of one length, in milliseconds per step, and what follows from it."""
    names = list(trainers)
    lines = [f"| ms per step | {' | '.join(LABELS[name] for name in names)} |", f"|---{'|---' * len(names)}|"]
    for kind in (*KINDS, FUSED, OTHER, OVERHEAD):
        cells = []
        for name in names:
            cell, floor = f"{trainers[name]['seconds'][kind] * 1e3:.0f}", floors(trainers[name], seq_len).get(kind)
            cells.append(cell if floor is None else f"{cell} (floor {floor * 1e3:.0f})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    sums = [sum(trainers[name]["seconds"].values()) for name in names]
    lines.append(f"| sum, under the profiler | {' | '.join(f'{seconds * 1e3:.0f}' for seconds in sums)} |")
    for label, field in (("CPU time without the profiler", "cpu_s"), ("of it the operating system's", "system_s")):
        lines.append(f"| {label} | {' | '.join(f'{trainers[name][field] * 1e3:.0f}' for name in names)} |")
    return [*lines, *conclusions(seq_len, trainers)]


def conclusions(seq_len: int, trainers: dict[str, Any]) -> list[str]:
    """Return what the figures say: what lt spends outside torch's shared kernels, and the speed that could remain."""
    shared = ("matrix products", "attention", "optimizer")
    peers = {name: row for name, row in trainers.items() if not name.startswith("lt")}
    lines = []
    for name, row in trainers.items():
        same = sum(row["seconds"][kind] for kind in shared)
        lines.append(
            f"- {LABELS[name]}: {same / sum(row['seconds'].values()):.0%} of its step lies in torch's products, "
            f"attention and fused AdamW; all else takes {(sum(row['seconds'].values()) - same) * 1e3:.0f} ms."
        )
    if peers and "lt" in trainers:
        row, fastest = trainers["lt"], min(peer["cpu_s"] for peer in peers.values())
        same = sum(row["seconds"][kind] for kind in shared)
        floor = sum(floors(row, seq_len).values())
        lines.append(
            f"- If all else cost lt nothing, its step would be {fastest / same:.2f} times as fast as the faster peer's "
            f"({fastest * 1e3:.0f} ms); with these three kinds at their floors, {fastest / floor:.2f} times."
        )
    return ["", *lines]


def render_page(found: dict[str, Any]) -> str:
    """Return the page docs/benchmarks/training-roofline.md."""
    lines = [
        "# What remains above the matrix products of a training step on a CPU",
        "",
        "Measured by `uv run python tools/bench/train_roofline.py --write`; raw numbers:",
        "[training-roofline.json](training-roofline.json). Shape, rows and trainers of [training.md](training.md), one",
        "thread. Time of each kind of kernel by torch's profiler; floors: products and causal attention at the speed",
        "of a product of 1024^3, the optimizer at 28 bytes a parameter and the speed of a pass in place.",
        "",
        ", ".join(f"{name} {value}" for name, value in found["machine"].items()) + ".",
        "",
    ]
    for seq_len, trainers in found["seq_lens"].items():
        lines += [f"## Rows of {seq_len} tokens", "", *render_table(int(seq_len), trainers), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Measure, print JSON, and optionally write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps without the profiler")
    parser.add_argument("--only", default=",".join(TRAINERS), help="trainers, separated by commas")
    parser.add_argument("--python", help="interpreter with litgpt installed")
    parser.add_argument("--write", action="store_true", help="write the page and its JSON")
    parser.add_argument("--seq-len", type=int, action="append", help=f"length of rows; default {SEQ_LENS}")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seq_lens = options.seq_len or SEQ_LENS
    if options.child:
        run_child(options.child, seq_lens[0], options.steps)
        return 0
    names = options.only.split(",")
    found: dict[str, Any] = {"machine": machine_info()}
    with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder:
        litgpt = options.python or (create_environment(Path(folder) / "env") if "litgpt" in names else "")
        found["seq_lens"] = {
            seq_len: {
                name: measure(name, seq_len, options.steps, litgpt if name == "litgpt" else sys.executable)
                for name in names
            }
            for seq_len in seq_lens
        }
    print(json.dumps(found, indent=1))
    if options.write:
        OUTPUT_PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        OUTPUT_PAGE.write_text(render_page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
