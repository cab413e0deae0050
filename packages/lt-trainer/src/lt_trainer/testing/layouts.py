"""What tests of layouts share: batches that are unkind to them, what a rank saw, and the tensors that ranks make up.

A layout of ranks is compared with one process per parameter, so a rank gives back copies of its slices; `whole` joins
those of all ranks and refuses an element that two of them give, or none. Everything here runs in any engine's rank.

Shapes: rows are [1, rows, T] in a global batch and [M, B, T] in a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import Checkpoint, Meta, Shard, begin, commit, write_part
from lt_trainer.engine import Engine, StepBatch, StepMetrics

__all__ = [
    "Piece",
    "Tensors",
    "Trained",
    "assert_near",
    "global_batches",
    "interrupted",
    "lr_of",
    "part_of",
    "pieces",
    "resumed",
    "saved",
    "train",
    "whole",
    "with_a_bad_step",
]

Boxes = Callable[[], Iterable[Shard]]
"""What gives a rank's slices as they are now."""

Tensors = dict[tuple[str, str], np.ndarray]
"""Group and name → the whole tensor."""


def global_batches(n_steps: int, *, rows: int, seq_len: int, vocab: int, seed: int = 0) -> list[StepBatch]:
    """Steps [1, rows, seq_len] in documents, with unlike numbers of labels."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        shape = (1, rows, seq_len)
        cuts = rng.integers(1, seq_len, (1, rows, 1))
        counting = np.arange(seq_len, dtype=np.int32)
        docs = (counting >= cuts).astype(np.int32)
        labels = rng.integers(0, vocab, shape, dtype=np.int32)
        labels[rng.random(shape) < rng.random((1, rows, 1))] = -100
        batches.append(
            StepBatch(
                input_ids=rng.integers(0, vocab, shape, dtype=np.int32),
                labels=labels,
                position_ids=(counting - docs * cuts).astype(np.int32),
                doc_ids=docs,
                valid_tokens=int((labels != -100).sum()),
            )
        )
    return batches


def part_of(batch: StepBatch, engine: Engine, micro_batch: int) -> StepBatch:
    """This rank's rows of a global batch, in micro-batches."""
    place, (_, rows, seq_len) = engine.topology, batch.input_ids.shape
    mine = slice(place.dp_rank * rows // place.dp_size, (place.dp_rank + 1) * rows // place.dp_size)
    names = ("input_ids", "labels", "position_ids", "doc_ids")
    arrays = {n: getattr(batch, n)[0, mine].reshape(-1, micro_batch, seq_len) for n in names}
    return StepBatch(**arrays, valid_tokens=batch.valid_tokens)


def lr_of(step: int) -> float:
    """The learning rate of a step, counted from 0: another one each time."""
    return 1e-2 / (step + 1)


@dataclass(frozen=True)
class Piece:
    """One rank's slice of one tensor of its state."""

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    values: np.ndarray


def pieces(shards: Iterable[Shard]) -> list[Piece]:
    """Copies of a rank's slices."""
    found = []
    for s in shards:
        kind = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16}[s.dtype]
        values = s.bytes().view(kind).reshape(s.shape).copy()
        found.append(Piece(s.group, s.name, s.dtype, s.global_shape, s.offset, values))
    return found


def whole(parts: Iterable[Iterable[Piece]]) -> Tensors:
    """The tensors that the ranks' slices make up, each element from exactly one of them."""
    tensors: Tensors = {}
    seen: Tensors = {}
    for piece in (piece for part in parts for piece in part):
        key = (piece.group, piece.name)
        tensor = tensors.setdefault(key, np.zeros(piece.shape, piece.values.dtype))
        mask = seen.setdefault(key, np.zeros(piece.shape, bool))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.values.shape, strict=True))
        assert not mask[place].any(), f"{piece.name}: two ranks give the same elements"
        tensor[place], mask[place] = piece.values, True
    assert all(mask.all() for mask in seen.values()), "elements that no rank gives"
    return tensors


