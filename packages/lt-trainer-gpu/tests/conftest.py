"""A little model and step batches with documents of uneven length, for the engine's tests."""

import numpy as np
import pytest

from lt_model import LlamaConfig
from lt_trainer.engine import StepBatch
from lt_trainer.testing import RankPool

VOCAB, SEQ_LEN = 64, 24


def make_batches(n_steps: int, *, n_micro: int, micro_batch: int, seed: int = 0) -> list[StepBatch]:
    """Step batches whose micro-batches have very different numbers of labels."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        shape = (n_micro, micro_batch, SEQ_LEN)
        ids = rng.integers(0, VOCAB, shape, dtype=np.int32)
        labels = rng.integers(0, VOCAB, shape, dtype=np.int32)
        doc_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for index in np.ndindex(shape[:2]):
            cut = int(rng.integers(1, SEQ_LEN))
            doc_ids[index][cut:] = 1
            positions[index] = np.concatenate([np.arange(cut), np.arange(SEQ_LEN - cut)])
            labels[index][rng.random(SEQ_LEN) < rng.random()] = -100
        valid = int((labels != -100).sum())
        batches.append(
            StepBatch(input_ids=ids, labels=labels, position_ids=positions, doc_ids=doc_ids, valid_tokens=valid)
        )
    return batches


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Up to four ranks with the engine loaded; their server starts when a test first asks for some."""
    return RankPool(4, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


@pytest.fixture
def batches():
    return make_batches


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        n_heads=4,
        n_kv_heads=2,
        n_layers=2,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=request.param,
    )
