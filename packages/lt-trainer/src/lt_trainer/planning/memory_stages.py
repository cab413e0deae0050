"""Part of the model on each pipeline rank, and its parameter counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lt_model import LlamaConfig
from lt_model.params import ParamSpec, param_specs
from lt_model.stages import stage_layers
from lt_trainer.planning.layout import PlannedLayout


@dataclass(frozen=True, kw_only=True)
class PlannedStages:
    """Part of the model on one pipeline rank."""

    pp_rank: int
    rows: tuple[ParamSpec, ...]
    n_layers: int
    has_head: bool
    is_tied: bool
    """Embedding and head are one tensor on this rank."""


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameter counts of a rank after tensor parallelism and before sharding."""

    all: float
    block: float
    """Parameters of the largest block."""
    head: float
    """Parameters of the head; 0 where it is on another pipeline rank."""
    embedding: float
    """Parameters of the embedding; 0 where it is on another pipeline rank."""


def iter_stages(config: LlamaConfig, layout: PlannedLayout) -> Iterator[PlannedStages]:
    """Yield each pipeline rank's part of the model."""
    layers, rows = stage_layers(config, layout.pp * layout.stages_per_rank), param_specs(config)
    for pp_rank in range(layout.pp):
        own = {layer for stage in layers[pp_rank :: layout.pp] for layer in stage}
        is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
        ends = {"embed": is_first, "final": is_last}
        found = [row for row in rows if (row.layer in own if row.layer is not None else ends[row.role])]
        if config.tie_word_embeddings and is_last and not is_first:  # its own copy of the embedding
            found.append(rows[0])
        is_tied = config.tie_word_embeddings and is_first and is_last
        yield PlannedStages(pp_rank=pp_rank, rows=tuple(found), n_layers=len(own), has_head=is_last, is_tied=is_tied)


def parameter_counts(config: LlamaConfig, stages: PlannedStages, layout: PlannedLayout) -> ParameterCounts:
    """Return the parameter counts of a pipeline rank."""
    by_block: dict[int, float] = {}
    for row in stages.rows:
        if row.layer is not None:
            by_block[row.layer] = by_block.get(row.layer, 0.0) + local_size(row, layout.tp)
    end = math.ceil(config.vocab_size / layout.tp) * config.hidden_size
    return ParameterCounts(
        all=sum(local_size(row, layout.tp) for row in stages.rows),
        block=max(by_block.values()),
        head=end if stages.has_head else 0.0,
        embedding=end if stages.pp_rank == 0 else 0.0,
    )


def local_size(row: ParamSpec, tp: int) -> float:
    """Return a device's elements of a parameter after tensor parallelism."""
    return row.numel if row.tp_dim is None else row.numel / tp
