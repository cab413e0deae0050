"""Which recipes the engine takes: the published Llama recipes pass, and each kind of mistake has its message."""

from dataclasses import replace

import pytest

from lt_model import preset
from lt_trainer.config.recipe import from_dict, load, model_config, to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World, engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import OPTIMIZERS
from lt_trainer.optimizers.spec import StateSlot
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.sdk import NotInstalledError
from lt_trainer_neuron.spec import SPEC

NEURON = "engine.neuron"
ROWS_8K = ("model.preset=llama3-8b", "data.seq_len=8192", "parallel.tp=32")
QKV, FLASH, CPU = f"{NEURON}.qkv_linear=true", f"{NEURON}.flash_attention=true", f"{NEURON}.backend=cpu"
NO_MASK, TIED, ONE_GRAPH = "data.document_mask=false", "model.tie_word_embeddings=true", f"{NEURON}.graph_scope=step"


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


ACCEPTED = {
    "7B on one node": (),
    "7B on 16 nodes": ("batch.global_batch_size=2048", "parallel.n_nodes=16"),
    "8B, replicated heads": (
        *(*ROWS_8K, QKV, FLASH, NO_MASK, f"{NEURON}.kv_size_multiplier=4", "parallel.sequence_parallel=true"),
        f"{NEURON}.precision=fp32_master_weights",
    ),
    "70B on 16 nodes": (
        *("model.preset=llama3-70b", "data.seq_len=8192", "parallel.tp=32", "parallel.pp=8", "parallel.n_nodes=16"),
        *(QKV, f"{NEURON}.kv_size_multiplier=4", f"{NEURON}.fuse_qkv=true", f"{NEURON}.precision=downcast"),
    ),
    # What the device cannot do with stages, the cpu backend or one stage can.
    "odd stages on cpu": ("parallel.pp=3", "parallel.n_nodes=3", CPU, "batch.global_batch_size=1020"),
    "one graph on cpu": ("parallel.pp=2", ONE_GRAPH, CPU),
    "tied, two stages": ("parallel.pp=2", TIED, f"{NEURON}.precision=downcast"),
    "tied, one stage": (TIED, ONE_GRAPH),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_recipes_that_pass(name: str) -> None:
    made = recipe(*ACCEPTED[name])
    check_recipe(made, World())
    SPEC.check(made, World(rank=0, size=32 * made.parallel.n_nodes, local_rank=0, local_size=32))
    assert from_dict(to_dict(made)) == made
    assert engine_spec("neuron") is SPEC


REFUSED = [  # sets; the fields with which the message begins; the remedy with which it ends
    (("parallel.tp=6",), "parallel.tp = 6: ", "set parallel.tp to 4 or 8"),
    (("parallel.tp=64", "parallel.n_nodes=2"), f"parallel.tp = 64, {NEURON}.num_neuroncores = 32: ", "at most 32"),
    (("parallel.pp=64", "parallel.n_nodes=16"), "parallel.pp = 64, model.n_layers = 32: ", "parallel.pp to at most 32"),
    (("parallel.pp=3", "parallel.n_nodes=3"), "parallel.pp = 3: NxD pairs adjacent", "set parallel.pp to 2 or 4"),
    (("parallel.pp=2", ONE_GRAPH), f'{NEURON}.graph_scope = "step", parallel.pp = 2: ', "or parallel.pp to 1"),
    (("parallel.pp=2", TIED), "model.tie_word_embeddings = true, parallel.pp = 2, ", "or parallel.pp to 1"),
    (("model.vocab_size=32001",), "model.vocab_size = 32001, parallel.tp = 8: ", "divides 32001, or change it"),
    (("model.intermediate_size=11004",), "model.intermediate_size = 11004, parallel.tp = 8: ", "or change it"),
    (
        ROWS_8K,
        "model.n_kv_heads = 8, parallel.tp = 32: ",
        f"qkv_linear to true and {NEURON}.kv_size_multiplier to 4, or set parallel.tp to a divisor of 8",
    ),
    (
        (*ROWS_8K, QKV, f"{NEURON}.kv_size_multiplier=8"),
        f"model.n_kv_heads = 8, parallel.tp = 32, {NEURON}.kv_size_multiplier = 8: ",
        f"set {NEURON}.kv_size_multiplier to 4, or set {NEURON}.qkv_linear to false",
    ),
    ((QKV,), "model.n_kv_heads = 32, parallel.tp = 8, ", f"change parallel.tp, or set {NEURON}.qkv_linear to false"),
    (
        ("batch.global_batch_size=1022",),
        "batch.global_batch_size = 1022, batch.micro_batch_size = 1: accumulation steps (ACC) = global_batch_size / "
        "(micro_batch_size * DP) = 255.5 is not a whole number, with DP = 4 data parallel ranks; ",
        "set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of 4",
    ),
    (
        ("model.preset=llama3-8b",),
        "data.seq_len = 4096, model.max_position_embeddings = 8192: ",
        "set data.seq_len (SEQ_LEN) to 8192, or model.max_position_embeddings to 0 (= data.seq_len)",
    ),
    (
        ("data.seq_len=1004", "model.max_position_embeddings=0", "parallel.sequence_parallel=true"),
        "data.seq_len = 1004, parallel.tp = 8: ",
        "to a multiple of 8",
    ),
    (("parallel.cp=2",), "parallel.cp = 2: ", "set parallel.cp to 1"),
    (("parallel.dp_replicate=2",), f"parallel.dp_replicate = 2, {NEURON}.zero1 = true: ", "to false for none"),
    (
        ("batch.ramp.start=512", "batch.ramp.steps=3"),
        "batch.ramp.start = 512: shapes are fixed",
        "leave batch.ramp out",
    ),
    ((FLASH,), f"{NEURON}.flash_attention = true, data.document_mask = true: ", "set one of them to false"),
    (
        (FLASH, NO_MASK, "data.seq_len=3072", "model.max_position_embeddings=0"),
        f"data.seq_len = 3072, {NEURON}.flash_attention = true: ",
        "to a multiple of 2048, or flash_attention to false",
    ),
    (("optimizer.moments_dtype=bfloat16", CPU), 'optimizer.moments_dtype = "bfloat16": ', "moments_dtype to float32"),
    (("optimizer.name=muon",), 'optimizer.name = "muon": ', "set optimizer.name to adamw, or run.engine to gpu"),
    (("optimizer.weights_dtype=bfloat16",), 'optimizer.weights_dtype = "bfloat16": ', "has no master weights"),
    (("optimizer.lr_scale.norm=0.5",), "optimizer.lr_scale.norm = 0.5: ", "or set run.engine to gpu"),
    (("optimizer.name=toy",), 'optimizer.name = "toy": ', "set another optimizer.name"),
    (("parallel.dp_shard=3",), "parallel.tp = 8, parallel.pp = 1, ", "(dp_shard = 0 uses all remaining)"),
    ((f"{NEURON}.kv_size_multiplier=4",), f"{NEURON}.kv_size_multiplier = 4", "or remove kv_size_multiplier"),
    ((f"{NEURON}.fuse_qkv=true",), f"{NEURON}.fuse_qkv = true", "or remove fuse_qkv"),
    (
        (f"{NEURON}.cc_flags=--cache_dir=/x",),
        f'{NEURON}.cc_flags = "--cache_dir=/x"',
        "set engine.neuron.compile_cache",
    ),
    ((f"{NEURON}.cpu_dtype=float64",), f'{NEURON}.cpu_dtype = "float64"', "or remove cpu_dtype"),
    ((f"{NEURON}.num_neuroncores=0",), f"{NEURON}.num_neuroncores = 0 (--set): must be at least 1", ""),
]


@pytest.mark.parametrize(("sets", "begin", "end"), REFUSED, ids=lambda part: str(part)[:40])
def test_refused_recipes(sets: tuple[str, ...], begin: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = StateSlot(name="narrow", dtype=lambda options: "bfloat16")
    monkeypatch.setitem(OPTIMIZERS, "toy", replace(OPTIMIZERS["adamw"], name="toy", slots=(slot,)))
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe(*sets), World())
    assert str(caught.value).startswith(begin)
    assert str(caught.value).endswith(end)
    assert caught.value.exit_code == 64


LACKING = {
    "deepseek-v3": ((), r"kv_rank = 512 of family = 'deepseek_v3' is not supported by the engine neuron"),
    "qwen3-30b-a3b": ((), r"n_experts = 128 of family = 'qwen3_moe'"),
    "gemma3-1b": ((FLASH, NO_MASK), r"sliding_window = 512 .* by engine\.neuron\.flash_attention"),
    "olmo2-1b": (("model.n_kv_heads=4", "parallel.tp=8", QKV, f"{NEURON}.kv_size_multiplier=2"), "qk_norm = 'full'"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_family_has_and_the_layers_lack(name: str) -> None:
    sets, lacking = LACKING[name]
    with pytest.raises(RecipeError, match=lacking):
        check_recipe(recipe(f"model.preset={name}", "model.max_position_embeddings=0", "parallel.tp=1", *sets), World())


@pytest.mark.parametrize(("size", "local"), [(16, 16), (64, 32), (32, 8)])
def test_ranks_that_are_not_one_per_core(size: int, local: int) -> None:
    told = f"the run has {size}, {local} per node; start it with torchrun --nnodes 1 --nproc_per_node 32"
    with pytest.raises(RecipeError, match=told):
        check_recipe(recipe(), World(rank=0, size=size, local_rank=0, local_size=local))


def test_opening_checks_the_vocabulary_and_then_what_is_missing_to_train_on_trainium() -> None:
    check_model(recipe(), model_config(recipe(), 32000))
    with pytest.raises(RecipeError, match=r"model\.vocab_size = 32004, parallel\.tp = 8: .* or prepare a vocabulary"):
        check_model(recipe(), model_config(recipe(), 32004))
    with pytest.raises(RecipeError, match="power of 2"):
        SPEC.open(recipe("parallel.tp=6"), preset("llama2-7b"), World())
    with pytest.raises(RecipeError, match=r"model\.vocab_size = 32001"):
        SPEC.open(recipe(), preset("llama2-7b", vocab_size=32001), World())
    with pytest.raises(NotInstalledError, match=r"cannot be imported .*engine\.neuron\.backend to cpu"):
        SPEC.open(recipe(), preset("llama2-7b"), World())