def assert_near(found: Tensors, wanted: Tensors, near: float) -> None:
    """The same tensors, each with ||difference|| <= near * ||wanted||."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        scale = np.linalg.norm(tensor)
        assert scale > 0, f"{key} says nothing"
        assert np.linalg.norm(found[key] - tensor) <= near * scale, key


@dataclass(frozen=True)
class Trained:
    """What one rank saw: numbers by step, and its state before the first, after the first and after the last step."""

    losses: list[float]
    norms: list[float]
    validation: tuple[float, int]
    state_bytes: tuple[int, int]
    """What the engine says that its part of a checkpoint takes, and what it takes."""
    states: tuple[list[Piece], ...]


def train(engine: Engine, batches: Sequence[StepBatch], rest: StepBatch, micro_batch: int, boxes: Boxes) -> Trained:
    """In a rank: a step for each global batch, then validation on `rest`; closes the engine."""
    numbers: list[StepMetrics] = []
    states = [pieces(boxes())]
    for step, batch in enumerate(batches):
        numbers += engine.read([engine.step(part_of(batch, engine, micro_batch), lr_of(step))])
        if step in (0, len(batches) - 1):
            states.append(pieces(boxes()))
    own = part_of(rest, engine, micro_batch)
    validation = engine.evaluate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
    counted = engine.state_bytes(), sum(shard.bytes().nbytes for shard in engine.state().shards)
    engine.close()
    return Trained([n.loss for n in numbers], [n.grad_norm for n in numbers], validation, counted, tuple(states))


def interrupted(
    engine: Engine, batches: Sequence[StepBatch], folder: str, boxes: Boxes
) -> tuple[str, list[Piece], list[Piece], list[float]]:
    """In a rank: two steps, a checkpoint, and a third step; its path, the state at both times, the losses."""
    first, second, third = (part_of(batch, engine, 1) for batch in batches)
    numbers = engine.read([engine.step(first, 1e-2), engine.step(second, 1e-2)])
    before = pieces(boxes())
    path = saved(engine, folder, step=2)
    numbers = [*numbers, *engine.read([engine.step(third, 1e-2)])]
    after = pieces(boxes())
    engine.close()
    return path, before, after, [n.loss for n in numbers]


def saved(engine: Engine, folder: str, *, step: int) -> str:
    """In a rank: a checkpoint of all ranks; its path on rank 0, nothing on others."""
    rank, world = engine.topology.rank, engine.topology.world
    tmp = engine.control.broadcast(str(begin(Path(folder), step=step, world=world)) if rank == 0 else "")
    snapshot = engine.state()
    write_part(Path(tmp), rank=rank, shards=snapshot.shards, layout=snapshot.layout)
    engine.control.all_max(0)
    return str(commit(Path(tmp), world=world, meta=Meta(step=step, small=snapshot.small))) if rank == 0 else ""


def resumed(engine: Engine, third: StepBatch, path: str, boxes: Boxes) -> tuple[list[Piece], list[Piece], list[float]]:
    """In a rank: a checkpoint taken over by an engine with other weights, and the third step."""
    engine.restore(Checkpoint.open(path))
    taken = pieces(boxes())
    numbers = engine.read([engine.step(part_of(third, engine, 1), 1e-2)])
    after = pieces(boxes())
    engine.close()
    return taken, after, [n.loss for n in numbers]


def with_a_bad_step(
    engine: Engine, batches: Sequence[StepBatch], boxes: Boxes, more: Callable[[], Any] = lambda: None
) -> tuple[list[StepMetrics], list[list[Piece]], Any]:
    """In a rank: a good step, one that is infinite on the last data-parallel rank alone, a good one; and `more`."""
    first, bad, third = (part_of(batch, engine, 2) for batch in batches)
    if engine.topology.dp_rank == engine.topology.dp_size - 1:
        bad = replace(bad, valid_tokens=0)
    numbers: list[StepMetrics] = []
    states: list[list[Piece]] = []
    for batch in (first, bad, third):
        numbers += engine.read([engine.step(batch, 1e-2)])
        states.append(pieces(boxes()))
    told = more()
    engine.close()
    return numbers, states, told
