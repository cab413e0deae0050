"""What this engine refuses: one list of rules on a recipe and its ranks, one on the device that was selected.

A rule is a condition, the fields to blame, and a sentence: problem and remedy. Rules are evaluated in order, so a later
one may rely on those before it. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lt_model import param_specs
from lt_model.attention_features import ATTENTION_LACKS
from lt_trainer.config.recipe import check_features, model_config
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.options import GpuOptions, gpu_options

if TYPE_CHECKING:
    from lt_model import ModelConfig, ParamSpec
    from lt_trainer.config.sections import Recipe
    from lt_trainer.engine import World

CONTEXT_PARALLEL_ATTENTION = ("auto", "varlen", "sdpa", "split", "reference", "flex")
"""Attention backends that take the keys of all context-parallel ranks."""
COMPILE_TORCH_VERSIONS: tuple[tuple[int, int], ...] = ((2, 11), (2, 14), (2, 15))
"""Torch versions (major, minor) whose compiled blocks passed the parity tests; others may train wrongly in silence."""
GRAPH_TORCH_VERSION = (2, 15)
"""Oldest torch version that was tried; older ones use the host's memory anew that a graph still reads."""
GRAPH_ATTENTION = ("auto", "varlen", "flash-attn")
"""Attention backends that take the documents' boundaries from the device."""
EP_TORCH_VERSION = (2, 11)
"""Oldest torch version with which expert parallelism is tested."""
FP8_MULTIPLE = 16
"""Size of which float8 products on a GPU need multiples."""
FP8_CAPABILITY = (8, 9)
"""First compute capability with float8 products."""


class Rule(NamedTuple):
    """One thing that is refused.

    Attributes:
        is_broken: whether this recipe is refused.
        fields: dotted names of the fields to blame, separated by blanks.
        problem: problem, as half a sentence.
        remedy: remedy, as half a sentence.
    """

    is_broken: bool
    fields: str
    problem: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What was selected.

    Attributes:
        type: type of the device.
        dtype: name of the dtype of forward and backward.
        capability: CUDA's compute capability; (0, 0) elsewhere.
        is_rocm: torch was built for ROCm, whose float8 formats differ.
        torch_version: such as "2.15.0+cu132".
    """

    type: str
    dtype: str = "bfloat16"
    capability: tuple[int, int] = (0, 0)
    is_rocm: bool = False
    torch_version: str = ""


def check_recipe(recipe: Recipe, world: World) -> None:
    """Reject layouts that do not fit model, ranks or batch, and contradictory options.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    recipe.parallel.data_parallel_size(world.size)  # first: too few ranks break other rules, too
    _refuse_broken(recipe, _recipe_rules(recipe, world))
    recipe.accumulation_steps(world.size)
    options, model = gpu_options(recipe), model_config(recipe, recipe.model.vocab_size or 1)
    attention = options.attention
    check_features(model, "training", ("sinks",))
    check_features(model, f"engine.gpu.attention = {attention}", ATTENTION_LACKS.get(attention, ()))
    if options.fp8 != "off":
        check_features(model, f"engine.gpu.fp8 = {options.fp8}", ("n_experts",))
    for name in ("expert_size",) * (recipe.parallel.ep == 1) + ("shared_expert_size",):
        if (size := getattr(model, name)) % recipe.parallel.tp:
            problem = f"tensor-parallel ranks need equal parts of {name} = {size}"
            remedy = f"set it to a divisor of {size}" + ", or use parallel.ep" * (name == "expert_size")
            raise RecipeError(problem, values={"parallel.tp": recipe.parallel.tp}, remedy=remedy)


