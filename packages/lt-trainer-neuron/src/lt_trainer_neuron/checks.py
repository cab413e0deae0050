"""Recipe checks of the Trainium engine: shardable and schedulable by neuronx-distributed (NxD).

Integer arithmetic, without the Neuron packages: a table of condition, fields, sentence and remedy, read in order up to
the first condition that holds. NxD fails silently in some cases (integer division of the batch size, query heads
dropped when replicated key/value heads do not match the degree); these checks raise instead.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from lt_trainer.config.recipe import check_features, engine_options, model_config
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import optimizer_spec
from lt_trainer_neuron.options import SECTION, NeuronOptions

if TYPE_CHECKING:
    from lt_model import ModelConfig
    from lt_trainer.engine import World


FLASH_SEQ_LEN_MULTIPLE = 2048
"""NxD's flash attention kernel requires row lengths that are multiples of this."""

Check = tuple[object, str, str, str]
"""Condition that must not hold; names of the fields, where `neuron.` stands for the engine's; sentence; remedy."""


def check_recipe(recipe: Recipe, world: "World") -> None:
    """Raise unless the engine can run the recipe.

    Args:
        recipe: The recipe, with or without an `[engine.neuron]` section.
        world: The ranks; a world of one rank means "not started yet": the recipe's nodes are assumed.

    Raises:
        RecipeError: A check failed; names the fields, their values and the remedy.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    for checks in (_iter_ranks, _iter_unsupported, _iter_degrees, _iter_heads_and_rows):
        for is_wrong, fields, problem, remedy in checks(recipe, options, world):
            if is_wrong:
                raise RecipeError(
                    problem, values=dict(_read_field(recipe, options, name) for name in fields.split()), remedy=remedy
                )
    model = model_config(recipe, recipe.model.vocab_size or 1)
    check_features(model, "the engine neuron", ("kv_rank", "n_experts", "sinks"))
    if options.flash_attention:
        check_features(model, f"{SECTION}.flash_attention", ("sliding_window", "attention_softcap"))
    if (copies := options.kv_size_multiplier) > 1:  # NxD does not sum the gradients of a head's biases over its copies
        lacks = ("qkv_bias", "qk_norm") if model.qk_norm == "full" else ("qkv_bias",)
        check_features(model, f"{SECTION}.kv_size_multiplier = {copies}", lacks)


def check_model(recipe: Recipe, model: "ModelConfig") -> None:
    """Raise unless the vocabulary can be sharded; its size is known only once the data is open.

    Raises:
        RecipeError: vocab_size is not a multiple of tp.
    """
    if model.vocab_size % recipe.parallel.tp:
        raise RecipeError(
            "must be a multiple of the tensor parallel degree",
            values={"model.vocab_size": model.vocab_size, "parallel.tp": recipe.parallel.tp},
            remedy=f"set parallel.tp to a power of 2 that divides {model.vocab_size}, or prepare a vocabulary of such "
            "a size",
        )


def _read_field(recipe: Recipe, options: NeuronOptions, name: str) -> tuple[str, object]:
    if name.startswith("neuron."):
        return f"engine.{name}", getattr(options, name.removeprefix("neuron."))
    return name, attrgetter(name)(recipe)


def _iter_ranks(recipe: Recipe, options: NeuronOptions, world: "World") -> Iterator[Check]:
    cores, nodes = options.num_neuroncores, recipe.parallel.n_nodes
    yield (
        world.size > 1 and (world.local_size != cores or world.size != cores * nodes),
        "neuron.num_neuroncores parallel.n_nodes",
        f"one rank per NeuronCore makes {cores * nodes} ranks, {cores} per node; the run has {world.size}, "
        f"{world.local_size} per node",
        f"start it with torchrun --nnodes {nodes} --nproc_per_node {cores}, or set these fields to the run's ranks",
    )


def _iter_unsupported(recipe: Recipe, options: NeuronOptions, world: "World") -> Iterator[Check]:
    """Yield features that this engine does not have."""
    parallel, optimizer, flash = recipe.parallel, recipe.optimizer, options.flash_attention
    spec = optimizer_spec(optimizer.name)
    yield parallel.cp != 1, "parallel.cp", "this engine has no context parallelism", "set parallel.cp to 1"
    yield (
        parallel.dp_replicate != 1,
        "parallel.dp_replicate neuron.zero1",
        "this engine shards optimizer state over all data parallel ranks or over none",
        "set parallel.dp_replicate to 1, and engine.neuron.zero1 to false for none",
    )
    yield (
        recipe.batch.ramp.start,
        "batch.ramp.start",
        "shapes are fixed on Trainium: each batch size would be compiled separately",
        "leave batch.ramp out",
    )
    yield (
        optimizer.moments_dtype != "float32",
        "optimizer.moments_dtype",
        "this engine keeps moments in the dtype of the master weights",
        "set optimizer.moments_dtype to float32",
    )
    yield (
        spec.transform is not None,
        "optimizer.name",
        "this engine updates slices, and this optimizer needs whole matrices",
        "set optimizer.name to adamw, or run.engine to gpu",
    )
    yield (
        optimizer.weights_dtype != "float32",
        "optimizer.weights_dtype",
        "this engine leaves stochastic rounding to the device",
        f"set optimizer.weights_dtype to float32; {SECTION}.precision = 'bf16_sr' has no master weights",
    )
    for name, scale in vars(optimizer.lr_scale).items():
        problem, remedy = "the optimizer files of NxD have one learning rate", "leave optimizer.lr_scale out"
        yield scale != 1, f"optimizer.lr_scale.{name}", problem, f"{remedy}, or set run.engine to gpu"
    for slot in spec.slots:
        problem = "this engine keeps optimizer state in the dtype of the master weights, which the slot"
        yield slot.dtype(optimizer), "optimizer.name", f"{problem} {slot.name!r} has not", "set another optimizer.name"
    yield (
        flash and recipe.data.document_mask,
        "neuron.flash_attention data.document_mask",
        "the flash attention kernel has no document mask",
        "set one of them to false",
    )
    multiple = f"a multiple of {FLASH_SEQ_LEN_MULTIPLE}"
    yield (
        flash and recipe.data.seq_len % FLASH_SEQ_LEN_MULTIPLE,
        "data.seq_len neuron.flash_attention",
        f"the flash attention kernel requires rows of {multiple} positions",
        f"set data.seq_len (SEQ_LEN) to {multiple}, or flash_attention to false",
    )


def _iter_degrees(recipe: Recipe, options: NeuronOptions, world: "World") -> Iterator[Check]:
    """Yield degrees that do not divide the model, and what stages cannot do on the device, unlike the cpu backend."""
    model, tp, pp, cores = recipe.model, recipe.parallel.tp, recipe.parallel.pp, options.num_neuroncores
    below, on_device = 1 << (tp.bit_length() - 1), pp > 1 and options.backend != "cpu"
    yield (
        tp & (tp - 1),
        "parallel.tp",
        "the tensor parallel degree must be a power of 2",
        f"set parallel.tp to {below} or {2 * below}",
    )
    yield (
        tp > cores,
        "parallel.tp neuron.num_neuroncores",
        "tensor parallel ranks must be on one node",
        f"set parallel.tp to at most {cores}",
    )
    for name in ("n_heads", "intermediate_size", "vocab_size"):
        value, problem = getattr(model, name), "must be a multiple of the tensor parallel degree"
        remedy = f"set parallel.tp to a power of 2 that divides {value}, or change it"
        yield value % tp, f"model.{name} parallel.tp", problem, remedy
    yield (
        pp > model.n_layers,
        "parallel.pp model.n_layers",
        "every pipeline stage needs a layer",
        f"set parallel.pp to at most {model.n_layers}",
    )
    yield (
        on_device and pp % 2,
        "parallel.pp",
        "NxD pairs adjacent stages, the last with the first; of an odd number one would be in two pairs",
        f"set parallel.pp to {pp - 1} or {pp + 1}",
    )
    yield (
        on_device and options.graph_scope == "step",
        "neuron.graph_scope parallel.pp",
        "transfers between stages have their own graphs, so a step cannot be one graph",
        "set engine.neuron.graph_scope to micro_batch, or parallel.pp to 1",
    )
    yield (
        on_device and model.tie_word_embeddings and options.precision == "bf16_sr",
        "model.tie_word_embeddings parallel.pp neuron.precision",
        "the first and the last stage would round their replicas of the tied embedding at random, and differently",
        "set engine.neuron.precision to downcast or fp32_master_weights, or parallel.pp to 1",
    )


def _iter_heads_and_rows(recipe: Recipe, options: NeuronOptions, world: "World") -> Iterator[Check]:
    """Yield what does not divide into heads, micro-batches and positions.

    Each rank holds whole key/value heads, or with qkv_linear exactly one (replicated) head. ACC = GBS / (MBS * DP) is
    an integer: rounding it down would train with a different batch size.
    """
    heads, tp, seq_len, batch = recipe.model.n_kv_heads, recipe.parallel.tp, recipe.data.seq_len, recipe.batch
    multiplier = f"engine.neuron.kv_size_multiplier to {tp // heads}"
    yield (
        options.qkv_linear and heads * options.kv_size_multiplier != tp,
        "model.n_kv_heads parallel.tp neuron.kv_size_multiplier",
        "with qkv_linear, n_kv_heads * kv_size_multiplier must equal tp",
        ("change parallel.tp" if tp % heads else f"set {multiplier}") + ", or set engine.neuron.qkv_linear to false",
    )
    yield (
        not options.qkv_linear and heads % tp,
        "model.n_kv_heads parallel.tp",
        "the key/value heads must be divisible by the tensor parallel degree",
        ("" if tp % heads else f"set engine.neuron.qkv_linear to true and {multiplier}, or ")
        + f"set parallel.tp to a divisor of {heads}",
    )
    dp = recipe.parallel.data_parallel_size(options.num_neuroncores * recipe.parallel.n_nodes)
    rows = batch.micro_batch_size * dp
    yield (
        batch.global_batch_size % rows,
        "batch.global_batch_size batch.micro_batch_size",
        "accumulation steps (ACC) = global_batch_size / (micro_batch_size * DP) = "
        f"{batch.global_batch_size / rows:.6g} is not a whole number, with DP = {dp} data parallel ranks",
        f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of {rows}",
    )
    longest = recipe.model.max_position_embeddings
    yield (
        longest not in (0, seq_len),
        "data.seq_len model.max_position_embeddings",
        "rows must be as long as the model's context",
        f"set data.seq_len (SEQ_LEN) to {longest}, or model.max_position_embeddings to 0 (= data.seq_len)",
    )
    yield (
        recipe.parallel.sequence_parallel and seq_len % tp,
        "data.seq_len parallel.tp",
        "sequence parallelism splits rows into tp equal parts",
        f"set data.seq_len (SEQ_LEN) to a multiple of {tp}",
    )
