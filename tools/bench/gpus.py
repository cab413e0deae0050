"""Benchmark of parallel layouts on the GPUs of one machine: equal to one GPU, then how fast.

    python tools/bench/gpus.py --out gpus.json                      # at most 8 minutes; again until it exits with 0
    python tools/bench/gpus.py --out gpus.json --limit-s 14400      # all of it at once
    python tools/bench/gpus.py --out gpus.json --stage float32      # one stage (repeatable)
    python tools/bench/gpus.py --device cpu --gpus 2 --quick        # the same path over gloo

The stages `float32`, `float64` and `bfloat16` train a small model eagerly in every layout that the number of GPUs
allows, and compare it with one GPU in float64: `loss` and `grad_norm` of every step, the largest relative differences;
`gradient` of every parameter's first moment after the first step, max|a - b| / max|b|; `weights` of every parameter
after the last step, ||a - b|| / ||b||; the weights before the first step must have the same bits. The stages
`speed-1b` and `speed-8b` measure the layouts with `lt train bench`: tokens/s of a GPU, MFU, peak memory of the fullest
rank.

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
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_runs import (
    REMAINS_EXIT_CODE,
    Report,
    Task,
    describe_machine,
    exit_on_sigterm,
    limit_of_tries,
    log,
    run_for_result,
    software_versions,
)
from gpus_worker import ROWS, STEPS

from lt_model import PRESETS
from lt_test_helpers.layouts import NamedTensors, StateSlice, assemble
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.training.benchmark import resolve_bench_recipe

LAYOUT_S, FACTS_S = 120.0, 60.0
PP, INTERLEAVED = ("parallel.pp=2",), ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2")
TP, SP = ("parallel.tp=2",), ("parallel.tp=2", "parallel.sequence_parallel=true")
CP, HSDP, DDP = ("parallel.cp=2",), ("parallel.dp_replicate=2",), ("parallel.dp_replicate=2", "parallel.dp_shard=1")
MUON = ("optimizer.name=muon",)
Layout = tuple[int, tuple[str, ...]]
"""Ranks, and recipe overrides; `parallel.dp_shard` takes the ranks that they leave."""
LAYOUTS: dict[str, Layout] = {
    "fsdp": (2, ()),
    "ddp": (2, DDP),
    "tp": (2, TP),
    "tp-sp": (2, SP),
    "pp-1f1b": (2, PP),
    "pp-interleaved": (2, INTERLEAVED),
    "cp": (2, CP),
    "fsdp-muon": (2, MUON),
    "hsdp": (4, HSDP),
    "tp-sp-fsdp": (4, SP),
    "pp-fsdp": (4, PP),
    "pp-interleaved-tp-sp": (4, INTERLEAVED + SP),
    "cp-fsdp": (4, CP),
    "cp-tp-sp": (4, CP + SP),
    "pp-cp": (4, PP + CP),
    "fsdp-8": (8, ()),
    "hsdp-2x4": (8, HSDP),
    "tp-8": (8, ("parallel.tp=8", "parallel.sequence_parallel=true")),
    "pp-4-fsdp": (8, ("parallel.pp=4",)),
    "cp-8": (8, ("parallel.cp=8",)),
    "pp-tp-sp-fsdp": (8, PP + SP),
    "cp-tp-sp-hsdp": (8, CP + SP + HSDP),
    "pp-cp-tp-muon": (8, PP + CP + TP + MUON),
}
"""Compared with one device, each in each of `TOLERANCES`."""
TOLERANCES = {
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4, "weights": 1e-3},
    "float64": {"loss": 1e-12, "grad_norm": 1e-10, "gradient": 1e-10, "weights": 1e-9},
    "bfloat16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 0.1, "weights": 2e-2},
}
"""By dtype of forward and backward; all are eager. On CPUs errors are at most a third of them: AdamW divides gradients
by their own size, so that rounding decides the direction of the smallest."""
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "seq_len": 256}
QUICK_SIZES = {"hidden_size": 128, "intermediate_size": 192, "seq_len": 32}
VOCAB_SIZE = 61
"""No degree divides it."""
SPEED_CASES: dict[str, tuple[str, int, int, tuple[tuple[int, str], ...], float]] = {
    "1b": ("llama3.2-1b", 4096, 8, ((4, "none"), (2, "none"), (1, "none")), 150),
    "8b": ("llama3-8b", 4096, 4, ((2, "none"), (1, "none"), (1, "selective"), (1, "full")), 200),
    "tiny": ("tiny-2m", 32, 4, ((1, "none"),), 120),
}
"""Preset, tokens of a row, rows for each device, (micro_batch_size, activation_checkpointing) to try in this order,
most seconds of one try."""
FITTED_SHARE = 0.95
"""Share of a device's memory that the planned peak of a try may take."""


