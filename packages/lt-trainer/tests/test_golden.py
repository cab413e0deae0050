"""Recipes of version 0.1.0, kept as files: whatever changes, these are read to the same values."""

from pathlib import Path

from lt_trainer.config.recipe import load, to_toml, values_of
from lt_trainer.config.section import leaves
from lt_trainer.config.sections import Recipe

DATA = Path(__file__).parent / "data"

EVERY_FIELD = {
    "run.dir": "runs/golden",
    "run.seed": 7,
    "run.engine": "neuron",
    "model.preset": "llama3-8b",
    "model.vocab_size": 1024,
    "model.hidden_size": 64,
    "model.intermediate_size": 192,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.n_layers": 3,
    "model.max_position_embeddings": 256,
    "model.rope_theta": 500000.0,
    "model.norm_eps": 1e-6,
    "model.tie_word_embeddings": True,
    "model.rope_scaling.factor": 8.0,
    "model.rope_scaling.low_freq_factor": 2.0,
    "model.rope_scaling.high_freq_factor": 5.0,
    "model.rope_scaling.original_max_position_embeddings": 4096,
    "data.store": "stores/train",
    "data.validation": "stores/validation",
    "data.seq_len": 256,
    "data.packing": "concat",
    "data.document_mask": False,
    "data.shuffle": False,
    "data.tokenizer": "org/model",
    "batch.global_batch_size": 64,
    "batch.micro_batch_size": 8,
    "optimizer.lr": 0.003,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-9,
    "optimizer.grad_clip": 0.5,
    "optimizer.decay_embeddings": True,
    "optimizer.moments_dtype": "bfloat16",
    "optimizer.z_loss": 1e-4,
    "schedule.kind": "linear",
    "schedule.max_steps": 1000,
    "schedule.warmup_steps": 10,
    "schedule.min_lr": 0.0,
    "parallel.n_nodes": 2,
    "parallel.tp": 2,
    "parallel.pp": 3,
    "parallel.cp": 4,
    "parallel.dp_replicate": 5,
    "parallel.dp_shard": 6,
    "parallel.sequence_parallel": True,
    "checkpoint.interval": 100,
    "checkpoint.keep_last": 2,
    "checkpoint.keep_every": 500,
    "checkpoint.async_save": True,
    "checkpoint.resume": False,
    "checkpoint.mirror_url": "s3://bucket/runs/golden",
    "checkpoint.mirror_keep_last": 5,
    "checkpoint.mirror_keep_every": 1000,
    "metrics.log_interval": 5,
    "metrics.validation_interval": 50,
    "metrics.validation_tokens": 4096,
    "metrics.sinks": ["wandb", "tensorboard"],
    "metrics.monitor_interval_s": 2.5,
    "metrics.profile_steps": 2,
    "metrics.profile_start_step": 21,
    "metrics.profile_ranks": [0, 1],
    "metrics.memory_snapshot_step": 30,
    "metrics.memory_snapshot_on_oom": True,
    "fault_tolerance.max_skipped_steps": 3,
    "fault_tolerance.max_rollbacks": 1,
    "fault_tolerance.hang_timeout_s": 45.0,
    "fault_tolerance.grace_period_s": 30.5,
}


def test_a_recipe_with_every_field_is_read_to_the_same_values() -> None:
    path = DATA / "recipe-every-field.toml"
    resolved = load(path)
    found = values_of(resolved.recipe)
    assert {name: found[name] for name in EVERY_FIELD} == EVERY_FIELD
    assert resolved.origins["run.seed"] == str(path)
    assert resolved.origins["model.rope_scaling.factor"] == str(path)
    assert resolved.origins["metrics.validation_interval"] == str(path)
    defaults = {name: leaf.default for name, leaf in leaves(Recipe).items()}
    assert [name for name, value in EVERY_FIELD.items() if value == defaults[name]] == []


def test_the_defaults_are_written_as_ever() -> None:
    assert to_toml(Recipe()) == (DATA / "recipe-defaults.toml").read_text(encoding="utf-8")


def test_sections_with_names_are_read_to_the_same_values() -> None:
    recipe = load(DATA / "recipe-named-sections.toml").recipe
    found = values_of(recipe)
    tables = ("data.mixture.", "data.validation_sets.")
    assert {name: value for name, value in found.items() if name.startswith(tables)} == {
        "data.mixture.code-2.store": "stores/code",
        "data.mixture.code-2.weight": 0.3,
        "data.mixture.code-2.phase_weights": [],
        "data.mixture.code-2.max_epochs": 2,
        "data.mixture.web.store": "stores/web",
        "data.mixture.web.weight": 0.7,
        "data.mixture.web.phase_weights": [0.5, 0.25],
        "data.mixture.web.max_epochs": 0,
        "data.validation_sets.papers.store": "stores/papers",
    }
    assert (found["data.phase_rows"], found["data.prefetch"]) == ([1000, 2000], 4)
    assert [found[f"batch.ramp.{name}"] for name in ("start", "increment", "steps", "tokens")] == [16, 8, 0, 10**6]
    assert [found[f"schedule.{name}"] for name in ("kind", "decay_steps", "decay_shape")] == ["wsd", 700, "linear"]
    ramp = recipe.batch.batch_ramp(256)
    assert ramp is not None
    assert (ramp.rows, ramp.final) == (3907, 64)
