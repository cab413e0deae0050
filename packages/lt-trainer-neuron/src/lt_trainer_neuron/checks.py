"""What a recipe must hold so that neuronx-distributed can shard and schedule it: integer arithmetic, no Neuron package.

Where NxD itself goes wrong in silence (an integer division of the batch, query heads that are dropped when replicated
key/value heads do not match the degree), this refuses instead.
"""

from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer_neuron.options import SECTION, NeuronOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import World

__all__ = ["check", "check_model"]

FLASH_MULTIPLE = 2048
"""Rows of other lengths are not for NxD's kernel."""


def check(recipe: Recipe, world: "World") -> None:
    """Refuse a recipe that the engine could not run.

    Args:
        recipe: The recipe, with or without an `[engine.neuron]` section.
        world: The ranks; a world of one rank means "not started yet", and the nodes of the recipe are assumed.

    Raises:
        RecipeError: naming the fields, their values and what to set.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    ranks = _check_ranks(recipe, options, world)
    _check_missing(recipe, options)
    _check_tensor_parallel(recipe, options)
    _check_stages(recipe, options)
    _check_heads(recipe, options)
    _check_batch(recipe, ranks)
    _check_lengths(recipe)


def check_model(recipe: Recipe, model: "LlamaConfig") -> None:
    """Refuse a model whose vocabulary cannot be sharded; it is known only once the data is open.

    Raises:
        RecipeError: vocab_size is not a multiple of tp.
    """
    if model.vocab_size % recipe.parallel.tp:
        raise _indivisible(
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
            remedy=f"start it with torchrun --nnodes {nodes} --nproc_per_node {cores}, or set these to what there is",
        )
    return planned


def _check_missing(recipe: Recipe, options: NeuronOptions) -> None:
    """What this engine does not have."""
    if recipe.parallel.cp != 1:
        problem, remedy = "this engine has no context parallelism", "set parallel.cp to 1"
        raise RecipeError(problem, values={"parallel.cp": recipe.parallel.cp}, remedy=remedy)
    if recipe.parallel.dp_replicate != 1:
        raise RecipeError(
            "this engine shards optimizer state over all data parallel ranks or over none",
            values={"parallel.dp_replicate": recipe.parallel.dp_replicate, f"{SECTION}.zero1": options.zero1},
            remedy="set parallel.dp_replicate to 1, and engine.neuron.zero1 to false for none",
        )
    if recipe.data.pack == "buckets":
        raise RecipeError(
            "shapes are fixed on Trainium, and each length of a bucket would be compiled anew",
            values={"data.pack": recipe.data.pack},
            remedy="set data.pack to bfd or concat",
        )
    if recipe.batch.ramp.start:
        raise RecipeError(
            "shapes are fixed on Trainium, and each size of the batch would be compiled anew",
            values={"batch.ramp.start": recipe.batch.ramp.start},
            remedy="leave batch.ramp out",
        )
    if recipe.optimizer.moments != "float32":
        raise RecipeError(
            "this engine keeps moments in the masters' dtype",
            values={"optimizer.moments": recipe.optimizer.moments},
            remedy="set optimizer.moments to float32",
        )
    _check_flash(recipe, options)


def _check_flash(recipe: Recipe, options: NeuronOptions) -> None:
    if not options.flash_attention:
        return
    if recipe.data.document_mask:
        raise RecipeError(
            "the flash attention kernel knows no document mask",
            values={f"{SECTION}.flash_attention": True, "data.document_mask": True},
            remedy="set one of them to false",
        )
    if recipe.data.seq_len % FLASH_MULTIPLE:
        raise RecipeError(
            f"the flash attention kernel takes rows of a multiple of {FLASH_MULTIPLE} positions",
            values={"data.seq_len": recipe.data.seq_len, f"{SECTION}.flash_attention": True},
            remedy=f"set data.seq_len (SEQ_LEN) to a multiple of {FLASH_MULTIPLE}, or flash_attention to false",
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
            raise _indivisible(f"model.{name}", getattr(model, name), tp, "change it")


def _check_stages(recipe: Recipe, options: NeuronOptions) -> None:
    """Every stage has a layer; and what stages on the device do not have, which the cpu backend takes."""
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
            "NxD makes pairs of neighbouring stages, the last with the first, and of an odd number one is in two pairs",
            values={"parallel.pp": stages},
            remedy=f"set parallel.pp to {stages - 1} or {stages + 1}",
        )
    if options.graph == "step":
        raise RecipeError(
            "what stages give each other stands in graphs of its own, so a step is not one graph",
            values={f"{SECTION}.graph": options.graph, "parallel.pp": stages},
            remedy="set engine.neuron.graph to micro_batch, or parallel.pp to 1",
        )
    if model.tie_word_embeddings and options.precision == "bf16_sr":
        raise RecipeError(
            "the first and the last stage would round their copies of the tied embedding at random, and not alike",
            values={
                "model.tie_word_embeddings": True,
                "parallel.pp": stages,
                f"{SECTION}.precision": options.precision,
            },
            remedy="set engine.neuron.precision to downcast or fp32_master, or parallel.pp to 1",
        )


def _indivisible(name: str, value: int, tp: int, otherwise: str) -> RecipeError:
    return RecipeError(
        "must be a multiple of the tensor parallel degree",
        values={name: value, "parallel.tp": tp},
        remedy=f"set parallel.tp to a power of 2 that divides {value}, or {otherwise}",
    )


def _check_heads(recipe: Recipe, options: NeuronOptions) -> None:
    """Key/value heads against tp: whole heads per rank, or qkv_linear with exactly one (replicated) head per rank."""
    heads, tp = recipe.model.n_kv_heads, recipe.parallel.tp
    values: dict[str, object] = {"model.n_kv_heads": heads, "parallel.tp": tp}
    if options.qkv_linear:
        values |= {f"{SECTION}.kv_replicator": options.kv_replicator}
        if heads * options.kv_replicator != tp:
            fits = f"set engine.neuron.kv_replicator to {tp // heads}" if tp % heads == 0 else "change parallel.tp"
            raise RecipeError(
                "with qkv_linear, n_kv_heads * kv_replicator must equal tp",
                values=values,
                remedy=f"{fits}, or set engine.neuron.qkv_linear to false",
            )
    elif heads % tp:
        fits = f"set engine.neuron.qkv_linear to true and engine.neuron.kv_replicator to {tp // heads}"
        raise RecipeError(
            "the key/value heads do not divide among the tensor parallel ranks",
            values=values,
            remedy=(f"{fits}, or " if tp % heads == 0 else "") + f"set parallel.tp to a divisor of {heads}",
        )


def _check_batch(recipe: Recipe, ranks: int) -> None:
    """ACC = GBS / (MBS * DP) must be whole; dividing it down to an integer would train on another batch size."""
    dp = recipe.parallel.data_parallel(ranks)
    batch = recipe.batch
    rows = batch.micro_batch * dp
    if batch.global_batch % rows:
        accumulation = batch.global_batch / rows
        raise RecipeError(
            f"accumulation steps (ACC) = global_batch / (micro_batch * DP) = {accumulation:.6g} is not a whole number, "
            f"with DP = {dp} data parallel ranks",
            values={"batch.global_batch": batch.global_batch, "batch.micro_batch": batch.micro_batch},
            remedy=f"set batch.global_batch (GLOBAL_BATCH_SIZE) to a multiple of {rows}",
        )


def _check_lengths(recipe: Recipe) -> None:
    seq_len, longest, tp = recipe.data.seq_len, recipe.model.max_position_embeddings, recipe.parallel.tp
    if longest not in (0, seq_len):
        raise RecipeError(
            "rows must be as long as the model's longest context",
            values={"data.seq_len": seq_len, "model.max_position_embeddings": longest},
            remedy=f"set data.seq_len (SEQ_LEN) to {longest}, or model.max_position_embeddings to 0 (= data.seq_len)",
        )
    if recipe.parallel.sequence_parallel and seq_len % tp:
        raise RecipeError(
            "sequence parallelism cuts rows into tp equal parts",
            values={"data.seq_len": seq_len, "parallel.tp": tp},
            remedy=f"set data.seq_len (SEQ_LEN) to a multiple of {tp}",
        )
