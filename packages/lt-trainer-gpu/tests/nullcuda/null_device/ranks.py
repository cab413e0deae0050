"""One rank on the null device: an engine, some steps, marks in the device's log around each."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do.

    Attributes:
        folder: folder of the logs, one per rank, and of the run.
        ranks: number of ranks.
        model: fields of `ModelConfig`, without the vocabulary.
        vocab_size: rows of embedding and head.
        row_lengths: row length of each step; the longest is the recipe's.
        rows: rows of a step, of all ranks.
        micro_batch_size: rows of a micro-batch of the longest rows; shorter rows have more, the same tokens.
        overrides: recipe fields.
        one_document: steps (by number) whose rows are one document each.
        fault: fault of the engine to plant, one of `FAULTS`; none when empty.
        expert_skew: rows that each expert-parallel rank computes, over their mean; nothing there counts them.
    """

    folder: str = ""
    ranks: int = 1
    model: tuple[tuple[str, Any], ...]
    vocab_size: int = 512
    row_lengths: tuple[int, ...] = (128, 128, 128)
    rows: int = 4
    micro_batch_size: int = 1
    overrides: tuple[str, ...] = ()
    one_document: tuple[int, ...] = ()
    fault: str = ""
    expert_skew: int = 1


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What a rank returns beside its log.

    Attributes:
        peak_bytes: most bytes that torch's allocator held for tensors, of each step.
        graphs: graphs that torch.compile has made, after each step.
        seconds: time of each step on the host.
        expandable: whether torch's allocator has expandable segments.
    """

    peak_bytes: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    expandable: bool = False


def train(job: Job) -> RankResult:
    """Run the steps of `job` in this rank."""
    import torch

    from lt_model import ModelConfig
    from lt_test_helpers import layouts
    from lt_trainer.config.model_section import architecture_values
    from lt_trainer.config.recipe import load
    from lt_trainer.config.section import unflatten
    from lt_trainer.engine import World
    from lt_trainer_gpu import expert_parallel
    from lt_trainer_gpu.spec import SPEC

    os.environ["NULLCUDA_LOG"] = str(Path(job.folder) / f"{os.environ['RANK']}.log")
    mark = ctypes.CDLL(None).nullcuda_mark
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN cannot be replaced: it computes on what it finds in memory
    skews = 1, job.expert_skew  # of rows sent and received
    expert_parallel.split_sizes = lambda sent, _, n: tuple([skew * n // len(sent)] * len(sent) for skew in skews)
    longest = max(job.row_lengths)
    config = ModelConfig(vocab_size=job.vocab_size, max_position_embeddings=longest, **dict(job.model))
    base = {
        "run": {"dir": job.folder},
        "model": unflatten(architecture_values(config)),
        "data": {"store": "unused", "seq_len": longest},
        "batch": {"global_batch_size": job.rows, "micro_batch_size": job.micro_batch_size},
        "optimizer": {"grad_clip": 1.0, "weight_decay": 0.1},
        "schedule": {"max_steps": len(job.row_lengths), "warmup_steps": 1},
        "engine": {"gpu": {"device": "cuda", "compile": False}},
    }
    recipe, world = load(base=base, overrides=job.overrides).recipe, World.from_env(os.environ)
    SPEC.check(recipe, world)
    engine: Any = SPEC.open(recipe, config, world)
    FAULTS[job.fault]()
    result = RankResult(expandable=_expandable_segments())
    for step, seq_len in enumerate(job.row_lengths):
        rows = job.rows * longest // seq_len
        (batch,) = layouts.global_batches(1, rows=rows, seq_len=seq_len, vocab=job.vocab_size, seed=step)
        part = layouts.rank_batch(batch, engine, job.micro_batch_size * longest // seq_len)
        if step in job.one_document:
            names = {name: getattr(part, name) for name in ("input_ids", "labels", "position_ids", "valid_tokens")}
            part = layouts.step_batch(doc_ids=part.doc_ids, document_mask=False, **names)
        torch.cuda.reset_peak_memory_stats()
        mark(f"step {step}".encode())
        start = time.perf_counter()
        pending = engine.step(part, 1e-3)
        result.seconds.append(time.perf_counter() - start)
        mark(f"fetch {step}".encode())
        engine.fetch_metrics([pending])
        mark(b"between")
        result.peak_bytes.append(engine.peak_memory_bytes())
        result.graphs.append(_compiled_graphs())
    engine.close()
    mark(b"closed")
    return result


def _compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def _expandable_segments() -> bool:
    import torch

    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


# ---- faults that the gate must notice, each in the reduction of loss and norm
def _before_reduction(fault: Callable[[Any], object]) -> None:
    import lt_trainer_gpu.engine as engine_module

    reduce_loss_and_norm = engine_module.reduce_loss_and_norm

    def reduce(loss: Any, *args: Any, **kwargs: Any) -> Any:
        fault(loss)
        return reduce_loss_and_norm(loss, *args, **kwargs)

    engine_module.reduce_loss_and_norm = reduce


def _wide_product(loss: Any) -> None:
    ones = loss.new_empty(64, 64).float()
    ones @ ones


def _extra_collective(loss: Any) -> None:
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        dist.all_reduce(loss.new_zeros(1))


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "read the loss": lambda: _before_reduction(lambda loss: loss.item()),
    "product in float32": lambda: _before_reduction(_wide_product),
    "collective on one rank": lambda: _before_reduction(_extra_collective),
}
