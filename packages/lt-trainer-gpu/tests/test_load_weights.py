"""Weights of a model that is already trained, read by each rank for the slices that it holds."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lt_model import ModelConfig, config_to_hf, param_specs
from lt_test_helpers.layouts import step_batch
from lt_trainer.checkpointing.pretrained import open_pretrained
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import engine as engine_module
from lt_trainer_gpu.spec import SPEC


def recipe_of(folder: str, dtype: str, sets: tuple[str, ...] = ()) -> Recipe:
    base = {
        "data": {"store": "unused", "seq_len": 24},
        "model": {"init_from": folder, "resize_vocab": True},
        "batch": {"global_batch_size": 4, "micro_batch_size": 1},
        "schedule": {"max_steps": 1, "warmup_steps": 0},
        "engine": {"gpu": {"device": "cpu", "dtype": dtype}},
    }
    return load(base=base, overrides=sets).recipe


def open_with(folder: str, config: ModelConfig, dtype: str, sets: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """In a rank: an engine that took over the model's weights, and these."""
    recipe, world = recipe_of(folder, dtype, sets), World.from_env(os.environ)
    engine = SPEC.open(recipe, config, world)
    engine_module.init_process_group = lambda *_: None  # the ranks have met
    pretrained = open_pretrained(recipe.model, config, {}, engine.control, world.rank, lambda: None)
    engine.load_weights(pretrained)
    return engine, pretrained


def first_states(folder: str, configs: list[ModelConfig], dtype: str, sets: tuple[str, ...]) -> list[list[tuple]]:
    """In a rank: what its engine of each shape holds."""
    kinds, found = {"F32": np.float32, "F64": np.float64}, []
    for config in configs:
        shards = open_with(folder, config, dtype, sets)[0].state().shards
        found.append([(s.group, s.name, s.offset, s.bytes().view(kinds[s.dtype]).reshape(s.shape)) for s in shards])
    return found


def written(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    weights = {p.name: rng.standard_normal(p.shape).astype(np.float32) for p in param_specs(config)}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    return weights


def check(pieces: list[tuple], wanted: dict[str, np.ndarray]) -> None:
    seen = {name: np.zeros(array.shape, bool) for name, array in wanted.items()}
    for group, name, offset, values in pieces:
        if group != "weights":
            assert not values.any(), "moments start from nothing"
            continue
        box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        np.testing.assert_allclose(values, wanted[name][box], rtol=1e-6, atol=1e-7)
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (values == wanted[name][box]).all()
        seen[name][box] = True
    assert all(part.all() for part in seen.values())


def test_one_and_three_ranks_hold_the_models_weights(config, ranks, tmp_path) -> None:
    """Three ranks cut nothing evenly, the vocabulary grows by rows that no boundary fits, stages hold some layers."""
    weights = written(tmp_path / "model", config)
    grown = replace(config, vocab_size=config.vocab_size + 5)
    wanted = dict(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in wanted:
            mean = wanted[name].astype(np.float64).mean(axis=0, keepdims=True)
            wanted[name] = np.concatenate([wanted[name], np.repeat(mean, 5, axis=0).astype(np.float32)])
    data_parallel = ((1, "float64", ()), (3, "float32", ()), (3, "bfloat16", ()))
    others = ((2, "float32", ("parallel.pp=2",)), (2, "float64", ("parallel.cp=2",)))
    for n, dtype, mesh in (*data_parallel, *others):
        sets = (f"batch.global_batch_size={n}", *mesh)
        held = ranks.run(first_states, str(tmp_path / "model"), [config, grown], dtype, sets, ranks=n)
        for number, expected in enumerate((weights, wanted)):
            check([piece for rank in held for piece in rank[number]], expected)


def first_loss(folder: str, config: ModelConfig, dtype: str) -> float:
    """In a rank: the loss of some rows under the model's weights, before any step."""
    engine, _ = open_with(folder, config, dtype)
    ids = (np.arange(2 * 24, dtype=np.int32).reshape(1, 2, 24) * 7) % config.vocab_size
    places = np.broadcast_to(np.arange(24, dtype=np.int32), ids.shape).copy()
    batch = step_batch(
        input_ids=ids, labels=ids, position_ids=places, doc_ids=np.zeros_like(ids), valid_tokens=ids.size
    )
    loss_sum, tokens = engine.validate([batch])
    return loss_sum / tokens


def test_the_weights_are_computed_with_from_the_first_step_on(config, ranks, tmp_path) -> None:
    """A model in bfloat16 stands beside its masters, and has to be told of them."""
    written(tmp_path / "model", config)
    losses = [
        ranks.run(first_loss, str(tmp_path / "model"), config, dtype, ranks=1)[0] for dtype in ("float32", "bfloat16")
    ]
    assert losses[0] > 2 * np.log(config.vocab_size), "weights from a normal distribution guess badly"
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def refusal(folder: str, config: ModelConfig) -> str:
    """In a rank: what is said of weights of which another rank holds one that is not a number."""
    engine, pretrained = open_with(folder, config, "bfloat16")
    with pytest.raises(RecipeError) as caught:
        pretrained.check_finite(engine.control)
    engine.close()
    return str(caught.value)


def test_every_rank_refuses_weights_that_are_not_finite(config, ranks, tmp_path) -> None:
    weights = written(tmp_path / "model", config)
    weights["model.layers.1.mlp.down_proj.weight"][-1, -1] = np.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    for said in ranks.run(refusal, str(tmp_path / "model"), config, ranks=2):
        assert "NaN or infinite in model.layers.1.mlp.down_proj.weight" in said