def layout_spec(layout: Layout, dtype: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Return the values for the ranks of a layout that is compared."""
    sizes = dict(QUICK_SIZES if quick else SIZES)
    base = {
        "data": {"store": "unused", "seq_len": sizes.pop("seq_len")},
        "model": {"n_heads": 16, "n_kv_heads": 8, "n_layers": 8} | sizes,
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "optimizer": {"weight_decay": 0.1},
        "schedule": {"max_steps": STEPS, "warmup_steps": 1},
        "fault_tolerance": {"hang_timeout_s": 20.0},
        "engine": {"gpu": {"device": device, "dtype": dtype, "compile": False}},
    }
    return {"base": base, "sets": list(layout[1]), "vocab_size": VOCAB_SIZE}


def reference_of(layout: Layout) -> Layout:
    """Return the layout of one device with which it is compared."""
    return 1, tuple(text for text in layout[1] if text.startswith("optimizer."))


def speed_layouts(devices: int) -> dict[str, Layout]:
    """Return the layouts whose speed is measured on that many devices; FSDP also on fewer, to see how it scales."""
    found: dict[str, Layout] = {f"fsdp-{ranks}": (ranks, ()) for ranks in (1, 2, 4, 8) if ranks <= devices}
    if devices >= 2:
        keep = ("engine.gpu.reshard_after_forward=false",)
        others = {"fsdp-keep": keep, "tp-sp": SP, "pp-1f1b": PP, "pp-interleaved": INTERLEAVED, "cp": CP}
        others |= {"hsdp": HSDP} if devices >= 4 else {}
        found |= {name: (devices, sets) for name, sets in others.items()}
    return found


def speed_tries(case: str, layout: Layout, device: str, memory_bytes: int | None) -> list[list[str]]:
    """Return the recipe overrides to try in order: those that fit by the plan, or the last one."""
    preset, seq_len, rows, sizes, _ = SPEED_CASES[case]
    tries, fitting = [], []
    for micro_batch_size, checkpointing in sizes:
        sets = [f"data.seq_len={seq_len}", f"batch.global_batch_size={rows * layout[0]}"]
        sets += [f"batch.micro_batch_size={micro_batch_size}", f"engine.gpu.device={device}"]
        sets += [f"engine.gpu.activation_checkpointing={checkpointing}", *layout[1]]
        tries.append(sets)
        if memory_bytes is not None:
            recipe = resolve_bench_recipe(None, preset, overrides=sets, hyperparameters=None).recipe
            planned = layout_from_recipe(recipe, devices=layout[0], nodes=1)
            if plan_memory(PRESETS[preset], seq_len, planned).peak <= FITTED_SHARE * memory_bytes:
                fitting.append(sets)
    return tries if memory_bytes is None else fitting or tries[-1:]


def compare_layout(
    found: dict[str, Any], folder: Path, ranks: int, one: dict[str, Any], one_folder: Path, dtype: str
) -> dict[str, Any]:
    """Return the largest differences of a layout from one device, and whether each is within its tolerance."""
    (start, first, last), (one_start, one_first, one_last) = read_states(folder, ranks), read_states(one_folder, 1)
    differing = ["/".join(key) for key in one_start if start[key].tobytes() != one_start[key].tobytes()]
    moments = [key for key in one_first if key[0] in ("exp_avg", "momentum")]
    weights = [key for key in one_last if key[0] == "weights"]
    errors = {
        "loss": max_error(np.array(found["losses"]), np.array(one["losses"]), np.array(one["losses"])),
        "grad_norm": max_error(np.array(found["grad_norms"]), np.array(one["grad_norms"]), np.array(one["grad_norms"])),
        "gradient": max(max_error(first[key], one_first[key], np.abs(one_first[key]).max()) for key in moments),
        "weights": max(
            float(np.linalg.norm(last[key] - one_last[key]) / np.linalg.norm(one_last[key])) for key in weights
        ),
    }
    equal = not differing and found["validation_tokens"] == one["validation_tokens"]
    return {
        "errors": errors,
        "different_at_start": differing,
        "equal": equal and all(errors[name] <= limit for name, limit in TOLERANCES[dtype].items()),
    }


def read_states(folder: Path, ranks: int) -> list[NamedTensors]:
    """Return the whole tensors of each moment in float64, joined from the slices of the ranks."""
    moments: list[list[list[StateSlice]]] = [[[] for _ in range(ranks)] for _ in range(3)]
    for rank in range(ranks):
        with np.load(folder / f"rank{rank}.npz") as arrays:
            for key in arrays.files:
                moment, group, name, dtype, shape, offset = json.loads(key)
                piece = StateSlice(group, name, dtype, tuple(shape), tuple(offset), arrays[key].astype(np.float64))
                moments[moment][rank].append(piece)
    return [assemble(slices) for slices in moments]


def max_error(found: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> float:
    """Return the largest difference relative to `scale`; nan differs infinitely."""
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(found - wanted) / np.abs(scale), nan=np.inf).max())


class Launcher:
    """Runs layouts under torchrun, and keeps those of one device for the comparisons of this run."""

    def __init__(self, folder: Path, device: str, *, quick: bool) -> None:
        self._folder, self._device, self._quick = folder, device, quick
        self._references: dict[tuple[str, Layout], tuple[dict[str, Any], Path]] = {}

    def run(self, spec: dict[str, Any], ranks: int, limit_s: float) -> tuple[dict[str, Any], Path]:
        """Run `gpus_worker.py` on that many ranks; return its result and folder."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return run_for_result("gpus_worker.py", spec, folder, limit_s, ranks=ranks), folder

    def compare(self, layout: Layout, dtype: str, limit_s: float) -> dict[str, Any]:
        """Train a layout and one device; return how far they are apart."""
        begin, reference = time.monotonic(), reference_of(layout)
        if (dtype, reference) not in self._references:
            spec = layout_spec(reference, dtype, self._device, quick=self._quick)
            self._references[dtype, reference] = self.run(spec, 1, limit_s / 2)
        one, one_folder = self._references[dtype, reference]
        head = {"ranks": layout[0], "sets": layout[1]}
        if one["status"] != "ok":
            return head | {"status": "crashed", "reason": "one device failed", "one": one}
        spec = layout_spec(layout, dtype, self._device, quick=self._quick)
        found, folder = self.run(spec, layout[0], limit_s - (time.monotonic() - begin))
        if found["status"] == "ok":
            found |= compare_layout(found, folder, layout[0], one, one_folder, dtype)
        shutil.rmtree(folder)
        return head | found

    def measure(
        self, case: str, layout: Layout, tries: list[list[str]], steps: tuple[int, int], limit_s: float
    ) -> dict[str, Any]:
        """Measure a layout at the first size that fits."""
        begin, attempts = time.monotonic(), []
        preset, one_s = SPEED_CASES[case][0], SPEED_CASES[case][-1]
        head = {"ranks": layout[0], "preset": preset, "attempts": attempts}
        for sets in tries:
            left_s = limit_s - (time.monotonic() - begin)
            if attempts and left_s < one_s / 2:
                return head | {"status": "timed_out"}
            log(f"  {' '.join(sets)}")
            spec = {"preset": preset, "sets": sets, "warmup": steps[0], "steps": steps[1]}
            found, folder = self.run(spec, layout[0], min(left_s, one_s))
            shutil.rmtree(folder)
            found = {"sets": sets} | found
            if found["status"] != "out_of_memory":
                return head | found
            attempts.append(found)
        return head | {"status": "out_of_memory"}


def list_tasks(arguments: argparse.Namespace, launcher: Launcher, machine: dict[str, Any]) -> list[Task]:
    """Return the tasks of all stages on the machine's devices."""
    tasks = [
        Task(stage=dtype, name=name, limit_s=LAYOUT_S, run=partial(launcher.compare, layout, dtype))
        for dtype in TOLERANCES
        for name, layout in LAYOUTS.items()
        if layout[0] <= machine["devices"]
    ]
    steps = (1, 2) if arguments.quick else (4, 10)
    for case in ("tiny",) if arguments.quick else ("1b", "8b"):
        for name, layout in speed_layouts(machine["devices"]).items():
            tries = speed_tries(case, layout, arguments.device, machine.get("memory_bytes"))
            limit_s = limit_of_tries(SPEED_CASES[case][-1], len(tries), arguments.limit_s)
            run = partial(launcher.measure, case, layout, tries, steps)
            tasks.append(Task(stage=f"speed-{case}", name=name, limit_s=limit_s, run=run))
    return tasks


def read_machine(device: str, folder: Path, gpus: int) -> dict[str, Any]:
    """Return the facts of gpu.py's machine, the devices to use, the links between them and the settings of NCCL."""
    found = run_for_result("gpu_worker.py", {"kind": "facts", "device": device}, folder, FACTS_S)
    if found["status"] != "ok":
        raise SystemExit(found.get("output_end") or "no facts of the device in time")
    if device == "cuda" and gpus > found["devices"]:
        raise SystemExit(f"--gpus {gpus}: this machine has {found['devices']}")
    topology = ""
    if shutil.which("nvidia-smi"):
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    environment = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    devices = gpus or (found["devices"] if device == "cuda" else 2)
    return found | {"devices": devices, "topology": topology, "nccl_environment": environment}


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


def main() -> None:
    """Run what remains of the chosen stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, written after every result and continued")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use: 2, 4 or 8; default all of this machine")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds of this run, at least 480 for all stages")
    names = [*TOLERANCES, *(f"speed-{name}" for name in SPEED_CASES)]
    parser.add_argument("--stage", action="append", default=[], choices=names, help="only this stage; repeatable")
    parser.add_argument("--layout", action="append", default=[], help="only this layout; repeatable")
    parser.add_argument("--retry", action="store_true", help="run crashes and timeouts of earlier runs again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models: tries the script itself")
    parser.add_argument("--commit", help="commit to note where there is no git")
    arguments = parser.parse_args()
    exit_on_sigterm()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lt-bench-") as name:
        folder = Path(name)
        machine = read_machine(arguments.device, folder, arguments.gpus)
        options = {"device": arguments.device, "quick": arguments.quick}
        head = {"benchmark": "gpus", "versions": software_versions(arguments.commit), "options": options}
        report = Report(arguments.out, head, machine)
        tasks = list_tasks(arguments, Launcher(folder, arguments.device, quick=arguments.quick), machine)
        stages, layouts = arguments.stage or [t.stage for t in tasks], arguments.layout or [t.name for t in tasks]
        chosen = [task for task in tasks if task.stage in stages and task.name in layouts]
        remaining = report.run(chosen, arguments.limit_s - (time.monotonic() - begin), retry=arguments.retry)
    report.content["complete"] = all(report.find(task.stage, task.name) for task in tasks)
    report.write()
    log(format_report(report))
    print(json.dumps(report.content))
    if remaining:
        log(f"{len(remaining)} results remain: run the same command again")
        raise SystemExit(REMAINS_EXIT_CODE)
    if any(is_failure(row) for row in report.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
