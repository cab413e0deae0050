"""The engine on its cpu backend, for a model of given sizes, in a rank."""

import os
from collections.abc import Mapping
from typing import Any

from lt_model import ModelConfig
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.spec import SPEC

SIZES = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers", "tie_word_embeddings", "norm_eps")


def neuron_engine(
    config: ModelConfig, *sets: str, rows: int, seq_len: int, base: Mapping[str, Mapping[str, Any]] | None = None
) -> NeuronEngine:
    """Return an engine for steps of `rows` rows; `base` has tables of the recipe that override these."""
    world, more = World.from_env(os.environ), {**(base or {})}
    neuron = {"backend": "cpu", "num_neuroncores": world.local_size, **more.pop("engine", {}).get("neuron", {})}
    recipe = {
        "run": {"engine": "neuron"},
        "model": {name: getattr(config, name) for name in SIZES},
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": rows, "micro_batch_size": 1},
        "schedule": {"max_steps": 10, "warmup_steps": 1},
        "engine": {"neuron": neuron},
        **more,
    }
    loaded = load(base=recipe, overrides=sets).recipe
    SPEC.check(loaded, world)
    engine = SPEC.open(loaded, config, world)
    assert isinstance(engine, NeuronEngine)
    return engine
