"""Helpers for tests of parallel layouts: adversarial batches, results of a rank, assembled tensors.

Layouts are compared with a single process tensor by tensor, so a rank returns copies of its slices; `assemble` joins
those of all ranks and checks that every element comes from exactly one. Works in the ranks of any engine.

Shapes: rows are [1, rows, T] in a global batch and [M, B, T] in a rank's part of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import Checkpoint, CheckpointMetadata, Shard, begin_save, commit_save, write_rank_files
from lt_trainer.config.recipe import load, model_config
from lt_trainer.data.document_boundaries import find_document_starts, micro_batch_cu_seqlens
from lt_trainer.engine import Engine, StepBatch, StepMetrics, StepParts, World, engine_spec
from lt_trainer.evaluation.position_scores import PositionScores

SCHEDULE = {"max_steps": 9, "warmup_steps": 1}

ShardsFn = Callable[[], Iterable[Shard]]
"""Returns a rank's current slices."""

NamedTensors = dict[tuple[str, str], np.ndarray]
"""Full tensors by group and name."""


def open_engine(
    *sets: str,
    model: Mapping[str, Any],
    rows: int,
    seq_len: int,
    vocab: int,
    dtype: str = "float64",
    optimizer: Mapping[str, Any] | None = None,
) -> Any:
    """Check the recipe of a little model in this rank and open its gpu engine, on a CPU."""
    base = {
        "model": {"tie_word_embeddings": False, **model},
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": rows, "micro_batch_size": 1},
        "optimizer": optimizer or {},
        "schedule": SCHEDULE,
        "engine": {"gpu": {"device": "cpu", "dtype": dtype}},
    }
    recipe, world, spec = load(base=base, overrides=sets).recipe, World.from_env(os.environ), engine_spec("gpu")
    spec.check(recipe, world)
    return spec.open(recipe, model_config(recipe, vocab), world)


def global_batches(n_steps: int, *, rows: int, seq_len: int, vocab: int, seed: int = 0) -> list[StepBatch]:
    """Return batches of [1, rows, seq_len] with several documents per row and uneven label counts."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        shape = (1, rows, seq_len)
        cuts = rng.integers(1, seq_len, (1, rows, 1))
        positions = np.arange(seq_len, dtype=np.int32)
        docs = (positions >= cuts).astype(np.int32)
        labels = rng.integers(0, vocab, shape, dtype=np.int32)
        labels[rng.random(shape) < rng.random((1, rows, 1))] = -100
        batches.append(
            step_batch(
                input_ids=rng.integers(0, vocab, shape, dtype=np.int32),
                labels=labels,
                position_ids=(positions - docs * cuts).astype(np.int32),
                doc_ids=docs,
                valid_tokens=int((labels != -100).sum()),
            )
        )
    return batches


def step_batch(*, doc_ids: np.ndarray, document_mask: bool = True, **fields: Any) -> StepBatch:
    """Return a step batch with the cu_seqlens of `doc_ids` [M, B, T] and at least one padding entry.

    Args:
        doc_ids: document numbers.
        document_mask: False: rows are one document each.
        fields: the other fields of `StepBatch`.
    """
    n_micro, n_rows, seq_len = doc_ids.shape
    starts = find_document_starts(doc_ids.reshape(-1, seq_len))
    if not document_mask:
        starts[:, 1:] = False
    cu_seqlens = micro_batch_cu_seqlens(
        np.flatnonzero(starts),
        n_micro=n_micro,
        n_tokens=n_rows * seq_len,
        max_documents=n_rows * (int(starts.sum(axis=1).max()) + 1),
    )
    return StepBatch(doc_ids=doc_ids, cu_seqlens=cu_seqlens, **fields)


@dataclass(frozen=True)
class OneByOne:
    """Step whose parts are single micro-batches; a part is made when it is asked for, and only in order."""

    batch: StepBatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)

    def parts(self) -> Iterator[StepBatch]:
        names = ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens")
        for index in range(self.batch.n_micro_batches):
            yield replace(self.batch, **{name: getattr(self.batch, name)[index : index + 1] for name in names})


def whole_batch(step: StepParts) -> StepBatch:
    """Return all micro-batches of a step in one batch."""
    parts = list(step.parts())
    names = ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return StepBatch(**arrays, valid_tokens=step.valid_tokens)


def rank_batch(batch: StepBatch, engine: Engine, micro_batch_size: int) -> StepBatch:
    """Return this rank's rows of a global batch, in micro-batches."""
    own, seq_len = rank_rows(batch, engine, micro_batch_size), batch.input_ids.shape[-1]
    names = ("input_ids", "labels", "position_ids", "doc_ids")
    arrays = {n: getattr(batch, n)[0, own].reshape(-1, micro_batch_size, seq_len) for n in names}
    return step_batch(**arrays, valid_tokens=batch.valid_tokens)


