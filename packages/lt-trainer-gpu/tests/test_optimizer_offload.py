"""Optimizer state in host memory: the same bits on every mesh, after skipped steps and a resume; in many chunks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_model import ModelConfig
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice
from lt_trainer_gpu import optimizer_offload
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.optimizer_offload import ChunkPipeline

MODEL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2}
VOCAB, SEQ_LEN, ROWS = 64, 16, 4
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL)
OFFLOAD = "engine.gpu.optimizer_offload=true"
CHUNK_BYTES = 3000
"""Some rows of a matrix, or several norms."""


def open_engine(*sets: str) -> GpuEngine:
    optimizer_offload.CHUNK_BYTES = CHUNK_BYTES
    optimizer = {"grad_clip": 0.1, "weight_decay": 0.1}
    return layouts.open_engine(
        *sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, dtype="float32", optimizer=optimizer
    )


def global_batches() -> list[Any]:
    return layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)


def trained(sets: tuple[str, ...]) -> tuple[list[Any], list[list[StateSlice]], int]:
    """In a rank: three steps, the second not finite; metrics, states, and the chunks that were copied."""
    engine, n_chunks = open_engine(*sets), 0
    iter_on_device = ChunkPipeline.iter_on_device

    def counted(self: ChunkPipeline, chunks: Any) -> Any:
        nonlocal n_chunks
        n_chunks += len(chunks)
        return iter_on_device(self, chunks)

    ChunkPipeline.iter_on_device = counted
    metrics, states, _ = layouts.train_with_nonfinite_step(engine, global_batches(), lambda: engine.state().shards)
    return metrics, states, n_chunks


def differing(ours: list[StateSlice], theirs: list[StateSlice]) -> list[tuple[str, str]]:
    assert [(one.group, one.name) for one in ours] == [(one.group, one.name) for one in theirs]
    pairs = zip(ours, theirs, strict=True)
    return [(a.group, a.name) for a, b in pairs if (a.dtype, a.values.tobytes()) != (b.dtype, b.values.tobytes())]


BF16_WEIGHTS = ("optimizer.weights_dtype=bfloat16", "engine.gpu.dtype=bfloat16")
BF16_MOMENTS = ("optimizer.moments_dtype=bfloat16", "engine.gpu.dtype=bfloat16")
MUON = ("optimizer.name=muon",)
TP_SP = ("parallel.tp=2", "parallel.sequence_parallel=true")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "one-bf16-weights": (1, BF16_WEIGHTS),
    "one-bf16-moments": (1, BF16_MOMENTS),
    "one-muon": (1, MUON),
    "fsdp": (2, ()),
}
SLOW_LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp-bf16-weights": (2, BF16_WEIGHTS),
    "fsdp-muon": (2, MUON),
    "tp-sp": (2, TP_SP),
    "pp": (2, ("parallel.pp=2",)),
    "hsdp-tp": (4, ("parallel.dp_replicate=2", "parallel.tp=2")),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
def test_training_has_the_same_bits(ranks: Callable[..., Any], name: str) -> None:
    """Weights and moments after each of three steps, clipped, the second skipped."""
    n, sets = (LAYOUTS | SLOW_LAYOUTS)[name]
    plain = ranks.run(trained, sets, ranks=n)
    found = ranks.run(trained, (*sets, OFFLOAD), ranks=n)
    for (metrics, states, n_chunks), (wanted_metrics, wanted_states, without) in zip(found, plain, strict=True):
        assert n_chunks > 3 * 4
        assert without == 0
        assert [one.is_finite for one in metrics] == [True, False, True]
        assert [metrics[0], metrics[2]] == [wanted_metrics[0], wanted_metrics[2]]
        assert metrics[0].grad_norm > 0.1, "not clipped"
        assert [differing(ours, theirs) for ours, theirs in zip(states, wanted_states, strict=True)] == [[], [], []]
        assert differing(states[0], states[1]) == []
        assert differing(states[1], states[2]) != []


def saved_by(sets: tuple[str, ...], folder: str) -> tuple[str, list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine(*sets)
    return layouts.train_save_train(engine, global_batches(), folder, lambda: engine.state().shards)


def resumed_by(sets: tuple[str, ...], path: str) -> tuple[list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine(*sets, "run.seed=7")
    return layouts.restore_and_train(engine, global_batches()[2], path, lambda: engine.state().shards)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("before", "after"), [((OFFLOAD,), ()), ((), (OFFLOAD,))])
def test_a_run_goes_on_with_and_without_it(
    ranks: Callable[..., Any], tmp_path: Path, n: int, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    saved = ranks.run(saved_by, before, str(tmp_path), ranks=n)
    resumed = ranks.run(resumed_by, after, saved[0][0], ranks=n)
    for (_, at_save, at_end, losses), (restored, at_end_too, loss) in zip(saved, resumed, strict=True):
        assert differing(restored, at_save) == []
        assert differing(at_end_too, at_end) == []
        assert losses[2:] == loss


def test_chunks_have_at_most_two_buffers_and_come_back() -> None:
    chunks = [[torch.full((n,), 1.0), torch.full((3, n), 2.0, dtype=torch.bfloat16)] for n in (5, 130, 7, 64)]
    memory: dict[int, int] = {}
    for index, tensors in enumerate(ChunkPipeline(torch.device("cpu")).iter_on_device(chunks)):
        assert [one.dtype for one in tensors] == [torch.float32, torch.bfloat16]
        assert all(one.storage_offset() * one.itemsize % optimizer_offload.ALIGN == 0 for one in tensors)
        memory[index] = tensors[0].untyped_storage().data_ptr()
        for one in tensors:
            one += 1 + index
    assert memory[0] == memory[2] != memory[1] == memory[3]
    for index, (first, second) in enumerate(chunks):
        assert first.unique().tolist() == [2 + index]
        assert second.unique().tolist() == [3 + index]
