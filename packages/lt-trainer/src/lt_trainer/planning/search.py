"""Search for the nearest layout that fits: the first candidate that fits, in a fixed order.

Nearest means the fewest changes, the cheapest first. From the innermost loop outwards:

1. `batch.micro_batch_size`: smaller divisors (the same step in more micro-batches);
2. `engine.gpu.activation_checkpointing`: the recipe's, then selective, then full;
3. `engine.gpu.reduce_each_micro_batch`: the recipe's, then true;
4. `parallel.dp_replicate`: fewer replicas, each sharded over more devices;
5. `parallel.tp`: the recipe's, then larger powers of two within a node that divide the key/value heads, with sequence
   parallelism, then smaller ones;
6. `parallel.cp`: the recipe's, then larger powers of two that divide the rows, up to `MAX_CP`;
7. more nodes, doubled up to `MAX_NODES`.

Pipeline stages stay as they are. The global batch size, sequence length and dtypes never change: they affect what is
learned.

Cost: a few thousand closed-form evaluations, well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lt_trainer.planning.layout import PlannedLayout

MAX_NODES = 1024
MAX_TP = 8
"""Tensor parallelism stays within a node: its collectives are on the critical path of every block."""
MAX_CP = 32
"""Context parallelism beyond this gathers more than it computes."""


def find_nearest_layout(
    layout: PlannedLayout,
    *,
    global_batch_size: int,
    kv_heads: int,
    fits: Callable[[PlannedLayout], bool],
    row_lengths: Sequence[int] = (),
) -> PlannedLayout | None:
    """Return the first candidate that fits, or None.

    Args:
        layout: layout that does not fit; the first candidate.
        global_batch_size: rows per step, equal in every candidate.
        kv_heads: key/value heads of the model; divisible by every tensor parallel degree.
        fits: predicate of a layout.
        row_lengths: lengths of rows, which other context parallel degrees must divide; none are tried without.
    """
    nodes = layout.nodes
    while nodes <= max(MAX_NODES, layout.nodes):
        for candidate in candidate_layouts(
            replace(layout, nodes=nodes),
            global_batch_size=global_batch_size,
            kv_heads=kv_heads,
            row_lengths=row_lengths,
        ):
            if fits(candidate):
                return candidate
        nodes *= 2
    return None


def candidate_layouts(
    layout: PlannedLayout, *, global_batch_size: int, kv_heads: int, row_lengths: Sequence[int] = ()
) -> Iterator[PlannedLayout]:
    """Yield every layout of these devices in the order of the module docstring."""
    for cp in _context_degrees(layout, row_lengths):
        for tp in _tensor_degrees(layout, kv_heads):
            sequence_parallel = layout.sequence_parallel if tp == layout.tp else tp > 1
            chunks = math.lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1) * cp
            if layout.world_size % (layout.pp * tp * cp) or any(length % chunks for length in row_lengths):
                continue
            parallel = replace(layout, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
            yield from _data_layouts(parallel, layout.world_size // (layout.pp * tp * cp), global_batch_size)


def _data_layouts(layout: PlannedLayout, data: int, global_batch_size: int) -> Iterator[PlannedLayout]:
    """Yield the layouts with these model parallel degrees and `data` data parallel ranks."""
    for replicas in _descending_divisors(layout.dp_replicate, data):
        for reduce_each in _bool_choices(layout.reduce_each_micro_batch):
            for checkpointing in _checkpointing_choices(layout.activation_checkpointing):
                for micro_batch_size in range(layout.micro_batch_size, 0, -1):
                    rows = micro_batch_size * data
                    if global_batch_size % rows:
                        continue
                    accumulation = global_batch_size // rows
                    if layout.stages_per_rank > 1 and accumulation % layout.pp:
                        continue  # an interleaved pipeline runs micro-batches in groups
                    if accumulation == 1 and reduce_each != layout.reduce_each_micro_batch:
                        continue  # no effect with one micro-batch
                    yield replace(
                        layout,
                        dp_replicate=replicas,
                        dp_shard=data // replicas,
                        reduce_each_micro_batch=reduce_each,
                        activation_checkpointing=checkpointing,
                        micro_batch_size=micro_batch_size,
                        accumulation_steps=accumulation,
                    )


def _context_degrees(layout: PlannedLayout, row_lengths: Sequence[int]) -> list[int]:
    larger = [1 << i for i in range(1, MAX_CP.bit_length()) if 1 << i > layout.cp] if row_lengths else []
    return [layout.cp, *larger]


def _tensor_degrees(layout: PlannedLayout, kv_heads: int) -> list[int]:
    limit = min(MAX_TP, layout.devices)
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i <= limit and kv_heads % (1 << i) == 0]
    larger = [degree for degree in powers if degree > layout.tp]
    smaller = [degree for degree in reversed(powers) if degree < layout.tp]
    return [layout.tp, *larger, *smaller]


def _descending_divisors(limit: int, number: int) -> list[int]:
    return [n for n in range(limit, 0, -1) if number % n == 0]


def _bool_choices(first: bool) -> list[bool]:
    return [first] if first else [False, True]


def _checkpointing_choices(first: str) -> list[str]:
    return [first, *(mode for mode in ("selective", "full") if mode != first)] if first != "full" else ["full"]