def rank_rows(batch: StepBatch, engine: Engine, micro_batch_size: int) -> np.ndarray:
    """Return this rank's rows of a global batch, dealt micro-step by micro-step."""
    dp_size, dp_rank = engine.topology.dp_size, engine.topology.dp_rank
    return np.arange(batch.input_ids.shape[1]).reshape(-1, dp_size, micro_batch_size)[:, dp_rank].flatten()


def learning_rate_at(step: int) -> float:
    """Return the learning rate of a step, counted from 0; different for each step."""
    return 1e-2 / (step + 1)


@dataclass(frozen=True)
class StateSlice:
    """Slice of a state tensor on one rank."""

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    values: np.ndarray


def copy_slices(shards: Iterable[Shard]) -> list[StateSlice]:
    """Return copies of a rank's slices."""
    slices = []
    for s in shards:
        dtype = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16}[s.dtype]
        values = s.bytes().view(dtype).reshape(s.shape).copy()
        slices.append(StateSlice(s.group, s.name, s.dtype, s.global_shape, s.offset, values))
    return slices


def assemble(ranks: Iterable[Iterable[StateSlice]]) -> NamedTensors:
    """Return the full tensors from the slices of all ranks, each element from exactly one."""
    tensors: NamedTensors = {}
    masks: NamedTensors = {}
    for piece in (piece for slices in ranks for piece in slices):
        key = (piece.group, piece.name)
        tensor = tensors.setdefault(key, np.zeros(piece.shape, piece.values.dtype))
        mask = masks.setdefault(key, np.zeros(piece.shape, bool))
        index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.values.shape, strict=True))
        assert not mask[index].any(), f"{piece.name}: overlapping slices"
        tensor[index], mask[index] = piece.values, True
    assert all(mask.all() for mask in masks.values()), "missing elements"
    return tensors


def assert_near(actual: NamedTensors, expected: NamedTensors, rtol: float) -> None:
    """Assert ||actual - expected|| <= rtol * ||expected|| for every tensor."""
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        scale = np.linalg.norm(tensor)
        assert scale > 0, f"{key} is all zeros"
        assert np.linalg.norm(actual[key] - tensor) <= rtol * scale, key


@dataclass(frozen=True)
class TrainResult:
    """Metrics by step of one rank, and its state before the first, after the first and last step."""

    losses: list[float]
    grad_norms: list[float]
    validation: tuple[float, int]
    scores: PositionScores
    """Scores of the validation batch that this rank reports, in the place of its rows: [1, rows, T]."""
    state_bytes: tuple[int, int]
    """Bytes of the rank's checkpoint shards as reported by the engine, and as counted."""
    states: tuple[list[StateSlice], ...]


def train_steps(
    engine: Engine, batches: Sequence[StepBatch], validation_batch: StepBatch, micro_batch_size: int, shards: ShardsFn
) -> TrainResult:
    """Run a step for each global batch and validate, in a rank; closes the engine."""
    metrics: list[StepMetrics] = []
    states = [copy_slices(shards())]
    for step, batch in enumerate(batches):
        metrics += engine.fetch_metrics(
            [engine.step(OneByOne(rank_batch(batch, engine, micro_batch_size)), learning_rate_at(step))]
        )
        if step in (0, len(batches) - 1):
            states.append(copy_slices(shards()))
    own = rank_batch(validation_batch, engine, micro_batch_size)
    validation = engine.validate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
    scores = _in_global_batch(engine.score(own), validation_batch, engine)
    state_bytes = engine.state_bytes(), sum(shard.bytes().nbytes for shard in engine.state().shards)
    engine.close()
    losses, grad_norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return TrainResult(losses, grad_norms, validation, scores, state_bytes, tuple(states))


