"""Recipe checks before torch is loaded: layouts that do not fit the model, contradictory options.

Torch-free; the caller that has loaded torch passes its version to `check_compile_version`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer_gpu.options import GpuOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.config.sections.metrics import MetricsOptions
    from lt_trainer.config.sections.parallel import ParallelOptions
    from lt_trainer.config.sections.recipe import Recipe
    from lt_trainer.engine import World

CONTEXT_PARALLEL_ATTENTION = ("auto", "varlen", "sdpa", "split", "reference")
"""Attention backends that take the keys of all context-parallel ranks."""

COMPILE_TORCH_VERSIONS: tuple[tuple[int, int], ...] = ((2, 11), (2, 14), (2, 15))
"""Torch versions (major, minor) whose compiled blocks passed the parity tests."""

COMPILE_TP_TORCH_VERSIONS: tuple[tuple[int, int], ...] = ((2, 11), (2, 14), (2, 15))
"""Torch versions (major, minor) whose compiled blocks passed the parity tests under tensor parallelism."""


def check_parallelism(recipe: Recipe, world_size: int) -> None:
    """Reject degrees of parallelism that are not implemented or do not divide the model's shape.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    parallel, model, options = recipe.parallel, recipe.model, recipe.engine["gpu"]
    for name, problem in (
        ("n_kv_heads", "each rank needs whole key and value heads"),
        ("n_heads", "each rank needs whole attention heads"),
        ("intermediate_size", "each rank needs an equal part of the feed-forward layer"),
    ):
        if getattr(model, name) % parallel.tp:
            fits = math.gcd(model.n_kv_heads, model.n_heads, model.intermediate_size)
            raise RecipeError(
                f"{problem}, and parallel.tp does not divide model.{name}",
                values={"parallel.tp": parallel.tp, f"model.{name}": getattr(model, name)},
                remedy=f"set parallel.tp to a divisor of {fits}, and use more data-parallel ranks instead",
            )
    if parallel.cp > 1:
        _check_context_parallel(recipe)
    if options.attention == "flash" and recipe.data.document_mask:
        raise RecipeError(
            "torch's flash kernel takes no mask, so it cannot keep the documents of a row apart",
            values={"engine.gpu.attention": "flash", "data.document_mask": True},
            remedy="set engine.gpu.attention to auto or varlen, or data.document_mask to false",
        )
    min_seq_len = recipe.data.row_lengths[-1]
    if parallel.sequence_parallel and min_seq_len % parallel.tp:
        name, known = ("min_seq_len", "") if min_seq_len < recipe.data.seq_len else ("seq_len", " (SEQ_LEN)")
        raise RecipeError(
            "sequence parallelism splits the positions evenly over tensor-parallel ranks",
            values={f"data.{name}": min_seq_len, "parallel.tp": parallel.tp},
            remedy=f"set data.{name}{known} to a multiple of {parallel.tp}, or parallel.sequence_parallel to false",
        )
    _check_pipeline(recipe, world_size)
    check_fp8_sizes(recipe)
    stages = parallel.pp * options.pipeline_stages_per_rank
    if options.activation_offload and model.n_layers < 2 * stages:
        raise RecipeError(
            "activations of a stage's last block stay on the device, and a stage has no other block",
            values={
                "engine.gpu.activation_offload": True,
                "model.n_layers": model.n_layers,
                "parallel.pp": parallel.pp,
            },
            remedy="leave engine.gpu.activation_offload out",
        )
    if parallel.data_parallel_size(world_size) * parallel.cp == 1:
        _check_has_effect(options, "there is one data-parallel rank", "reshard_after_forward")
        _check_has_effect(options, "there is one data-parallel rank", "reduce_each_micro_batch")


