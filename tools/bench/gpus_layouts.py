"""Layouts of gpus.py: those that are compared with one device, those whose speed is measured, and the tolerances.

A layout is a number of ranks and recipe overrides. Degrees that are left out follow from the number of ranks, as in a
run: `parallel.dp_shard` takes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lt_model import PRESETS
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.training.benchmark import resolve_bench_recipe

PP, INTERLEAVED = ("parallel.pp=2",), ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2")
TP, SP = ("parallel.tp=2",), ("parallel.tp=2", "parallel.sequence_parallel=true")
CP, HSDP, DDP = ("parallel.cp=2",), ("parallel.dp_replicate=2",), ("parallel.dp_replicate=2", "parallel.dp_shard=1")
MUON = ("optimizer.name=muon",)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a model on one machine.

    Attributes:
        name: name of the row.
        ranks: number of ranks.
        sets: recipe overrides.
    """

    name: str
    ranks: int
    sets: tuple[str, ...] = ()


LAYOUTS = (
    Layout(name="fsdp", ranks=2),
    Layout(name="ddp", ranks=2, sets=DDP),
    Layout(name="tp", ranks=2, sets=TP),
    Layout(name="tp-sp", ranks=2, sets=SP),
    Layout(name="pp-1f1b", ranks=2, sets=PP),
    Layout(name="pp-interleaved", ranks=2, sets=INTERLEAVED),
    Layout(name="cp", ranks=2, sets=CP),
    Layout(name="fsdp-muon", ranks=2, sets=MUON),
    Layout(name="hsdp", ranks=4, sets=HSDP),
    Layout(name="tp-sp-fsdp", ranks=4, sets=SP),
    Layout(name="pp-fsdp", ranks=4, sets=PP),
    Layout(name="pp-interleaved-tp-sp", ranks=4, sets=INTERLEAVED + SP),
    Layout(name="cp-fsdp", ranks=4, sets=CP),
    Layout(name="cp-tp-sp", ranks=4, sets=CP + SP),
    Layout(name="pp-cp", ranks=4, sets=PP + CP),
    Layout(name="fsdp-8", ranks=8),
    Layout(name="hsdp-2x4", ranks=8, sets=HSDP),
    Layout(name="tp-8", ranks=8, sets=("parallel.tp=8", "parallel.sequence_parallel=true")),
    Layout(name="pp-4-fsdp", ranks=8, sets=("parallel.pp=4",)),
    Layout(name="cp-8", ranks=8, sets=("parallel.cp=8",)),
    Layout(name="pp-tp-sp-fsdp", ranks=8, sets=PP + SP),
    Layout(name="cp-tp-sp-hsdp", ranks=8, sets=CP + SP + HSDP),
    Layout(name="pp-cp-tp-muon", ranks=8, sets=PP + CP + TP + MUON),
)
"""Compared with one device, each in each of `TOLERANCES`."""

MODEL = {"n_heads": 16, "n_kv_heads": 8, "n_layers": 8}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1009, "seq_len": 256}
QUICK_SIZES = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 61, "seq_len": 32}
"""Shape of the compared model: a vocabulary that no degree divides, as many layers as a pipeline of 8 stages needs."""
ROWS, STEPS = 16, 3


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative differences from one device.

    Attributes:
        loss: of the loss of each step, and of the validation loss.
        grad_norm: of each step.
        gradient: of each parameter's first moment after the first step, max|a - b| / max|b|.
        weights: of each parameter after the last step, ||a - b|| / ||b||.
    """

    loss: float
    grad_norm: float
    gradient: float
    weights: float


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, grad_norm=1e-4, gradient=1e-4, weights=1e-3),
    "float64": Tolerance(loss=1e-12, grad_norm=1e-10, gradient=1e-10, weights=1e-9),
    "bfloat16": Tolerance(loss=1e-3, grad_norm=1e-2, gradient=0.1, weights=2e-2),
}
"""By dtype of forward and backward; all are eager. On CPUs errors are at most a third of them: AdamW divides gradients
by their own size, so that rounding decides the direction of the smallest."""


def layout_spec(layout: Layout, dtype: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Return the values for the ranks of a layout that is compared."""
    sizes = dict(QUICK_SIZES if quick else SIZES)
    seq_len, vocab_size = sizes.pop("seq_len"), sizes.pop("vocab_size")
    return {
        "kind": "layout",
        "base": {
            "model": MODEL | sizes,
            "data": {"store": "unused", "seq_len": seq_len},
            "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
            "optimizer": {"weight_decay": 0.1},
            "schedule": {"max_steps": STEPS, "warmup_steps": 1},
            "fault_tolerance": {"hang_timeout_s": 20.0},
            "engine": {"gpu": {"device": device, "dtype": dtype, "compile": False}},
        },
        "sets": list(layout.sets),
        "vocab_size": vocab_size,
        "steps": STEPS,
        "rows": ROWS,
    }


