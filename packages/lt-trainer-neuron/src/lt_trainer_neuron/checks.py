"""Recipe checks of the Trainium engine: shardable and schedulable by neuronx-distributed (NxD).

Integer arithmetic, without the Neuron packages. NxD fails silently in some cases (integer division of the batch size,
query heads dropped when replicated key/value heads do not match the degree); these checks raise instead.
"""

from typing import TYPE_CHECKING

from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import optimizer_spec
from lt_trainer_neuron.options import SECTION, NeuronOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import World


FLASH_SEQ_LEN_MULTIPLE = 2048
"""NxD's flash attention kernel requires row lengths that are multiples of this."""


def check_recipe(recipe: Recipe, world: "World") -> None:
    """Raise unless the engine can run the recipe.

    Args:
        recipe: The recipe, with or without an `[engine.neuron]` section.
        world: The ranks; a world of one rank means "not started yet": the recipe's nodes are assumed.

    Raises:
        RecipeError: A check failed; names the fields, their values and the remedy.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    ranks = _check_ranks(recipe, options, world)
    _check_unsupported(recipe, options)
    _check_tensor_parallel(recipe, options)
    _check_pipeline(recipe, options)
    _check_heads(recipe, options)
    _check_batch(recipe, ranks)
    _check_seq_len(recipe)


def check_model(recipe: Recipe, model: "LlamaConfig") -> None:
    """Raise unless the vocabulary can be sharded; its size is known only once the data is open.

    Raises:
        RecipeError: vocab_size is not a multiple of tp.
    """
    if model.vocab_size % recipe.parallel.tp:
        raise _divisibility_error(
            "model.vocab_size", model.vocab_size, recipe.parallel.tp, "prepare a vocabulary of such a size"
        )


def _check_ranks(recipe: Recipe, options: NeuronOptions, world: "World") -> int:
    cores, nodes = options.num_neuroncores, recipe.parallel.n_nodes
    planned = cores * nodes
    if world.size > 1 and (world.local_size != cores or world.size != planned):
        raise RecipeError(
            f"one rank per NeuronCore makes {planned} ranks, {cores} per node; the run has {world.size}, "
            f"{world.local_size} per node",
            values={f"{SECTION}.num_neuroncores": cores, "parallel.n_nodes": nodes},
            remedy=f"start it with torchrun --nnodes {nodes} --nproc_per_node {cores}, or set these fields to "
            "the run's ranks",
        )
    return planned


def _check_unsupported(recipe: Recipe, options: NeuronOptions) -> None:
    """Raise if the recipe uses a feature this engine does not support."""
    if recipe.parallel.cp != 1:
        problem, remedy = "this engine has no context parallelism", "set parallel.cp to 1"
        raise RecipeError(problem, values={"parallel.cp": recipe.parallel.cp}, remedy=remedy)
    if recipe.parallel.dp_replicate != 1:
        raise RecipeError(
            "this engine shards optimizer state over all data parallel ranks or over none",
            values={"parallel.dp_replicate": recipe.parallel.dp_replicate, f"{SECTION}.zero1": options.zero1},
            remedy="set parallel.dp_replicate to 1, and engine.neuron.zero1 to false for none",
        )
    if recipe.batch.ramp.start:
        raise RecipeError(
            "shapes are fixed on Trainium: each batch size would be compiled separately",
            values={"batch.ramp.start": recipe.batch.ramp.start},
            remedy="leave batch.ramp out",
        )
    if recipe.optimizer.moments_dtype != "float32":
        raise RecipeError(
            "this engine keeps moments in the dtype of the master weights",
            values={"optimizer.moments_dtype": recipe.optimizer.moments_dtype},
            remedy="set optimizer.moments_dtype to float32",
        )
    _check_optimizer(recipe)
    _check_flash(recipe, options)


def _check_optimizer(recipe: Recipe) -> None:
    """Raise if the optimizer needs more than an update per slice with one learning rate."""
    spec = optimizer_spec(recipe.optimizer.name)
    if spec.transform is not None:
        raise RecipeError(
            "this engine updates slices, and this optimizer needs whole matrices",
            values={"optimizer.name": spec.name},
            remedy="set optimizer.name to adamw, or run.engine to gpu",
        )
    if recipe.optimizer.weights_dtype != "float32":
        raise RecipeError(
            "this engine leaves stochastic rounding to the device",
            values={"optimizer.weights_dtype": recipe.optimizer.weights_dtype},
            remedy=f"set optimizer.weights_dtype to float32; {SECTION}.precision = 'bf16_sr' has no master weights",
        )
    lr_scale = recipe.optimizer.lr_scale
    for name in vars(lr_scale):
        if getattr(lr_scale, name) != 1:
            raise RecipeError(
                "the optimizer files of NxD have one learning rate",
                values={f"optimizer.lr_scale.{name}": getattr(lr_scale, name)},
                remedy="leave optimizer.lr_scale out, or set run.engine to gpu",
            )
    for slot in spec.slots:
        if slot.dtype(recipe.optimizer):
            raise RecipeError(
                "this engine keeps optimizer state in the dtype of the master weights, which the slot "
                f"{slot.name!r} has not",
                values={"optimizer.name": recipe.optimizer.name},
                remedy="set another optimizer.name",
            )


def _check_flash(recipe: Recipe, options: NeuronOptions) -> None:
    if not options.flash_attention:
        return
    if recipe.data.document_mask:
        raise RecipeError(
            "the flash attention kernel has no document mask",
            values={f"{SECTION}.flash_attention": True, "data.document_mask": True},
            remedy="set one of them to false",
        )
    if recipe.data.seq_len % FLASH_SEQ_LEN_MULTIPLE:
        raise RecipeError(
            f"the flash attention kernel requires rows of a multiple of {FLASH_SEQ_LEN_MULTIPLE} positions",
            values={"data.seq_len": recipe.data.seq_len, f"{SECTION}.flash_attention": True},
            remedy=f"set data.seq_len (SEQ_LEN) to a multiple of {FLASH_SEQ_LEN_MULTIPLE}, or flash_attention to false",
        )


def _check_tensor_parallel(recipe: Recipe, options: NeuronOptions) -> None:
    tp, cores = recipe.parallel.tp, options.num_neuroncores
    if tp & (tp - 1):
        below = 1 << (tp.bit_length() - 1)
        problem, remedy = (
            "the tensor parallel degree must be a power of 2",
            f"set parallel.tp to {below} or {2 * below}",
        )
        raise RecipeError(problem, values={"parallel.tp": tp}, remedy=remedy)
    if tp > cores:
        raise RecipeError(
            "tensor parallel ranks must be on one node",
            values={"parallel.tp": tp, f"{SECTION}.num_neuroncores": cores},
            remedy=f"set parallel.tp to at most {cores}",
        )
    model = recipe.model
    for name in ("n_heads", "hidden_size", "intermediate_size", "vocab_size"):
        if getattr(model, name) % tp:
            raise _divisibility_error(f"model.{name}", getattr(model, name), tp, "change it")


def _check_pipeline(recipe: Recipe, options: NeuronOptions) -> None:
    """Raise unless every stage has a layer and the backend supports the pipeline options.

    The cpu backend accepts options that pipeline stages on the device do not support.
    """
    stages, model = recipe.parallel.pp, recipe.model
    if stages > model.n_layers:
        raise RecipeError(
            "every pipeline stage needs a layer",
            values={"parallel.pp": stages, "model.n_layers": model.n_layers},
            remedy=f"set parallel.pp to at most {model.n_layers}",
        )
    if stages == 1 or options.backend == "cpu":
        return
    if stages % 2:
        raise RecipeError(
            "NxD pairs adjacent stages, the last with the first; of an odd number one would be in two pairs",
            values={"parallel.pp": stages},
            remedy=f"set parallel.pp to {stages - 1} or {stages + 1}",
        )
    if options.graph_scope == "step":
        raise RecipeError(
            "transfers between stages have their own graphs, so a step cannot be one graph",
            values={f"{SECTION}.graph_scope": options.graph_scope, "parallel.pp": stages},
            remedy="set engine.neuron.graph_scope to micro_batch, or parallel.pp to 1",
        )
    if model.tie_word_embeddings and options.precision == "bf16_sr":
        raise RecipeError(
            "the first and the last stage would round their replicas of the tied embedding at random, and differently",
            values={
                "model.tie_word_embeddings": True,
                "parallel.pp": stages,
                f"{SECTION}.precision": options.precision,
            },
            remedy="set engine.neuron.precision to downcast or fp32_master_weights, or parallel.pp to 1",
        )


def _divisibility_error(name: str, value: int, tp: int, otherwise: str) -> RecipeError:
    return RecipeError(
        "must be a multiple of the tensor parallel degree",
        values={name: value, "parallel.tp": tp},
        remedy=f"set parallel.tp to a power of 2 that divides {value}, or {otherwise}",
    )


def _check_heads(recipe: Recipe, options: NeuronOptions) -> None:
    """Check key/value heads against tp.

    Each rank holds whole heads, or with qkv_linear exactly one (replicated) head.
    """
    heads, tp = recipe.model.n_kv_heads, recipe.parallel.tp
    values: dict[str, object] = {"model.n_kv_heads": heads, "parallel.tp": tp}
    if options.qkv_linear:
        values |= {f"{SECTION}.kv_size_multiplier": options.kv_size_multiplier}
        if heads * options.kv_size_multiplier != tp:
            fits = f"set engine.neuron.kv_size_multiplier to {tp // heads}" if tp % heads == 0 else "change parallel.tp"
            raise RecipeError(
                "with qkv_linear, n_kv_heads * kv_size_multiplier must equal tp",
                values=values,
                remedy=f"{fits}, or set engine.neuron.qkv_linear to false",
            )
    elif heads % tp:
        fits = f"set engine.neuron.qkv_linear to true and engine.neuron.kv_size_multiplier to {tp // heads}"
        raise RecipeError(
            "the key/value heads must be divisible by the tensor parallel degree",
            values=values,
            remedy=(f"{fits}, or " if tp % heads == 0 else "") + f"set parallel.tp to a divisor of {heads}",
        )


def _check_batch(recipe: Recipe, ranks: int) -> None:
    """Check that ACC = GBS / (MBS * DP) is an integer.

    Rounding it down would train with a different batch size.
    """
    dp = recipe.parallel.data_parallel_size(ranks)
    batch = recipe.batch
    rows = batch.micro_batch_size * dp
    if batch.global_batch_size % rows:
        accumulation = batch.global_batch_size / rows
        raise RecipeError(
            f"accumulation steps (ACC) = global_batch_size / (micro_batch_size * DP) = {accumulation:.6g} is not a "
            f"whole number, with DP = {dp} data parallel ranks",
            values={
                "batch.global_batch_size": batch.global_batch_size,
                "batch.micro_batch_size": batch.micro_batch_size,
            },
            remedy=f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of {rows}",
        )


def _check_seq_len(recipe: Recipe) -> None:
    seq_len, longest, tp = recipe.data.seq_len, recipe.model.max_position_embeddings, recipe.parallel.tp
    if longest not in (0, seq_len):
        raise RecipeError(
            "rows must be as long as the model's context",
            values={"data.seq_len": seq_len, "model.max_position_embeddings": longest},
            remedy=f"set data.seq_len (SEQ_LEN) to {longest}, or model.max_position_embeddings to 0 (= data.seq_len)",
        )
    if recipe.parallel.sequence_parallel and seq_len % tp:
        raise RecipeError(
            "sequence parallelism splits rows into tp equal parts",
            values={"data.seq_len": seq_len, "parallel.tp": tp},
            remedy=f"set data.seq_len (SEQ_LEN) to a multiple of {tp}",
        )