def check_device(recipe: Recipe, facts: DeviceFacts) -> None:
    """Reject what the selected device, or this torch, cannot do; a CPU does all, for tests.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    _refuse_broken(recipe, _device_rules(recipe, facts))
    model = model_config(recipe, recipe.model.vocab_size or 1)
    if facts.type == "cuda" and model.has_experts:
        _refuse_broken(recipe, _grouped_kernel_rules(recipe, facts, model))


def _refuse_broken(recipe: Recipe, rules: Iterable[Rule]) -> None:
    """Raise the first broken rule; its texts name the section by the name under which the engine is registered."""
    section = f"engine.{recipe.run.engine}."
    for is_broken, *texts in rules:
        if is_broken:
            fields, problem, remedy = (text.replace("engine.gpu.", section) for text in texts)
            raise RecipeError(problem, values={name: _value_of(recipe, name) for name in fields.split()}, remedy=remedy)


def _value_of(recipe: Recipe, name: str) -> object:
    found: Any = recipe
    for part in name.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found


def _recipe_rules(recipe: Recipe, world: World) -> Iterator[Rule]:
    parallel, model, data, batch = recipe.parallel, recipe.model, recipe.data, recipe.batch
    options = gpu_options(recipe)
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    yield Rule(
        parallel.n_nodes != world.n_nodes,
        "parallel.n_nodes",
        f"the ranks were started on {world.n_nodes} node(s)",
        "set parallel.n_nodes (NUM_NODES) to the number of nodes, or start the ranks on that many",
    )
    sizes = ["n_kv_heads", "n_heads"]
    if model_config(recipe, model.vocab_size or 1).has_dense_layers:
        sizes.append("intermediate_size")
    fits = math.gcd(*(getattr(model, name) for name in sizes))
    for name in sizes:
        yield Rule(
            getattr(model, name) % tp > 0,
            f"parallel.tp model.{name}",
            f"tensor-parallel ranks need whole heads and equal parts, and parallel.tp does not divide model.{name}",
            f"set parallel.tp to a divisor of {fits}, and use more data-parallel ranks instead",
        )
    yield Rule(
        world.local_size % tp > 0,
        "parallel.tp",
        "a tensor-parallel group would be on several nodes",
        f"set parallel.tp to a divisor of {world.local_size}, the ranks of a node, and use parallel.cp or parallel.pp "
        "over nodes",
    )
    divisor = math.lcm(2 if cp > 1 else 1, tp if parallel.sequence_parallel else 1) * cp
    axis, what = "parallel.cp", "each context-parallel rank has two equal chunks of every row"
    if cp == 1:
        axis, what = "parallel.tp", "sequence parallelism splits the positions evenly over tensor-parallel ranks"
    elif divisor > 2 * cp:
        what += ", each of them over its tensor-parallel ranks"
    remedy = f"set data.seq_len (SEQ_LEN) to a multiple of {divisor}, or lower {axis}"
    yield Rule(data.seq_len % divisor > 0, f"data.seq_len {axis}", what, remedy)
    yield Rule(
        cp > 1 and options.attention not in CONTEXT_PARALLEL_ATTENTION,
        "engine.gpu.attention parallel.cp",
        "this attention backend takes as many keys as queries; context-parallel ranks have keys of other ranks too",
        f"set engine.gpu.attention to one of {', '.join(CONTEXT_PARALLEL_ATTENTION)}, or parallel.cp to 1",
    )
    yield Rule(
        options.attention == "flash" and data.document_mask,
        "engine.gpu.attention data.document_mask",
        "torch's flash kernel takes no mask, so it cannot keep the documents of a row apart",
        "set engine.gpu.attention to auto or varlen, or data.document_mask to false",
    )
    dp = parallel.data_parallel_size(world.size)
    yield from _expert_rules(recipe, dp // parallel.dp_replicate * cp * tp)
    n_sharing = {"pipeline_stages_per_rank": pp, "reshard_after_forward": dp * cp, "reduce_each_micro_batch": dp * cp}
    for name, n_ranks in n_sharing.items():
        yield Rule(
            n_ranks == 1 and getattr(options, name) != getattr(GpuOptions(), name),
            f"engine.gpu.{name}",
            f"has no effect: there is one {'pipeline' if 'pipeline' in name else 'data-parallel'} rank",
            f"leave engine.gpu.{name} out, or start more ranks",
        )
    stages, pipeline = pp * options.pipeline_stages_per_rank, "parallel.pp engine.gpu.pipeline_stages_per_rank"
    yield Rule(
        stages > model.n_layers,
        f"{pipeline} model.n_layers",
        "each pipeline stage needs a layer",
        f"set parallel.pp or engine.gpu.pipeline_stages_per_rank so that their product is at most {model.n_layers}",
    )
    rows = batch.micro_batch_size * dp * pp
    ramp = " batch.ramp.start batch.ramp.increment" if batch.ramp.start else ""
    yield Rule(
        options.pipeline_stages_per_rank > 1 and batch.step_size_divisor % rows > 0,
        f"{pipeline} batch.global_batch_size batch.micro_batch_size{ramp}",
        "an interleaved pipeline runs the micro-batches of each data-parallel rank in groups of parallel.pp, so every "
        f"step needs a multiple of {rows} rows",
        f"set the batch (and its ramp) to multiples of {rows}, or engine.gpu.pipeline_stages_per_rank to 1",
    )
    yield Rule(
        options.activation_offload and model.n_layers < 2 * stages,
        "engine.gpu.activation_offload model.n_layers parallel.pp",
        "activations of a stage's last block stay on the device, and a stage has no other block",
        "leave engine.gpu.activation_offload out",
    )
    if options.fp8 != "off":
        yield from _fp8_rules(recipe, options)
    if options.cuda_graphs:
        yield from _graph_rules(recipe, options, world)
    if recipe.optimizer.weights_dtype == "bfloat16":
        yield Rule(
            options.dtype not in ("auto", "bfloat16"),
            "optimizer.weights_dtype engine.gpu.dtype",
            "weights in bfloat16 need a forward pass in bfloat16",
            "set engine.gpu.dtype to bfloat16, or optimizer.weights_dtype to float32",
        )
        yield Rule(
            options.reduce_each_micro_batch,
            "optimizer.weights_dtype engine.gpu.reduce_each_micro_batch",
            "gradients of micro-batches would be summed in bfloat16",
            "set engine.gpu.reduce_each_micro_batch to false, or optimizer.weights_dtype to float32",
        )
    if options.device not in ("auto", "cuda"):
        yield _memory_history_rule(recipe, options.device)


def _expert_rules(recipe: Recipe, n_ranks: int) -> Iterator[Rule]:
    parallel, n_experts = recipe.parallel, model_config(recipe, recipe.model.vocab_size or 1).n_experts
    for size, what in ((n_experts, "experts"), (n_ranks, "ranks of dp_shard x cp x tp")):
        yield Rule(
            size % parallel.ep > 0,
            "parallel.ep",
            f"expert-parallel ranks have equal parts of the {what}, and there are {size}",
            f"set parallel.ep to a divisor of {math.gcd(n_experts, n_ranks)}",
        )
    yield Rule(
        parallel.ep > 1 and parallel.tp > 1 and not parallel.sequence_parallel,
        "parallel.ep parallel.tp parallel.sequence_parallel",
        "each tensor-parallel rank would send the same tokens to the experts",
        "set parallel.sequence_parallel to true, or parallel.tp or parallel.ep to 1",
    )


def _graph_rules(recipe: Recipe, options: GpuOptions, world: World) -> Iterator[Rule]:
    field, remedy = "engine.gpu.cuda_graphs", "leave engine.gpu.cuda_graphs out"
    problem = f"collectives in a graph have no timeout, so {world.size} ranks could wait for a lost one forever"
    yield Rule(world.size > 1, field, problem, remedy)
    problem = "the host directs every copy to its memory, and a graph runs without it"
    for name in ("engine.gpu.activation_offload", "engine.gpu.optimizer_offload"):
        yield Rule(bool(_value_of(recipe, name)), f"{field} {name}", problem, f"{remedy}, or {name}")
    is_read = recipe.data.document_mask and options.attention not in GRAPH_ATTENTION
    problem = "this attention reads the documents' boundaries on the host, and a graph runs without it"
    remedy = f"set engine.gpu.attention to one of {', '.join(GRAPH_ATTENTION)}, or data.document_mask to false"
    yield Rule(is_read, f"{field} engine.gpu.attention data.document_mask", problem, remedy)


def fp8_products(config: ModelConfig, skipped_blocks: int) -> list[ParamSpec]:
    """Return the weights whose products are in float8: the matrices of all blocks but so many at either end."""
    inner = range(skipped_blocks, config.n_layers - skipped_blocks)
    return [spec for spec in param_specs(config) if spec.type == "matrix" and spec.layer in inner]


def _fp8_rules(recipe: Recipe, options: GpuOptions) -> Iterator[Rule]:
    model, tp, cp = recipe.model, recipe.parallel.tp, recipe.parallel.cp
    yield Rule(
        2 * options.fp8_skipped_blocks >= model.n_layers,
        "engine.gpu.fp8 engine.gpu.fp8_skipped_blocks",
        f"none of the {model.n_layers} blocks would compute in float8",
        "lower engine.gpu.fp8_skipped_blocks, or set engine.gpu.fp8 to off",
    )
    config = model_config(recipe, model.vocab_size or 1)
    yield Rule(
        config.kv_rank > 0 and tp > 1,
        "engine.gpu.fp8 parallel.tp",
        "tensor-parallel ranks would not add up the gradients of latent attention's products that are in float8",
        "set engine.gpu.fp8 to off, or parallel.tp to 1",
    )
    if config.kv_rank:
        for spec in fp8_products(config, options.fp8_skipped_blocks):
            yield Rule(
                any(size % FP8_MULTIPLE for size in spec.shape),
                "engine.gpu.fp8",
                f"float8 products need multiples of {FP8_MULTIPLE} features, and {spec.name} has {list(spec.shape)}",
                "set engine.gpu.fp8 to off, or take a model with other sizes",
            )
    kv_width = 0 if config.kv_rank else model.n_kv_heads * config.head_width
    sizes = [
        ("model.hidden_size parallel.tp", model.hidden_size // tp, "features"),
        ("model.n_kv_heads parallel.tp", kv_width // tp, "features"),
        ("model.intermediate_size parallel.tp", model.intermediate_size // tp, "features"),
        ("data.seq_len parallel.cp", recipe.data.seq_len // cp, "tokens"),
    ]
    for fields, size, unit in sizes:
        yield Rule(
            size % FP8_MULTIPLE > 0,
            f"engine.gpu.fp8 {fields}",
            f"float8 products need multiples of {FP8_MULTIPLE} {unit}, and a rank has {size}",
            "change the field or the parallel degree, or set engine.gpu.fp8 to off",
        )


def _device_rules(recipe: Recipe, facts: DeviceFacts) -> Iterator[Rule]:
    options = gpu_options(recipe)
    has_fp8 = facts.type == "cpu" or (facts.type == "cuda" and not facts.is_rocm and facts.capability >= FP8_CAPABILITY)
    found = "ROCm" if facts.is_rocm else f"{facts.type} of compute capability {'.'.join(map(str, facts.capability))}"
    yield Rule(
        options.fp8 != "off" and not has_fp8,
        "engine.gpu.fp8",
        f"float8 products need cuda of compute capability {'.'.join(map(str, FP8_CAPABILITY))}, and this is {found}",
        "set engine.gpu.fp8 to off",
    )
    for name in ("activation_offload", "optimizer_offload"):
        yield Rule(
            getattr(options, name) and facts.type not in ("cuda", "cpu"),
            f"engine.gpu.{name}",
            f"offloads from cuda only, not from {facts.type}",
            f"leave engine.gpu.{name} out",
        )
    needed, has_cuda = ".".join(map(str, GRAPH_TORCH_VERSION)), facts.type == "cuda"
    problem = f"graphs need cuda and torch {needed} or newer, and this is {facts.type} and torch {facts.torch_version}"
    is_broken = options.cuda_graphs and (not has_cuda or parse_torch_version(facts.torch_version) < GRAPH_TORCH_VERSION)
    yield Rule(is_broken, "engine.gpu.cuda_graphs", problem, "leave engine.gpu.cuda_graphs out")
    yield Rule(
        options.compile is True and parse_torch_version(facts.torch_version) not in COMPILE_TORCH_VERSIONS,
        "engine.gpu.compile",
        f"compiled blocks have not passed the parity tests with torch {facts.torch_version}",
        f"set engine.gpu.compile to false, or install torch {passed_versions()}",
    )
    yield Rule(
        recipe.optimizer.weights_dtype == "bfloat16" and facts.dtype != "bfloat16",
        "optimizer.weights_dtype engine.gpu.dtype",
        f"weights in bfloat16 need a forward pass in bfloat16, not {facts.dtype}",
        "set engine.gpu.dtype to bfloat16, or optimizer.weights_dtype to float32",
    )
    yield Rule(
        recipe.parallel.ep > 1 and parse_torch_version(facts.torch_version) < EP_TORCH_VERSION,
        "parallel.ep",
        f"expert parallelism needs torch {'.'.join(map(str, EP_TORCH_VERSION))} or newer, not {facts.torch_version}",
        "set parallel.ep to 1, or install a newer torch",
    )
    if facts.type != "cuda":
        yield _memory_history_rule(recipe, facts.type)


def _grouped_kernel_rules(recipe: Recipe, facts: DeviceFacts, model: ModelConfig) -> Iterator[Rule]:
    multiple = 4 if facts.dtype == "float32" else 8
    needs = f"and the grouped kernel of experts needs multiples of 16 bytes, in {facts.dtype} of {multiple}"
    yield Rule(
        model.hidden_size % multiple > 0,
        "model.hidden_size",
        f"a row has {model.hidden_size} numbers, {needs}",
        f"set model.hidden_size to a multiple of {multiple}",
    )
    is_split = recipe.parallel.tp > 1 and recipe.parallel.ep == 1
    size = model.expert_size // recipe.parallel.tp if is_split else model.expert_size
    yield Rule(
        size % multiple > 0,
        "parallel.tp parallel.ep" if is_split else "model.shape",
        f"a rank has {size} of expert_size = {model.expert_size}, {needs}",
        "lower parallel.tp, or use parallel.ep" if is_split else "take a model whose expert_size is such a multiple",
    )


def _memory_history_rule(recipe: Recipe, device_type: str) -> Rule:
    metrics = recipe.metrics
    return Rule(
        bool(metrics.memory_snapshot_step or metrics.memory_snapshot_on_oom),
        "metrics.memory_snapshot_step metrics.memory_snapshot_on_oom",
        f"torch records a history of CUDA memory only, and this run computes on {device_type}",
        "leave them out; metrics.monitor_interval_s samples the memory of processes",
    )


def passed_versions() -> str:
    """Return the torch versions whose compiled blocks passed the parity tests, as text."""
    return " or ".join(f"{major}.{minor}" for major, minor in COMPILE_TORCH_VERSIONS)


def parse_torch_version(torch_version: str) -> tuple[int, int]:
    """Return major and minor of a version such as "2.11.0+cu130"."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)