def reference_of(layout: Layout) -> Layout:
    """Return the layout of one device with which it is compared."""
    return Layout(name="one", ranks=1, sets=tuple(text for text in layout.sets if text.startswith("optimizer.")))


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """Model, rows and memory options whose speed is measured.

    Attributes:
        preset: model preset.
        seq_len: tokens of a row.
        rows_per_device: rows of the global batch for each device, the same in all layouts.
        sizes: (micro_batch_size, activation_checkpointing) to try in this order.
        limit_s: most seconds of one try.
    """

    preset: str
    seq_len: int
    rows_per_device: int
    sizes: tuple[tuple[int, str], ...]
    limit_s: float


SPEED_CASES = {
    "1b": SpeedCase(
        preset="llama3.2-1b",
        seq_len=4096,
        rows_per_device=8,
        sizes=((4, "none"), (2, "none"), (1, "none")),
        limit_s=150,
    ),
    "8b": SpeedCase(
        preset="llama3-8b",
        seq_len=4096,
        rows_per_device=4,
        sizes=((2, "none"), (1, "none"), (1, "selective"), (1, "full")),
        limit_s=200,
    ),
}
QUICK_SPEED_CASES = {
    "tiny": SpeedCase(preset="tiny-2m", seq_len=32, rows_per_device=4, sizes=((1, "none"),), limit_s=120)
}
FITTED_SHARE = 0.95
"""Share of a device's memory that the planned peak of a try may take."""


def speed_layouts(devices: int) -> list[Layout]:
    """Return the layouts whose speed is measured on that many devices; FSDP also on fewer, to see how it scales."""
    found = [Layout(name=f"fsdp-{ranks}", ranks=ranks) for ranks in (1, 2, 4, 8) if ranks <= devices]
    if devices < 2:
        return found
    found += [
        Layout(name="fsdp-keep", ranks=devices, sets=("engine.gpu.reshard_after_forward=false",)),
        Layout(name="tp-sp", ranks=devices, sets=SP),
        Layout(name="pp-1f1b", ranks=devices, sets=PP),
        Layout(name="pp-interleaved", ranks=devices, sets=INTERLEAVED),
        Layout(name="cp", ranks=devices, sets=CP),
    ]
    return [*found, Layout(name="hsdp", ranks=devices, sets=HSDP)] if devices >= 4 else found


def speed_tries(case: SpeedCase, layout: Layout, device: str, memory_bytes: int | None) -> list[list[str]]:
    """Return the recipe overrides to try in order: those that fit by the plan, or the last one."""
    tries = []
    for micro_batch_size, checkpointing in case.sizes:
        sets = [
            f"data.seq_len={case.seq_len}",
            f"batch.global_batch_size={case.rows_per_device * layout.ranks}",
            f"batch.micro_batch_size={micro_batch_size}",
            f"engine.gpu.device={device}",
            f"engine.gpu.activation_checkpointing={checkpointing}",
            *layout.sets,
        ]
        tries.append(sets)
    if memory_bytes is None:
        return tries
    fitting = [sets for sets in tries if planned_peak(case, layout, sets) <= FITTED_SHARE * memory_bytes]
    return fitting or tries[-1:]


def planned_peak(case: SpeedCase, layout: Layout, sets: list[str]) -> float:
    """Return the bytes of the fullest device by `lt train plan`, without its reserve."""
    recipe = resolve_bench_recipe(None, case.preset, overrides=sets, hyperparameters=None).recipe
    planned = layout_from_recipe(recipe, devices=layout.ranks, nodes=1)
    return plan_memory(PRESETS[case.preset], case.seq_len, planned).peak
