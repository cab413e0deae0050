"""A little model, step batches with documents of uneven length, and engines, for the engine's tests.

What takes `device` runs twice: on the CPU, and on a CUDA device where there is one (marker `gpu`, else skipped).
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lt_model import ModelConfig
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import StepBatch, World
from lt_trainer_gpu.engine import GpuEngine

if torch.cuda.is_available():
    # What the engine's spec asks of deterministic runs is read once, so it must be there before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
from lt_test_helpers.layouts import step_batch
from lt_test_helpers.pool import RankPool

VOCAB, SEQ_LEN = 64, 24
FIXED = ("engine.gpu.device=cpu", "engine.gpu.dtype=float64", "engine.gpu.compile=false")


def make_batches(n_steps: int, *, n_micro: int, micro_batch_size: int, seed: int = 0) -> list[StepBatch]:
    """Step batches whose micro-batches have very different numbers of labels."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        shape = (n_micro, micro_batch_size, SEQ_LEN)
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
            step_batch(input_ids=ids, labels=labels, position_ids=positions, doc_ids=doc_ids, valid_tokens=valid)
        )
    return batches


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Up to eight ranks with the engine loaded; their server starts when a test first asks for some."""
    modules = ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize", "lt_test_helpers.layouts", "pytest")
    return RankPool(8, preload=modules)


@pytest.fixture
def batches():
    return make_batches


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        n_heads=4,
        n_kv_heads=2,
        n_layers=2,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=request.param,
    )


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Recipes of the little model's engine, in float64 on the CPU and eager unless told otherwise."""

    def make(*sets: str) -> Recipe:
        base = {"data": {"store": "unused"}, "schedule": {"max_steps": 10, "warmup_steps": 1}}
        return load(base=base, overrides=[*FIXED, *sets]).recipe

    return make


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here: what runs on a GPU stays untested")
    return torch.device("cuda", 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device to test on."""
    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return request.param


@pytest.fixture
def open_on(recipe) -> Iterator[Callable[..., GpuEngine]]:
    """Opens an engine on a device, after closing the one that was open."""
    opened: list[GpuEngine] = []

    def open_one(device: str, config: ModelConfig, *sets: str) -> GpuEngine:
        close()
        made = recipe(f"engine.gpu.device={device}", *sets)
        opened.append(GpuEngine(made, config, World()))
        return opened[-1]

    def close() -> None:
        while opened:
            opened.pop().close()
            torch.use_deterministic_algorithms(False)

    yield open_one
    close()
