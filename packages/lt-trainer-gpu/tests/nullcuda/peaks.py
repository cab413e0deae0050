"""Jobs of real sizes for the null device, and the memory that the plan says for them.

Memory is never touched there, so the shapes are those of real runs: a billion parameters, rows of 4096 tokens.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from null_device.ranks import Job, RankResult

from lt_model import ModelConfig
from lt_trainer.config.recipe import load
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import PlannedMemory, plan_memory

NEAR = 0.03
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8}


def job(*overrides: str, seq_len: int = 4096, tied: bool = False, n_layers: int = 8, **fields: Any) -> Job:
    shape = SHAPE | {"n_layers": n_layers, "tie_word_embeddings": tied}
    values = {"vocab_size": 32000, "rows": fields.get("ranks", 1), **fields}
    return Job(model=tuple(shape.items()), overrides=overrides, row_lengths=(seq_len,) * 3, initialize=False, **values)


def config_of(asked: Job) -> ModelConfig:
    return ModelConfig(vocab_size=asked.vocab_size, max_position_embeddings=asked.row_lengths[0], **dict(asked.model))


def planned_memory(asked: Job) -> PlannedMemory:
    seq_len = asked.row_lengths[0]
    base = {
        "model": dict(asked.model),
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": asked.rows, "micro_batch_size": asked.micro_batch_size},
    }
    recipe = load(base=base, overrides=asked.overrides).recipe
    return plan_memory(config_of(asked), seq_len, layout_from_recipe(recipe, devices=asked.ranks, nodes=1))


def check_peak(asked: Job, results: Sequence[RankResult]) -> None:
    """All ranks hold what the plan says; in a pipeline, the fullest one does."""
    planned, peaks = planned_memory(asked).peak, [result.peak_bytes[-1] for result in results]
    assert max(peaks) == pytest.approx(planned, rel=NEAR)
    if not any(text.startswith("parallel.pp=") for text in asked.overrides):
        assert min(peaks) == pytest.approx(planned, rel=NEAR)
