"""`lt train plan`: its arithmetic against counts by hand, its search against trying everything, its command."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_model import PRESETS, flops_per_token, n_parameters, param_specs
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load, model_config
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.planning.devices import DEVICES
from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.planning.memory import RESERVE_BYTES, RESERVE_SHARE, plan_memory
from lt_trainer.planning.memory_activations import attention_backward_per_token
from lt_trainer.planning.memory_state import RankWeights
from lt_trainer.planning.plan import (
    Plan,
    format_count,
    format_duration,
    format_plan,
    make_plan,
    plan_recipe,
    plan_to_dict,
)
from lt_trainer.planning.run_time import plan_time, recomputed_flops
from lt_trainer.planning.search import candidate_layouts

GIB = 2**30


def recipe_of(*overrides: str, preset: str = "llama3-8b", **batch: int) -> Recipe:
    base = {
        "model": {"preset": preset, "vocab_size": PRESETS[preset].vocab_size},
        "data": {"store": "elsewhere"},
        "batch": {"global_batch_size": 256, "micro_batch_size": 1} | batch,
    }
    return load(base=base, overrides=list(overrides)).recipe


def planned(*overrides: str, device: str = "h100", devices: int = 8, **batch: int) -> Plan:
    return make_plan(recipe_of(*overrides, **batch), device=DEVICES[device], devices=devices)


def proposal(plan: Plan) -> list[str]:
    """The proposed fields as `--set`."""
    return [f"{name}={str(value).lower()}" for name, value in plan.changes.items()]


SIZES = {"devices": 8, "nodes": 1, "dp_shard": 8, "micro_batch_size": 1, "accumulation_steps": 1}
LAYOUT = PlannedLayout(tp=1, sequence_parallel=False, dp_replicate=1, **SIZES)


@pytest.mark.parametrize(
    ("weights_dtype", "dp_shard", "micro_batches", "n_bytes"),
    [
        *(("bfloat16", 8, n, 2) for n in (1, 2)),  # FSDP rounds what it has reduced
        ("bfloat16", 1, 1, 2),
        ("bfloat16", 1, 2, 4),  # sums over micro-batches are float32
        *(("float32", 8, n, 4) for n in (1, 2)),
        ("float32", 1, 1, 2),  # those of the weights in the compute dtype
        ("float32", 1, 2, 4),
    ],
)
def test_a_gradient_is_as_wide_as_the_engine_keeps_it(
    weights_dtype: str, dp_shard: int, micro_batches: int, n_bytes: int
) -> None:
    options = OptimizerOptions(weights_dtype=weights_dtype)
    layout = replace(LAYOUT, devices=dp_shard, dp_shard=dp_shard, accumulation_steps=micro_batches, optimizer=options)
    assert layout.gradient_bytes == n_bytes


def test_state_is_sixteen_bytes_a_parameter_over_the_devices_that_share_it() -> None:
    """In fp32 with AdamW 12 bytes stay and 4 come with the gradients; replicas share nothing, tensor parallel ranks all
    but norms.
    """
    config, n = PRESETS["llama3-8b"], n_parameters(PRESETS["llama3-8b"])
    held = plan_memory(config, 4096, LAYOUT)
    assert (held.parts["optimizer state"], held.peak) == (n * 8 / 8, sum(held.parts.values()))
    assert held.needed == pytest.approx(held.peak * (1 + RESERVE_SHARE) + RESERVE_BYTES, rel=1e-12)
    narrow = plan_memory(config, 4096, replace(LAYOUT, optimizer=OptimizerOptions(moments_dtype="bfloat16")))
    assert (narrow.parts["optimizer state"], narrow.state_bytes) == (n * 4 / 8, n * 8)
    assert plan_memory(config, 4096, replace(LAYOUT, devices=1, dp_shard=1)).peak > n * 16
    norms = sum(row.numel for row in param_specs(config) if row.tp_dim is None)
    for fields, bytes_held in (
        ({}, n * 4 / 8),
        ({"dp_replicate": 4, "dp_shard": 2}, n * 4 / 2),
        ({"dp_shard": 2, "cp": 4}, n * 4 / 8),
        ({"tp": 8, "dp_shard": 1}, 4 * ((n - norms) / 8 + norms)),
    ):
        held = plan_memory(config, 4096, replace(LAYOUT, **fields))
        assert (held.parts["weights"], held.state_bytes) == (bytes_held, n * 12)
        assert held.parts["optimizer state"] == 2 * bytes_held


def test_a_tied_head_on_another_stage_is_a_copy_of_the_embedding() -> None:
    config = replace(PRESETS["llama3-8b"], tie_word_embeddings=True)
    stages = [RankWeights(config, replace(LAYOUT, pp=2, dp_shard=4), rank) for rank in range(2)]
    assert sum(stage.shards for stage in stages) == (n_parameters(config) + config.vocab_size * config.hidden_size) / 4


def test_rows_too_long_for_any_tensor_parallel_degree_are_cut() -> None:
    """The proposal is a recipe that fits; an attention backend that cannot is not cut."""
    sets = ("data.seq_len=1048576", "model.max_position_embeddings=1048576", "engine.gpu.activation_checkpointing=full")
    plan = planned(*sets, devices=16, global_batch_size=16)
    assert plan.nearest is not None
    assert plan.nearest.layout.cp > 1
    again = planned(*sets, *proposal(plan), devices=16, global_batch_size=16)
    assert (again.layout, again.fits) == (plan.nearest.layout, True)
    other = planned(*sets, "engine.gpu.attention=flash-attn", devices=16, global_batch_size=16)
    assert other.nearest is None or other.nearest.layout.cp == 1


RAMP = ("batch.ramp.start=64", "batch.ramp.increment=64", "batch.ramp.steps=30")
"""64, 128 and 192 rows for 10 steps each, then 256."""


@pytest.mark.parametrize(("ramp", "rows"), [((), 40 * 256), (RAMP, 10 * (64 + 128 + 192 + 256))])
def test_time_is_flops_over_what_the_devices_do(ramp: tuple[str, ...], rows: int) -> None:
    recipe = recipe_of("schedule.max_steps=40", "schedule.warmup_steps=4", *ramp)
    config = model_config(recipe, PRESETS["llama3-8b"].vocab_size)
    found = plan_time(recipe, config, LAYOUT, DEVICES["h100"], 0.4)
    tokens = rows * 4096
    flops = tokens * flops_per_token(config, 4096)
    assert (found.tokens, found.seconds) == (tokens, pytest.approx(flops / (8 * 989e12 * 0.4)))
    rates = (found.seconds / rows * 256, tokens / found.seconds, 8 * 0.7 * found.seconds / 3600)
    assert (found.step_s, found.tokens_per_s, found.energy_kwh) == pytest.approx(rates)
    assert (found.mfu, found.mfu_source, found.hfu) == (0.4, "given", 0.4)


def test_what_is_computed_again_costs_mfu_where_none_is_given() -> None:
    """Recomputing every block, but for its last product, is nearly a third more of what blocks do."""
    recipe = recipe_of()
    config = model_config(recipe, PRESETS["llama3-8b"].vocab_size)
    plain, full = (
        plan_time(recipe, config, replace(LAYOUT, activation_checkpointing=mode), DEVICES["h200"], None)
        for mode in ("none", "full")
    )
    assert (full.hfu, full.seconds > plain.seconds) == (pytest.approx(plain.hfu), True)
    again = recomputed_flops(config, 4096, replace(LAYOUT, activation_checkpointing="full"))
    share = replace(LAYOUT, activation_checkpointing="memory_budget", activation_memory_budget=0.25)
    assert recomputed_flops(config, 4096, share) == pytest.approx(0.75 * again)
    assert full.seconds / plain.seconds == pytest.approx(1 + again / flops_per_token(config, 4096))


def test_what_is_proposed_is_a_recipe_that_fits() -> None:
    """8 B parameters fit eight H200; the proposed fields resolve to the layout that was found."""
    assert planned(device="h200").fits
    plan = planned(micro_batch_size=8)
    assert plan.nearest is not None
    again = planned(*proposal(plan), micro_batch_size=8)
    assert (again.layout, again.fits) == (plan.nearest.layout, True)
    alone = planned(device="h200", devices=1)
    every = candidate_layouts(alone.layout, global_batch_size=256, kv_heads=8, row_lengths=(4096,))
    needed = ((one, plan_memory(alone.config, 4096, one).needed) for one in every)
    first = next(one for one, n_bytes in needed if n_bytes <= alone.device.memory_bytes)
    assert (alone.fits, alone.nearest and alone.nearest.layout) == (False, first)
    assert "parallel.n_nodes" in alone.changes


@settings(max_examples=60, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 4, 8]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 8]),
    row_lengths=st.sampled_from([(), (4096,), (48, 24), (30,)]),
)
def test_every_candidate_is_a_layout_of_the_same_step(
    devices: int, micro_batch_size: int, kv_heads: int, row_lengths: tuple[int, ...]
) -> None:
    split = {"micro_batch_size": micro_batch_size, "accumulation_steps": 32 // (devices * micro_batch_size)}
    layout = replace(LAYOUT, devices=devices, nodes=2, dp_shard=2 * devices, **split)
    options = {"global_batch_size": 64, "kv_heads": kv_heads, "row_lengths": row_lengths}
    on_more_nodes = list(candidate_layouts(layout, **options))
    everything = [one for one in on_more_nodes if one.nodes == 2]
    assert on_more_nodes[: len(everything)] == everything
    assert (everything[0], len(set(everything))) == (layout, len(everything))
    for one in everything:
        assert one.tp * one.cp * one.dp_replicate * one.dp_shard == one.world_size
        assert one.cp == 1 or all(length % (2 * one.cp) == 0 for length in row_lengths)
        assert not one.sequence_parallel or all(length % (one.cp * one.tp) == 0 for length in row_lengths)
        assert one.accumulation_steps * one.micro_batch_size * one.dp_replicate * one.dp_shard == 64
        assert one.tp == layout.tp or (kv_heads % one.tp == 0 and devices % one.tp == 0)
    cut = {one.cp for one in everything}
    assert cut == ({cp for cp in (1, 2, 4, 8, 16) if cp <= 2 * devices} if row_lengths == (4096,) else cut & {1, 2, 4})


def test_smaller_passes_come_before_recomputation_and_that_before_more_sharding() -> None:
    layout = replace(LAYOUT, dp_replicate=2, dp_shard=4, micro_batch_size=2, accumulation_steps=2)
    order = list(candidate_layouts(layout, global_batch_size=32, kv_heads=8))
    first = [(one.activation_checkpointing, one.micro_batch_size) for one in order[:3]]
    assert first == [("none", 2), ("none", 1), ("selective", 2)]
    first_sharded = next(i for i, one in enumerate(order) if one.dp_replicate == 1)
    tried = {(one.activation_checkpointing, one.tp) for one in order[:first_sharded]}
    assert tried == {("none", 1), ("selective", 1), ("full", 1)}


@pytest.mark.parametrize(
    ("overrides", "device", "named"),
    [
        (["parallel.pp=3"], "h100", r"parallel\.pp = 3 \(--set\)"),
        (["parallel.dp_shard=3"], "h100", "dp_shard = 3"),
        (["batch.global_batch_size=4"], "h100", "global_batch_size = 4"),
        (["model.vocab_size=0"], "h100", r"model\.vocab_size=N"),
        ([], "h10", '--device = "h10": unknown device of the gpu engine; choose one of .*h100, '),
        ([], "trn1", 'the engine neuron plans it: set run.engine = "neuron"'),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(overrides: list[str], device: str, named: str) -> None:
    base = {"model": {"vocab_size": 1000}, "data": {"store": "elsewhere"}, "batch": {"global_batch_size": 256}}
    with pytest.raises(RecipeError, match=named):
        plan_recipe(load(base=base, overrides=overrides), device=device, devices=8, nodes=None, mfu=None)


LAYOUTS = [
    (),
    *((f"parallel.{one}=2",) for one in ("dp_replicate", "tp", "cp", "pp")),
    *((f"engine.gpu.{one}=true",) for one in ("reduce_each_micro_batch", "activation_offload", "optimizer_offload")),
    ("engine.gpu.reshard_after_forward=false",),
    ("engine.gpu.activation_checkpointing=full", "parallel.dp_replicate=2"),
    ("optimizer.name=muon",),
]


@pytest.mark.parametrize("preset", ["llama-160m", "llama3-8b"])
@pytest.mark.parametrize("seq_len", [128, 2048])
def test_every_layout_is_printed_with_the_phase_of_its_peak(preset: str, seq_len: int) -> None:
    """Text and JSON of ordinary layouts on 1 to 8 devices, with one micro-batch and with several."""
    phases = set()
    for devices, sets, rows in itertools.product((1, 2, 4, 8), LAYOUTS, (8, 32)):
        if devices == 1 and any("parallel." in one for one in sets):
            continue
        recipe = recipe_of(f"data.seq_len={seq_len}", *sets, preset=preset, global_batch_size=rows)
        plan = make_plan(recipe, device=DEVICES["h100"], devices=devices)
        text, values = format_plan(plan), json.loads(json.dumps(plan_to_dict(plan)))
        memory = values["memory_bytes"]
        told = f"(peak: {memory['peak_phase']})", f"{memory['needed'] / GIB:.2f}"
        assert all(part in text for part in (*told, *(f"--set {one}" for one in proposal(plan))))
        assert math.isclose(memory["needed"], memory["peak"] + memory["reserve"])
        assert ("DOES NOT FIT" in text, bool(values["nearest"])) == (not values["fits"], not values["fits"])
        phases.add(memory["peak_phase"])
    assert seq_len > 128 or phases > {"loss", "last block"}


def test_numbers_are_written_for_people() -> None:
    assert [format_duration(s) for s in (0.25, 2.5, 3599.9, 90061)] == ["0.25 s", "2.5 s", "1:00:00", "1 day, 1:01:01"]
    assert [format_count(n) for n in (999, 1.5e6, 2e9, 3.25e12)] == ["999", "1.50 M", "2.00 B", "3.25 T"]


def test_the_command_needs_no_torch_and_says_by_its_code_whether_it_fits(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text('[model]\npreset = "llama2-7b"\n[data]\nstore = "elsewhere"\n[batch]\nmicro_batch_size = 1\n')
    watched = (
        "import sys; sys.argv[0] = 'lt-train'\nfrom lt_trainer.__main__ import main\ncode = main()\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    command = [sys.executable, "-c", watched, "plan", str(recipe), "--devices", "8", "--device"]
    fits = subprocess.run([*command, "h100", "--json"], capture_output=True, text=True, check=False)
    assert fits.returncode == 0, fits.stderr
    assert json.loads(fits.stdout)["fits"] is True
    not_there = subprocess.run([*command, "l4"], capture_output=True, text=True, check=False)
    assert (not_there.returncode, "nearest layout that fits" in not_there.stdout) == (1, True), not_there.stderr


def test_notes_name_fields_of_the_recipe_and_warn_of_what_is_hardly_meant(little_data: Path) -> None:
    def notes(*overrides: str) -> list[str]:
        base = {"model": {"vocab_size": 1000}, "data": {"store": str(little_data / "train")}}
        resolved = load(base=base, overrides=[*overrides, "engine.gpu.compile=false"])
        return plan_recipe(resolved, device="h100", devices=8, nodes=None, mfu=None)[2]["notes"]

    slower = "is not a multiple of 64, and its matrix products run slower; "
    first, second = notes()
    assert first.startswith("schedule.max_steps = 10,000 reads 10,485,760,000 tokens, which are ")
    assert second == f"model.vocab_size = 1000 {slower}engine.gpu.pad_vocab_to_multiple_of = 64 " + (
        "rounds up, with the same results"
    )
    once = ["schedule.max_steps=1", "batch.global_batch_size=8", "batch.micro_batch_size=1"]
    padded = "engine.gpu.pad_vocab_to_multiple_of=128"
    assert notes(*once, padded, "optimizer.lr=1e30", "model.intermediate_size=2060") == [
        "optimizer.lr = 1e+30 is far above usual learning rates, 1e-5 to 1e-2",
        f"model.intermediate_size = 2060 {slower}2048 or 2112 would be aligned",
    ]


def test_a_plan_does_not_depend_on_a_width_that_the_model_does_not_have() -> None:
    """All layers of qwen3-30b-a3b are experts; their own width is counted in the gradients of a block."""
    config, layout = PRESETS["qwen3-30b-a3b"], replace(LAYOUT, dp_shard=8, cp=1)
    peaks = {plan_memory(replace(config, intermediate_size=n), 4096, layout).peak for n in (64, 6144, 393216)}
    assert len(peaks) == 1


@pytest.mark.parametrize("cp", [1, 4])
def test_attention_is_planned_with_the_width_of_its_heads(cp: int) -> None:
    """Of qwen3-0.6b 2048 numbers, in a stream of 1024; two bytes each, and 1024 numbers of keys, and of values."""
    width, heads, kv, selected = 2 * 1024, 2 * 2048, 2 * 2 * 1024, 4.5
    wanted = 2 * width + 4 * heads
    if cp > 1:
        wanted += heads + kv / 2 + 2 * kv * selected + 2 * heads * selected
    layout = replace(LAYOUT, cp=cp, dp_shard=8 // cp)
    assert attention_backward_per_token(PRESETS["qwen3-0.6b"], layout) == wanted
