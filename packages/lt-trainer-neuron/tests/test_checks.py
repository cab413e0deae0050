"""Which recipes the engine takes: the published Llama recipes pass, and each kind of mistake has its message."""

from dataclasses import replace

import pytest

from lt_model import preset
from lt_trainer.config.recipe import llama_config, load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import OPTIMIZERS
from lt_trainer.optimizers.spec import StateSlot
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.sdk import NotInstalledError
from lt_trainer_neuron.spec import SPEC

ALONE = World()


def recipe(*sets: str) -> Recipe:
    """A recipe of the 7B kind, changed by `sets`."""
    base = {
        "run": {"engine": "neuron"},
        "data": {"store": "stores/train"},
        "model": {"preset": "llama2-7b"},
        "batch": {"global_batch_size": 1024, "micro_batch_size": 1},
        "parallel": {"tp": 8},
    }
    return load(base=base, overrides=sets).recipe


PUBLISHED = {
    "7B on 16 nodes": ("batch.global_batch_size=2048", "parallel.n_nodes=16", "schedule.max_steps=31800"),
    "7B on one node": (),
    "8B with replicated key/value heads": (
        "model.preset=llama3-8b",
        "data.seq_len=8192",
        "parallel.tp=32",
        "parallel.sequence_parallel=true",
        "engine.neuron.qkv_linear=true",
        "engine.neuron.kv_size_multiplier=4",
        "engine.neuron.flash_attention=true",
        "engine.neuron.precision=fp32_master_weights",
        "data.document_mask=false",
    ),
    "70B on 16 nodes": (
        "model.preset=llama3-70b",
        "data.seq_len=8192",
        "parallel.tp=32",
        "parallel.pp=8",
        "parallel.n_nodes=16",
        "engine.neuron.qkv_linear=true",
        "engine.neuron.kv_size_multiplier=4",
        "engine.neuron.fuse_qkv=true",
        "engine.neuron.precision=downcast",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_recipes_pass(name: str) -> None:
    made = recipe(*PUBLISHED[name])
    check_recipe(made, ALONE)
    ranks = 32 * made.parallel.n_nodes
    SPEC.check(made, World(rank=0, size=ranks, local_rank=0, local_size=32))


@pytest.mark.parametrize(
    "sets",
    [
        ("parallel.pp=3", "parallel.n_nodes=3", "engine.neuron.backend=cpu"),
        ("parallel.pp=2", "engine.neuron.graph_scope=step", "engine.neuron.backend=cpu"),
        ("parallel.pp=2", "model.tie_word_embeddings=true", "engine.neuron.precision=downcast"),
        ("parallel.pp=1", "model.tie_word_embeddings=true", "engine.neuron.graph_scope=step"),
    ],
)
def test_what_is_refused_of_stages_is_refused_on_the_device_alone(sets: tuple[str, ...]) -> None:
    if "parallel.pp=3" in sets:
        sets = (*sets, "batch.global_batch_size=1020")
    check_recipe(recipe(*sets), ALONE)


def test_accumulation_of_the_published_7b_recipe() -> None:
    assert recipe(*PUBLISHED["7B on 16 nodes"]).accumulation_steps(32 * 16) == 32


REFUSED = [
    (
        ("parallel.tp=6",),
        "parallel.tp = 6: the tensor parallel degree must be a power of 2; set parallel.tp to 4 or 8",
    ),
    (
        ("parallel.tp=64", "engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2", "parallel.n_nodes=2"),
        "parallel.tp = 64, engine.neuron.num_neuroncores = 32: tensor parallel ranks must be on one node; "
        "set parallel.tp to at most 32",
    ),
    (
        ("parallel.pp=64", "parallel.n_nodes=16"),
        "parallel.pp = 64, model.n_layers = 32: every pipeline stage needs a layer; set parallel.pp to at most 32",
    ),
    (
        ("parallel.pp=3", "parallel.n_nodes=3"),
        "parallel.pp = 3: NxD pairs adjacent stages, the last with the first; of an odd number one would be "
        "in two pairs; set parallel.pp to 2 or 4",
    ),
    (
        ("parallel.pp=2", "engine.neuron.graph_scope=step"),
        "engine.neuron.graph_scope = 'step', parallel.pp = 2: transfers between stages have their own "
        "graphs, so a step cannot be one graph; set engine.neuron.graph_scope to micro_batch, or parallel.pp "
        "to 1",
    ),
    (
        ("parallel.pp=2", "model.tie_word_embeddings=true"),
        "model.tie_word_embeddings = True, parallel.pp = 2, engine.neuron.precision = 'bf16_sr': the first "
        "and the last stage would round their replicas of the tied embedding at random, and differently; set "
        "engine.neuron.precision to downcast or fp32_master_weights, or parallel.pp to 1",
    ),
    (
        ("model.vocab_size=32001",),
        "model.vocab_size = 32001, parallel.tp = 8: must be a multiple of the tensor parallel degree; "
        "set parallel.tp to a power of 2 that divides 32001, or change it",
    ),
    (
        ("model.intermediate_size=11004",),
        "model.intermediate_size = 11004, parallel.tp = 8: must be a multiple of the tensor parallel degree; "
        "set parallel.tp to a power of 2 that divides 11004, or change it",
    ),
    (
        ("model.preset=llama3-8b", "data.seq_len=8192", "parallel.tp=32"),
        "model.n_kv_heads = 8, parallel.tp = 32: the key/value heads must be divisible by the tensor "
        "parallel degree; set engine.neuron.qkv_linear to true and engine.neuron.kv_size_multiplier to 4, or "
        "set parallel.tp to a divisor of 8",
    ),
    (
        (
            "model.preset=llama3-8b",
            "data.seq_len=8192",
            "parallel.tp=32",
            "engine.neuron.qkv_linear=true",
            "engine.neuron.kv_size_multiplier=8",
        ),
        "model.n_kv_heads = 8, parallel.tp = 32, engine.neuron.kv_size_multiplier = 8: with qkv_linear, "
        "n_kv_heads * kv_size_multiplier must equal tp; set engine.neuron.kv_size_multiplier to 4, "
        "or set engine.neuron.qkv_linear to false",
    ),
    (
        ("engine.neuron.qkv_linear=true",),
        "model.n_kv_heads = 32, parallel.tp = 8, engine.neuron.kv_size_multiplier = 1: with qkv_linear, "
        "n_kv_heads * kv_size_multiplier must equal tp; change parallel.tp, or set engine.neuron.qkv_linear to false",
    ),
    (
        ("batch.global_batch_size=1022",),
        "batch.global_batch_size = 1022, batch.micro_batch_size = 1: accumulation steps (ACC) = global_batch_size / "
        "(micro_batch_size * DP) = 255.5 is not a whole number, with DP = 4 data parallel ranks; "
        "set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of 4",
    ),
    (
        ("model.preset=llama3-8b", "parallel.tp=8"),
        "data.seq_len = 4096, model.max_position_embeddings = 8192: rows must be as long as the model's "
        "context; set data.seq_len (SEQ_LEN) to 8192, or model.max_position_embeddings to 0 (= data.seq_len)",
    ),
    (
        ("data.seq_len=1004", "model.max_position_embeddings=0", "parallel.sequence_parallel=true"),
        "data.seq_len = 1004, parallel.tp = 8: sequence parallelism splits rows into tp equal parts; set "
        "data.seq_len (SEQ_LEN) to a multiple of 8",
    ),
    (("parallel.cp=2",), "parallel.cp = 2: this engine has no context parallelism; set parallel.cp to 1"),
    (
        ("parallel.dp_replicate=2",),
        "parallel.dp_replicate = 2, engine.neuron.zero1 = True: this engine shards optimizer state over all data "
        "parallel ranks or over none; set parallel.dp_replicate to 1, and engine.neuron.zero1 to false for none",
    ),
    (
        ("engine.neuron.flash_attention=true",),
        "engine.neuron.flash_attention = True, data.document_mask = True: the flash attention kernel has no "
        "document mask; set one of them to false",
    ),
    (
        (
            "engine.neuron.flash_attention=true",
            "data.document_mask=false",
            "data.seq_len=3072",
            "model.max_position_embeddings=0",
        ),
        "data.seq_len = 3072, engine.neuron.flash_attention = True: the flash attention kernel requires rows "
        "of a multiple of 2048 positions; set data.seq_len (SEQ_LEN) to a multiple of 2048, or "
        "flash_attention to false",
    ),
    (
        ("optimizer.moments_dtype=bfloat16",),
        "optimizer.moments_dtype = 'bfloat16': this engine keeps moments in the dtype of the master weights; "
        "set optimizer.moments_dtype to float32",
    ),
    (
        ("optimizer.name=muon",),
        "optimizer.name = 'muon': this engine updates slices, and this optimizer needs whole matrices; set "
        "optimizer.name to adamw, or run.engine to gpu",
    ),
    (
        ("optimizer.weights_dtype=bfloat16",),
        "optimizer.weights_dtype = 'bfloat16': this engine leaves stochastic rounding to the device; set "
        "optimizer.weights_dtype to float32; engine.neuron.precision = 'bf16_sr' has no master weights",
    ),
    (
        ("optimizer.lr_scale.norm=0.5",),
        "optimizer.lr_scale.norm = 0.5: the optimizer files of NxD have one learning rate; leave "
        "optimizer.lr_scale out, or set run.engine to gpu",
    ),
    (
        ("optimizer.moments_dtype=bfloat16", "engine.neuron.backend=cpu"),
        "optimizer.moments_dtype = 'bfloat16': this engine keeps moments in the dtype of the master weights; "
        "set optimizer.moments_dtype to float32",
    ),
    (
        ("parallel.dp_shard=3",),
        "parallel.tp = 8, parallel.pp = 1, parallel.cp = 1, parallel.dp_replicate = 1, parallel.dp_shard = 3: "
        "these degrees need 24 ranks, the run has 32; start 24 ranks, or change the degrees (dp_shard = 0 uses all "
        "remaining)",
    ),
]


@pytest.mark.parametrize(("sets", "message"), REFUSED)
def test_refused_recipes(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe(*sets), ALONE)
    assert str(caught.value) == message
    assert caught.value.exit_code == 64


def test_optimizer_state_is_of_the_dtype_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = StateSlot(name="narrow", dtype=lambda options: "bfloat16")
    monkeypatch.setitem(OPTIMIZERS, "toy", replace(OPTIMIZERS["adamw"], name="toy", slots=(slot,)))
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe("optimizer.name=toy"), ALONE)
    assert str(caught.value) == (
        "optimizer.name = 'toy': this engine keeps optimizer state in the dtype of the master weights, "
        "which the slot 'narrow' has not; set another optimizer.name"
    )


@pytest.mark.parametrize(
    ("world", "counted"),
    [
        (World(rank=0, size=16, local_rank=0, local_size=16), "16, 16 per node"),
        (World(rank=0, size=64, local_rank=0, local_size=32), "64, 32 per node"),
        (World(rank=0, size=32, local_rank=0, local_size=8), "32, 8 per node"),
    ],
)
def test_ranks_that_are_not_one_per_core(world: World, counted: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe(), world)
    assert str(caught.value) == (
        "engine.neuron.num_neuroncores = 32, parallel.n_nodes = 1: one rank per NeuronCore makes 32 ranks, "
        "32 per node; "
        f"the run has {counted}; start it with torchrun --nnodes 1 --nproc_per_node 32, or set these fields to the "
        "run's ranks"
    )


def test_a_vocabulary_is_checked_once_it_is_known() -> None:
    made = recipe()
    check_model(made, llama_config(made, 32000))
    with pytest.raises(RecipeError) as caught:
        check_model(made, llama_config(made, 32004))
    assert str(caught.value) == (
        "model.vocab_size = 32004, parallel.tp = 8: must be a multiple of the tensor parallel degree; "
        "set parallel.tp to a power of 2 that divides 32004, or prepare a vocabulary of such a size"
    )


def test_opening_says_what_is_missing_to_train_on_trainium() -> None:
    with pytest.raises(
        NotInstalledError, match="neuronx-distributed, which trains on Trainium, cannot be imported"
    ) as caught:
        SPEC.open(recipe(), preset("llama2-7b"), ALONE)
    assert caught.value.exit_code == 64
    assert "engine.neuron.backend to cpu" in str(caught.value)


def test_opening_still_checks_first() -> None:
    with pytest.raises(RecipeError, match="power of 2"):
        SPEC.open(recipe("parallel.tp=6"), preset("llama2-7b"), ALONE)
    with pytest.raises(RecipeError, match=r"model\.vocab_size = 32001"):
        SPEC.open(recipe(), preset("llama2-7b", vocab_size=32001), ALONE)
