"""What the engine refuses before anything is loaded: layouts that do not fit the model, options that contradict.

Torch-free; `compiled_with` is told torch's version by whoever has loaded it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer_gpu.options import GpuOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.recipe import Recipe
    from lt_trainer.sections import MetricsOptions

NOT_BUILT = {
    "pp": "pipeline parallelism is not built: sharding with tensor parallelism holds models of 70B parameters",
    "cp": "context parallelism is not built: a row's positions stay on one tensor-parallel group",
}

COMPILES: tuple[tuple[int, int], ...] = ((2, 11), (2, 15))
"""Versions of torch (major, minor) with which compiled blocks have passed the parity tests."""

COMPILES_WITH_TP: tuple[tuple[int, int], ...] = ((2, 11), (2, 15))
"""Those of them with which compiled blocks under tensor parallelism have too."""


def check_layout(recipe: Recipe, world: int) -> None:
    """Refuse degrees of parallelism that are not built, or that the model's shape does not divide by.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    parallel, model, options = recipe.parallel, recipe.model, recipe.engine["gpu"]
    for axis, why in NOT_BUILT.items():
        if getattr(parallel, axis) != 1:
            raise RecipeError(
                why, values={f"parallel.{axis}": getattr(parallel, axis)}, remedy=f"set parallel.{axis} to 1"
            )
    for name, what in (
        ("n_kv_heads", "each rank needs whole key and value heads"),
        ("n_heads", "each rank needs whole attention heads"),
        ("intermediate_size", "each rank needs as much of the feed-forward layer"),
    ):
        if getattr(model, name) % parallel.tp:
            fits = math.gcd(model.n_kv_heads, model.n_heads, model.intermediate_size)
            raise RecipeError(
                f"{what}, and parallel.tp does not divide model.{name}",
                values={"parallel.tp": parallel.tp, f"model.{name}": getattr(model, name)},
                remedy=f"set parallel.tp to a divisor of {fits}, and use more data-parallel ranks instead",
            )
    shortest = recipe.data.row_lengths[-1]
    if parallel.sequence_parallel and shortest % parallel.tp:
        name, known = ("shortest", "") if shortest < recipe.data.seq_len else ("seq_len", " (SEQ_LEN)")
        raise RecipeError(
            "sequence parallelism gives each rank as many positions",
            values={f"data.{name}": shortest, "parallel.tp": parallel.tp},
            remedy=f"set data.{name}{known} to a multiple of {parallel.tp}, or parallel.sequence_parallel to false",
        )
    if parallel.data_parallel(world) == 1:
        _refuse_without_effect(options, "there is one data-parallel rank", "reshard_after_forward")
        _refuse_without_effect(options, "there is one data-parallel rank", "reduce_each_micro_batch")


def _refuse_without_effect(options: GpuOptions, reason: str, name: str) -> None:
    value = getattr(options, name)
    if value != getattr(GpuOptions, name):
        raise RecipeError(
            f"has no effect: {reason}",
            values={f"engine.gpu.{name}": value},
            remedy=f"leave engine.gpu.{name} out, or start more ranks",
        )


def check_vocabulary(config: LlamaConfig, tp: int) -> None:
    """Refuse a vocabulary of which a tensor-parallel rank would have nothing.

    Any other is cut into parts that differ by one row at most; which sizes are fast is `pad_vocab_to`'s matter.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    if config.vocab_size < tp:
        raise RecipeError(
            f"each tensor-parallel rank needs a row of the vocabulary, which has {config.vocab_size}",
            values={"parallel.tp": tp},
            remedy=f"set parallel.tp to at most {config.vocab_size}",
        )


def check_compile_version(options: GpuOptions, tp: int, torch_version: str) -> None:
    """Refuse to compile with a torch for which the parity tests have not passed, apart for tensor parallelism.

    Some versions have trained compiled models wrongly without a word.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    passed = COMPILES if tp == 1 else COMPILES_WITH_TP
    if options.compile and release(torch_version) not in passed:
        raise RecipeError(
            f"compiled blocks have not been shown to train rightly with torch {torch_version}"
            + (" under tensor parallelism" if tp > 1 else ""),
            values={"engine.gpu.compile": True, "parallel.tp": tp},
            remedy=f"set engine.gpu.compile to false, or install torch {' or '.join(f'{a}.{b}' for a, b in passed)}",
        )


def release(torch_version: str) -> tuple[int, int]:
    """Major and minor of a version such as "2.11.0+cu130"."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)


def check_memory_history(options: MetricsOptions, device: str) -> None:
    """Refuse histories of memory where torch keeps none.

    Args:
        options: what the recipe wants to see.
        device: "cuda", "cpu", or "auto", which is known only when the device is taken.

    Raises:
        RecipeError: the device is a CPU.
    """
    if device != "cpu" or not (options.memory_snapshot_step or options.memory_snapshot_on_oom):
        return
    raise RecipeError(
        "torch keeps a history of CUDA memory only, and this run computes on a CPU",
        values={
            "metrics.memory_snapshot_step": options.memory_snapshot_step,
            "metrics.memory_snapshot_on_oom": options.memory_snapshot_on_oom,
        },
        remedy="leave them out; metrics.monitor_interval_s samples the memory of processes",
    )
