"""A run in miniature without torch: a little store, and an engine of numpy whose weights depend on every row it saw."""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from lt_ckpt import Checkpoint, Shard
from lt_data import Tokenizer, TokenStore, pack, prepare
from lt_data.sources.reader import read_documents
from lt_model import ModelConfig, config_from_hf, config_to_hf, param_specs
from lt_test_helpers.layouts import whole_batch
from lt_trainer import engine as engine_module
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.config.section import Section
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, StepParts, Stopwatch, Topology, World
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.resilience.rank_sync import read_on_all_ranks

WIDTH = 16


class FakeEngine:
    """Exact arithmetic on hashes of rows: any row lost, repeated or swapped changes every later loss.

    `on_step` hears of every call of `step` (from 1), `poison` tells which of them are not finite.
    """

    def __init__(self, recipe: Recipe, model: ModelConfig, world: World) -> None:
        self.topology = Topology(rank=world.rank, world_size=world.size, dp_rank=world.rank, dp_size=world.size)
        self.control = Control()
        self.device = Device(name="fake", kind="cpu", count=world.size, peak_flops=1e12, peak_source="made up")
        self.stopwatch = Stopwatch()
        self.recomputed_flops_per_token = 0.0
        self.weights = np.arange(WIDTH, dtype=np.float64)
        self.steps = self.calls = 0
        self.reads: list[int] = []
        self.rows: list[bytes] = []
        self.lrs: list[float] = []
        self.closed = False
        self.on_step: Callable[[int], None] = lambda call: None
        self.poison: Callable[[int, StepBatch], bool] = lambda call, batch: False
        self.poisoned = (math.nan, math.nan)

    def step(self, parts: StepParts, lr: float) -> tuple[float, float]:
        batch = whole_batch(parts)
        assert batch.input_ids.dtype == np.int32
        self.stopwatch.begin("forward_backward")
        self.lrs.append(lr)
        self.rows.extend(row.tobytes() for row in batch.input_ids.reshape(-1, batch.input_ids.shape[-1]))
        gradient = np.bincount(batch.input_ids.ravel() % WIDTH, minlength=WIDTH) / batch.valid_tokens
        self.calls += 1
        self.on_step(self.calls)
        if self.poison(self.calls, batch):
            return self.poisoned
        self.weights[:] = self.weights - lr * gradient + 1e-3 * np.sin(self.weights)  # in place, as real ones do
        self.steps += 1
        return float(np.abs(self.weights).sum()), float(np.sqrt((gradient**2).sum()))

    def fetch_metrics(self, pendings: Sequence[tuple[float, float]]) -> list[StepMetrics]:
        self.reads.append(len(pendings))
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in pendings]

    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        tokens = sum(batch.valid_tokens for batch in batches)
        return float(self.weights[0]) * tokens, tokens

    def score(self, batch: StepBatch) -> PositionScores:
        """After id i, the label i + 1 is greedy and the likelier the nearer it is; the weights make it exact."""
        distance = (batch.labels - batch.input_ids - 1) % WIDTH
        log_probs = -np.log1p(distance) - np.abs(self.weights[distance]) * 1e-3
        return PositionScores.at_positions(batch.labels, np.arange(batch.labels.size), log_probs, distance == 0)

    def on_step_begin(self, step: int) -> list[Path]:
        return []

    def dump_debug_info(self, folder: Path) -> str:
        return ""

    def peak_memory_bytes(self) -> int:
        return 3 * 2**30

    def state_bytes(self) -> int:
        return self.weights.nbytes

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def state(self) -> Snapshot:
        data = self.weights.view(np.uint8)
        shape = self.weights.shape
        shard = Shard(group="weights", name="w", dtype="F64", global_shape=shape, offset=(0,), shape=shape, data=data)
        return Snapshot(shards=[shard], scalars={"optimizer_step": self.steps})

    def restore(self, checkpoint: Checkpoint) -> None:
        def read() -> None:
            self.weights = checkpoint.read("weights", "w").view(np.float64).copy()

        read_on_all_ranks(self.control, read)
        self.steps = int(checkpoint.manifest.scalars["optimizer_step"])

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        parts = pretrained.read("model.norm.weight", (0,), (WIDTH,), "F64")
        self.weights = np.concatenate([part.view(np.float64) for part in parts])

    def close(self) -> None:
        self.closed = True


class FakeSpec:
    """The spec of the fake engine; every engine that it opened is kept in `opened`."""

    name = "fake"
    capabilities = frozenset({"document_mask"})

    def __init__(self, options: type) -> None:
        self.options = options
        self.opened: list[FakeEngine] = []
        self.on_step: Callable[[int], None] = lambda call: None
        self.poison: Callable[[int, StepBatch], bool] = lambda call, batch: False
        self.poisoned = (math.nan, math.nan)

    def check(self, recipe: Recipe, world: World) -> None:
        recipe.accumulation_steps(world.size)

    def env(self, recipe: Recipe) -> dict[str, str]:
        return {}

    def open(self, recipe: Recipe, model: ModelConfig, world: World) -> FakeEngine:
        engine = FakeEngine(recipe, model, world)
        engine.on_step, engine.poison, engine.poisoned = self.on_step, self.poison, self.poisoned
        self.opened.append(engine)
        return engine


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeSpec:
    """The fake engine, installed beside the real ones as entry points are.

    Its runs do not wait for the disk, which takes most of their time where other tests write to it; what must be
    synced is tested with failing disks.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    spec = FakeSpec(type("FakeOptions", (Section,), {}))
    entries = {**engine_module.engine_entries(), "fake": SimpleNamespace(name="fake", load=lambda: spec)}
    monkeypatch.setattr(engine_module, "engine_entries", lambda: entries)
    return spec


@pytest.fixture(scope="session")
def little_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the token stores `train` and `validation`, packed in rows of 32, vocabulary 300."""
    root = tmp_path_factory.mktemp("little")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    for half, documents in (("train", 40), ("validation", 5)):
        folder = root / f"text-{half}"
        folder.mkdir()
        for i in range(documents):
            picked = [words[(i * 7 + j * j) % len(words)] for j in range(5 + 11 * i % 90)]
            (folder / f"{i:03}.txt").write_text(f"{half} {i}: " + " ".join(picked))
    tokenizer = Tokenizer.train((d.text for d in read_documents([root / "text-train"])), vocab_size=300)
    for half in ("train", "validation"):
        prepare([root / f"text-{half}"], tokenizer=tokenizer, out=root / half)
        pack(TokenStore(root / half), seq_len=32)
    return root


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, little_data: Path) -> Path:
    """A Hugging Face folder of a family with caps, scales and a window; the tokenizer of the little data."""
    folder, rng = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    values = {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "head_dim": 8}
    values |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    values |= {"num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 64, "sliding_window": 8}
    config = config_from_hf(values)
    weights = {p.name: (rng.standard_normal(p.shape) * 0.3).astype(np.float32) for p in param_specs(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    for name, content in TokenStore(little_data / "validation").tokenizer().files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def recipe_base(little_data: Path, tmp_path: Path) -> dict[str, dict[str, object]]:
    """The tables of a small recipe over the little data."""
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hidden_size": 32, "intermediate_size": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
        "data": {"store": str(little_data / "train"), "validation": str(little_data / "validation"), "seq_len": 32},
        "batch": {"global_batch_size": 8, "micro_batch_size": 4},
        "schedule": {"max_steps": 20, "warmup_steps": 2},
        "checkpoint": {"interval": 6},
        "metrics": {"log_interval": 1},
    }
