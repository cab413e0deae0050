"""Plans for NeuronCores against counts by hand; the examples resolve, pass the checks and fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dense_families import MODELS

from lt_ckpt.nxd.layout import layers_per_stage
from lt_model import PRESETS, flops_per_token, n_parameters, param_specs
from lt_trainer.config.recipe import ResolvedRecipe, load
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.plan import plan_recipe
from lt_trainer_neuron.planning import ASSUMED_MFU, GIB, core_memory, format_plan, make_plan
from lt_trainer_neuron.spec import SPEC

EXAMPLES = Path(__file__).parents[3] / "examples" / "neuron"
# Example: parameters in millions, data parallel ranks, micro-batches, tokens of an update, updates of warm-up.
KNOWN = {
    "llama2-7b-tp8.toml": (6738.4, 64, 32, 2048 * 4096, 318),
    "llama3-70b-tp32-pp8.toml": (70553.7, 2, 512, 1024 * 8192, 2000),
}


@pytest.fixture
def resolved() -> Callable[..., ResolvedRecipe]:
    def resolve(*sets: str) -> ResolvedRecipe:
        base = {
            "run": {"engine": "neuron"},
            "data": {"synthetic": True, "document_mask": False},
            "model": {"preset": "llama2-7b", "vocab_size": 32000},
            "batch": {"global_batch_size": 1024, "micro_batch_size": 1},
            "parallel": {"tp": 8},
        }
        return load(base=base, overrides=list(sets))

    return resolve


@pytest.mark.parametrize("name", KNOWN)
def test_an_example_resolves_and_fits(name: str) -> None:
    millions, dp, accumulation, tokens, warmup = KNOWN[name]
    found = load(EXAMPLES / name)
    assert found.unchecked == ()
    SPEC.check(found.recipe, World())
    SPEC.check(found.recipe, World(size=512, local_size=32))
    made = make_plan(found, device="trn1", devices=32)
    assert made["model"]["parameters"] / 1e6 == pytest.approx(millions, abs=0.05)
    layout, text = made["layout"], format_plan(json.loads(json.dumps(made)))
    assert (layout["dp"], layout["accumulation"], layout["cores"]) == (dp, accumulation, 512)
    assert made["time"]["tokens_per_step"] == tokens
    assert found.recipe.schedule.warmup_steps == warmup
    assert made["fits"] is True
    assert f"{made['memory_bytes']['needed'] / GIB:.2f}   of 16.0: fits" in text
    assert f"{tokens:,} tokens" in text


def test_the_published_70b_run_is_told_as_it_was() -> None:
    """Of the guide: 243.8 s an update, about 33,000 tokens a second; a checkpoint of about 850 GB."""
    made = make_plan(load(EXAMPLES / "llama3-70b-tp32-pp8.toml"), device="trn1", devices=32)
    assert made["time"]["step_s"] == pytest.approx(243.8, rel=0.01)
    assert made["time"]["bubble"] == 7 / 519
    assert made["time"]["mfu"] == ASSUMED_MFU * (1 - 7 / 519)
    assert 850e9 < made["memory_bytes"]["checkpoint"] < 1100e9
    needed = made["memory_bytes"]["needed_by_stage"]
    assert needed[made["memory_bytes"]["stage"]] == max(needed)


def test_what_stays_is_counted_by_parameter(resolved) -> None:
    """7 B at TP 8 on one node: 4 data parallel ranks."""
    config = PRESETS["llama2-7b"]
    norms = sum(row.numel for row in param_specs(config) if row.tp_dim is None)
    numbers = (n_parameters(config) - norms) / 8 + norms
    recipe = resolved("engine.neuron.precision=fp32_master_weights").recipe
    parts = core_memory(recipe, config, dp=4, accumulation=256, stage=0)
    assert parts["weights"] == 2 * numbers
    assert parts["gradients"] == 4 * numbers
    assert parts["master weights"] == numbers  # 4 bytes over 4 ranks
    assert parts["optimizer state"] == 2 * numbers
    whole = resolved("engine.neuron.precision=fp32_master_weights", "engine.neuron.zero1=false").recipe
    alone = core_memory(whole, config, dp=4, accumulation=256, stage=0)
    assert (alone["master weights"], alone["optimizer state"]) == (4 * numbers, 8 * numbers)
    pure = core_memory(resolved().recipe, config, dp=4, accumulation=256, stage=0)
    assert (pure["weights"], pure["gradients"], pure["master weights"], pure["optimizer state"]) == (
        2 * numbers,
        2 * numbers,
        0,
        numbers,
    )


def test_biases_norms_and_wide_heads_of_a_family_are_counted(resolved) -> None:
    config = MODELS["gpt_neox"]
    recipe = resolved("engine.neuron.precision=fp32_master_weights", "parallel.tp=2").recipe
    whole = sum(row.numel for row in param_specs(config) if row.tp_dim is None)
    parts = core_memory(recipe, config, dp=1, accumulation=1, stage=0)
    assert parts["weights"] == (n_parameters(config) - whole) + 2 * whole
    assert whole == 4 * (2 * 2 * 32 + 2 * 32) + 2 * 32  # two LayerNorms and the biases of two products in each layer


def test_stages_hold_their_layers_and_as_many_micro_batches_as_are_in_flight(resolved) -> None:
    config = replace(PRESETS["llama2-7b"], n_layers=30)
    recipe = resolved("parallel.pp=4", "model.n_layers=30").recipe
    assert [len(layers) for layers in layers_per_stage(30, 4)] == [7, 7, 8, 8]
    held = [core_memory(recipe, config, dp=1, accumulation=1024, stage=stage) for stage in range(4)]
    of_layer = [
        part["activations"] / (4 - stage) / layers
        for stage, (part, layers) in enumerate(zip(held, [7, 7, 8, 8], strict=True))
    ]
    assert of_layer == [pytest.approx(of_layer[0])] * 4
    assert [part["logits and loss"] > 0 for part in held] == [False, False, False, True]
    assert held[3]["logits and loss"] == 4096 * 32000 / 8 * 10
    few = core_memory(recipe, config, dp=1, accumulation=2, stage=0)
    assert few["activations"] == pytest.approx(held[0]["activations"] / 2)


def test_copies_of_key_value_heads_take_memory_and_a_place_in_the_checkpoint(resolved) -> None:
    sets = ("model.preset=llama3-8b", "model.vocab_size=128256", "data.seq_len=8192", "parallel.n_nodes=4")
    many = resolved(
        *sets, "parallel.tp=32", "engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=4"
    ).recipe
    config = PRESETS["llama3-8b"]
    copies = 2 * config.n_layers * config.n_kv_heads * config.head_width * config.hidden_size * 3
    norms = sum(row.numel for row in param_specs(config) if row.tp_dim is None)
    weights = core_memory(many, config, dp=4, accumulation=256, stage=0)["weights"]
    assert weights == 2 * ((n_parameters(config) - norms + copies) / 32 + norms)


def test_sequence_parallelism_divides_all_that_a_layer_keeps_between_its_products(resolved) -> None:
    """Per token and layer at TP 8 in bf16, by hand, of a Llama 7 B of 4096 wide."""
    config = PRESETS["llama2-7b"]
    apart, whole = (
        core_memory(resolved(f"parallel.sequence_parallel={value}").recipe, config, dp=4, accumulation=1, stage=0)[
            "activations"
        ]
        for value in ("true", "false")
    )
    inside = 4 * 4096 * 2 / 8 + 32 * 4 / 8 + 3 * 11008 * 2 / 8  # q, k, v, output, its normalizers, gate, up, product
    outside = 4 * 4096 * 2 + 2 * 4  # two inputs, two norms' outputs and their factors
    assert whole == pytest.approx(32 * 4096 * (inside + outside))
    assert apart == pytest.approx(32 * 4096 * (inside + outside / 8))


def test_recomputed_attention_keeps_no_scores_and_the_kernel_has_none(resolved) -> None:
    config = PRESETS["llama2-7b"]
    scores = 4096 * 4096 * 32 / 8 * 6
    again, kept, kernel = (
        core_memory(resolved(f"engine.neuron.{option}").recipe, config, dp=4, accumulation=1, stage=0)
        for option in ("selective_checkpointing=true", "selective_checkpointing=false", "flash_attention=true")
    )
    assert kept["activations"] - again["activations"] == 32 * scores
    assert again["backward of a layer"] - kernel["backward of a layer"] == 2 * scores
    assert again["activations"] == kernel["activations"]


def test_time_follows_the_peak_of_all_cores(resolved) -> None:
    time = make_plan(resolved("parallel.n_nodes=2"), device="TRN1", devices=32, mfu=0.25)["time"]
    flops = 1024 * 4096 * flops_per_token(PRESETS["llama2-7b"], 4096)
    assert time["step_s"] == pytest.approx(flops / (64 * 95e12 * 0.25))
    assert (time["mfu"], time["mfu_source"], time["bubble"]) == (0.25, "given", 0)
    assert make_plan(resolved(), device="trn1", devices=32, nodes=2)["layout"]["cores"] == 64


def test_the_command_plans_with_the_engine_that_trains(resolved) -> None:
    fits, text, values = plan_recipe(resolved("parallel.tp=1"), device="trn1", devices=32, nodes=None, mfu=None)
    assert fits is values["fits"] is False
    assert "NeuronCore-v2" in text
    assert "DOES NOT FIT" in text


@pytest.mark.parametrize(
    ("given", "sets", "told"),
    [
        ({"device": "trn9"}, (), '--device = "trn9": unknown device of the neuron engine; use trn1'),
        ({"devices": 16}, (), "--devices = 16, engine.neuron.num_neuroncores = 32"),
        ({}, ("engine.neuron.backend=cpu",), "without the cpu backend"),
        ({"mfu": 2.0}, (), "--mfu = 2.0: must be a fraction of the peak"),
        ({}, ("parallel.tp=6",), "parallel.tp = 6 (--set): the tensor parallel degree must be a power of 2"),
        ({}, ("model.vocab_size=32004", "parallel.tp=8"), "must be a multiple of the tensor parallel degree"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    resolved, given: dict[str, object], sets: tuple[str, ...], told: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(resolved(*sets), **({"device": "trn1", "devices": 32} | given))
    assert told in str(caught.value)