def _in_global_batch(scores: PositionScores, batch: StepBatch, engine: Engine) -> PositionScores:
    """Return a rank's scores of its rows of a global batch, in the shape of that batch."""
    own = rank_rows(batch, engine, scores.log_probs.shape[1])
    found = PositionScores.unreported(batch.labels)
    for name in ("log_probs", "is_greedy", "is_reported"):
        values = getattr(scores, name)
        getattr(found, name)[0, own] = values.reshape(-1, values.shape[-1])
    return found


def assemble_scores(ranks: Sequence[TrainResult]) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and greedy flags of the validation batch [1, rows, T] from all ranks."""
    reports = sum(rank.scores.is_reported.astype(int) for rank in ranks)
    assert isinstance(reports, np.ndarray)
    assert reports.max() == 1, "no label, or one that two ranks report"
    log_probs, is_greedy = (sum(getattr(r.scores, name) * 1.0 for r in ranks) for name in ("log_probs", "is_greedy"))
    assert isinstance(log_probs, np.ndarray)
    assert ((log_probs < 0) == (reports == 1)).all(), "a label without a score, or a score without a label"
    return log_probs, np.asarray(is_greedy) > 0


def train_save_train(
    engine: Engine, batches: Sequence[StepBatch], folder: str, shards: ShardsFn, micro_batch_size: int = 1
) -> tuple[str, list[StateSlice], list[StateSlice], list[float]]:
    """Run two steps, save and run a third step, in a rank; return path, both states and losses."""
    first, second, third = (rank_batch(batch, engine, micro_batch_size) for batch in batches)
    metrics = engine.fetch_metrics([engine.step(first, 1e-2), engine.step(second, 1e-2)])
    before = copy_slices(shards())
    path = save_checkpoint(engine, folder, step=2)
    metrics = [*metrics, *engine.fetch_metrics([engine.step(third, 1e-2)])]
    after = copy_slices(shards())
    engine.close()
    return path, before, after, [m.loss for m in metrics]


def save_checkpoint(engine: Engine, folder: str, *, step: int) -> str:
    """Save a checkpoint of all ranks; return its path on rank 0, "" on others."""
    rank, world = engine.topology.rank, engine.topology.world_size
    tmp = engine.control.broadcast(str(begin_save(Path(folder), step=step, world_size=world)) if rank == 0 else "")
    snapshot = engine.state()
    write_rank_files(Path(tmp), rank=rank, shards=snapshot.shards, writer=snapshot.file_layout)
    engine.control.all_reduce_max(0)
    metadata = CheckpointMetadata(step=step, scalars=snapshot.scalars, optimizer=snapshot.optimizer)
    return str(commit_save(Path(tmp), world_size=world, metadata=metadata)) if rank == 0 else ""


def restore_and_train(
    engine: Engine, third: StepBatch, path: str, shards: ShardsFn
) -> tuple[list[StateSlice], list[StateSlice], list[float]]:
    """Restore a checkpoint into an engine with different weights and run the third step, in a rank."""
    engine.restore(Checkpoint.open(path))
    restored = copy_slices(shards())
    metrics = engine.fetch_metrics([engine.step(rank_batch(third, engine, 1), 1e-2)])
    after = copy_slices(shards())
    engine.close()
    return restored, after, [m.loss for m in metrics]


def train_with_nonfinite_step(
    engine: Engine, batches: Sequence[StepBatch], shards: ShardsFn, on_end: Callable[[], Any] = lambda: None
) -> tuple[list[StepMetrics], list[list[StateSlice]], Any]:
    """Run three steps, the second infinite on the last data-parallel rank only; return `on_end()` too."""
    first, bad, third = (rank_batch(batch, engine, 2) for batch in batches)
    if engine.topology.dp_rank == engine.topology.dp_size - 1:
        bad = replace(bad, valid_tokens=0)
    metrics: list[StepMetrics] = []
    states: list[list[StateSlice]] = []
    for batch in (first, bad, third):
        metrics += engine.fetch_metrics([engine.step(batch, 1e-2)])
        states.append(copy_slices(shards()))
    result = on_end()
    engine.close()
    return metrics, states, result