def check_node(parallel: ParallelOptions, world: World) -> None:
    """Reject tensor-parallel groups that are on several nodes: they communicate in every layer.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    if world.local_size % parallel.tp:
        raise RecipeError(
            "a tensor-parallel group would be on several nodes",
            values={"parallel.tp": parallel.tp},
            remedy=f"set parallel.tp to a divisor of {world.local_size}, the ranks of a node, and use parallel.cp or "
            "parallel.pp over nodes",
        )


def _check_pipeline(recipe: Recipe, world_size: int) -> None:
    """Reject pipelines with fewer layers than stages, or micro-batches that cannot be interleaved."""
    pp, per_rank = recipe.parallel.pp, recipe.engine["gpu"].pipeline_stages_per_rank
    if pp == 1:
        _check_has_effect(recipe.engine["gpu"], "there is one pipeline rank", "pipeline_stages_per_rank")
        return
    values = {"parallel.pp": pp, "engine.gpu.pipeline_stages_per_rank": per_rank}
    if recipe.model.n_layers < pp * per_rank:
        raise RecipeError(
            "each pipeline stage needs a layer",
            values=values | {"model.n_layers": recipe.model.n_layers},
            remedy=f"set parallel.pp or engine.gpu.pipeline_stages_per_rank so that their product is at most "
            f"{recipe.model.n_layers}",
        )
    if per_rank == 1:
        return
    batch = recipe.batch
    rows = batch.micro_batch_size * recipe.parallel.data_parallel_size(world_size) * pp
    if batch.step_size_divisor % rows:
        sizes = {"batch.global_batch_size": batch.global_batch_size, "batch.micro_batch_size": batch.micro_batch_size}
        if batch.ramp.start:
            sizes |= {"batch.ramp.start": batch.ramp.start, "batch.ramp.increment": batch.ramp_increment}
        raise RecipeError(
            "an interleaved pipeline runs the micro-batches of each data-parallel rank in groups of parallel.pp, so "
            f"every step needs a multiple of {rows} rows",
            values=values | sizes,
            remedy=f"set the batch (and its ramp) to multiples of {rows}, or engine.gpu.pipeline_stages_per_rank to 1",
        )


def _check_context_parallel(recipe: Recipe) -> None:
    """Reject rows that do not divide into equal chunks, and attention with as many keys as queries only."""
    parallel, attention = recipe.parallel, recipe.engine["gpu"].attention
    divisor = math.lcm(2, parallel.tp if parallel.sequence_parallel else 1) * parallel.cp
    for length in recipe.data.row_lengths:
        if length % divisor:
            name = "min_seq_len" if length < recipe.data.seq_len else "seq_len"
            also = ", each of them over its tensor-parallel ranks" if divisor > 2 * parallel.cp else ""
            raise RecipeError(
                f"each context-parallel rank has two equal chunks of every row{also}",
                values={f"data.{name}": length, "parallel.cp": parallel.cp},
                remedy=f"set data.{name}{' (SEQ_LEN)' * (name == 'seq_len')} to a multiple of {divisor}, or lower "
                "parallel.cp",
            )
    if attention not in CONTEXT_PARALLEL_ATTENTION:
        raise RecipeError(
            "this attention backend takes as many keys as queries; context-parallel ranks have keys of other ranks too",
            values={"engine.gpu.attention": attention, "parallel.cp": parallel.cp},
            remedy=f"set engine.gpu.attention to one of {', '.join(CONTEXT_PARALLEL_ATTENTION)}, or parallel.cp to 1",
        )


def _check_has_effect(options: GpuOptions, reason: str, name: str) -> None:
    value = getattr(options, name)
    if value != getattr(GpuOptions, name):
        raise RecipeError(
            f"has no effect: {reason}",
            values={f"engine.gpu.{name}": value},
            remedy=f"leave engine.gpu.{name} out, or start more ranks",
        )


FP8_MULTIPLE = 16
"""Size of which float8 products on a GPU need multiples."""
FP8_CAPABILITY = (8, 9)
"""First compute capability with float8 products."""


def check_fp8_sizes(recipe: Recipe) -> None:
    """Reject fp8 for a model without inner blocks, or with sizes that float8 products do not take.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    options, model, tp = recipe.engine["gpu"], recipe.model, recipe.parallel.tp
    if options.fp8 == "off":
        return
    values = {"engine.gpu.fp8": options.fp8}
    if 2 * options.fp8_skipped_blocks >= model.n_layers:
        raise RecipeError(
            f"none of the {model.n_layers} blocks would compute in float8",
            values=values | {"engine.gpu.fp8_skipped_blocks": options.fp8_skipped_blocks},
            remedy="lower engine.gpu.fp8_skipped_blocks, or set engine.gpu.fp8 to off",
        )
    head_dim = model.hidden_size // model.n_heads
    sizes = {
        "model.hidden_size": model.hidden_size // tp,
        "model.n_kv_heads": model.n_kv_heads * head_dim // tp,
        "model.intermediate_size": model.intermediate_size // tp,
    }
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise RecipeError(
                f"float8 products need multiples of {FP8_MULTIPLE}, and a rank's part of a layer has {size} features",
                values=values | {name: recipe_value(recipe, name), "parallel.tp": tp},
                remedy="change the model or parallel.tp, or set engine.gpu.fp8 to off",
            )
    cp = recipe.parallel.cp
    for length in recipe.data.row_lengths:
        if length // cp % FP8_MULTIPLE:
            raise RecipeError(
                f"float8 products need multiples of {FP8_MULTIPLE} tokens, and a rank has {length // cp} of a row",
                values=values | {"data.seq_len": recipe.data.seq_len},
                remedy=f"use row lengths that are multiples of {FP8_MULTIPLE * cp}, or set engine.gpu.fp8 to off",
            )


def recipe_value(recipe: Recipe, name: str) -> object:
    """Return a value of the recipe by its dotted name of two parts."""
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field)


def check_fp8_device(fp8: str, device_type: str, capability: tuple[int, int], *, is_rocm: bool) -> None:
    """Reject fp8 on a device without float8 products; a CPU computes them slowly, for tests.

    Args:
        fp8: engine.gpu.fp8.
        device_type: type of the compute device.
        capability: its compute capability; unused unless it is CUDA.
        is_rocm: whether torch was built for ROCm, whose float8 formats differ.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    if fp8 == "off" or device_type == "cpu":
        return
    if device_type == "cuda" and not is_rocm and capability >= FP8_CAPABILITY:
        return
    if device_type != "cuda" or is_rocm:
        problem = f"float8 products are not available on {'ROCm' if is_rocm else device_type}"
    else:
        problem = "float8 products need compute capability {}.{}, and this GPU has {}.{}".format(
            *FP8_CAPABILITY, *capability
        )
    raise RecipeError(problem, values={"engine.gpu.fp8": fp8}, remedy="set engine.gpu.fp8 to off")


def check_offload(options: GpuOptions, device_type: str) -> None:
    """Reject offload of activations or optimizer state on devices other than CUDA.

    A CPU runs it for tests.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    for name, what in (("activation_offload", "activations are"), ("optimizer_offload", "optimizer state is")):
        if getattr(options, name) and device_type not in ("cuda", "cpu"):
            raise RecipeError(
                f"{what} offloaded from cuda only, not from {device_type}",
                values={f"engine.gpu.{name}": True},
                remedy=f"leave engine.gpu.{name} out",
            )


def check_vocab_size(config: LlamaConfig, tp: int) -> None:
    """Reject a vocabulary smaller than the tensor-parallel group.

    Any other is split into shards that differ by at most one row; `pad_vocab_to_multiple_of` makes odd sizes fast.

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
    """Reject `compile` with a torch version that has not passed the parity tests at this `tp`.

    Some versions silently train compiled models wrongly.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    passed = compile_torch_versions(tp)
    if options.compile is True and parse_torch_version(torch_version) not in passed:
        raise RecipeError(
            f"compiled blocks have not passed the parity tests with torch {torch_version}"
            + (" under tensor parallelism" if tp > 1 else ""),
            values={"engine.gpu.compile": True, "parallel.tp": tp},
            remedy=f"set engine.gpu.compile to false, or install torch {' or '.join(f'{a}.{b}' for a, b in passed)}",
        )


def compile_torch_versions(tp: int) -> tuple[tuple[int, int], ...]:
    """Return the torch versions (major, minor) whose compiled blocks passed the parity tests at this `tp`."""
    return COMPILE_TORCH_VERSIONS if tp == 1 else COMPILE_TP_TORCH_VERSIONS


def parse_torch_version(torch_version: str) -> tuple[int, int]:
    """Return major and minor of a version such as "2.11.0+cu130"."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)


def check_weights_dtype(recipe: Recipe) -> None:
    """Reject bfloat16 weights where something of the step would not be as exact as they need.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    options: GpuOptions = recipe.engine["gpu"]
    if recipe.optimizer.weights_dtype == "float32":
        return
    if options.dtype != "auto" or options.device == "cpu":
        check_bf16_weights("float32" if options.dtype == "auto" else options.dtype)
    if options.reduce_each_micro_batch:
        raise RecipeError(
            "gradients of micro-batches would be summed in bfloat16",
            values={"optimizer.weights_dtype": "bfloat16", "engine.gpu.reduce_each_micro_batch": True},
            remedy="set engine.gpu.reduce_each_micro_batch to false, or optimizer.weights_dtype to float32",
        )


def check_bf16_weights(dtype: str) -> None:
    """Reject bfloat16 weights in a run that computes in another dtype.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    if dtype != "bfloat16":
        raise RecipeError(
            "weights in bfloat16 need a forward pass in bfloat16",
            values={"optimizer.weights_dtype": "bfloat16", "engine.gpu.dtype": dtype},
            remedy="set engine.gpu.dtype to bfloat16, or optimizer.weights_dtype to float32",
        )


def check_memory_history(options: MetricsOptions, device: str) -> None:
    """Reject memory snapshots on a device for which torch records no memory history.

    Args:
        options: the recipe's metrics options.
        device: device type, or "auto", which is resolved only when the device is selected.

    Raises:
        RecipeError: the device is not CUDA.
    """
    if device in ("auto", "cuda") or not (options.memory_snapshot_step or options.memory_snapshot_on_oom):
        return
    where = "a CPU" if device == "cpu" else device
    raise RecipeError(
        f"torch records a history of CUDA memory only, and this run computes on {where}",
        values={
            "metrics.memory_snapshot_step": options.memory_snapshot_step,
            "metrics.memory_snapshot_on_oom": options.memory_snapshot_on_oom,
        },
        remedy="leave them out; metrics.monitor_interval_s samples the memory of processes",
    )
