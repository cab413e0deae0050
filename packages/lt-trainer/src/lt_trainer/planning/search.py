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

Pipeline stages and `parallel.ep` stay as they are. The global batch size, sequence length and dtypes never change: they
affect what is learned.

Cost: a few thousand closed-form evaluations, well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from lt_trainer.planning.layout import PlannedLayout

MAX_NODES = 1024
MAX_TP = 8
"""Tensor parallelism stays within a node: its collectives are on the critical path of every block."""
MAX_CP = 32
"""Context parallelism beyond this gathers more than it computes."""
POWERS = [1 << exponent for exponent in range(11)]
MODES = ("selective", "full")


def candidate_layouts(
    layout: PlannedLayout, *, global_batch_size: int, kv_heads: int, row_lengths: Sequence[int] = ()
) -> Iterator[PlannedLayout]:
    """Yield the candidates in the order of the module docstring, beginning with `layout`.

    Args:
        layout: layout that does not fit.
        global_batch_size: rows per step, equal in every candidate.
        kv_heads: key/value heads of the model; divisible by every tensor parallel degree.
        row_lengths: lengths of rows, which other context parallel degrees must divide; none are tried without.
    """
    larger_cp = [cp for cp in POWERS if layout.cp < cp <= MAX_CP and row_lengths]
    tensor = [tp for tp in POWERS if tp <= min(MAX_TP, layout.devices) and kv_heads % tp == 0]
    other_tp = [tp for tp in tensor if tp > layout.tp] + [tp for tp in reversed(tensor) if tp < layout.tp]
    nodes = [layout.nodes * n for n in POWERS if n == 1 or layout.nodes * n <= MAX_NODES]
    for n_nodes, cp, tp in product(nodes, [layout.cp, *larger_cp], [layout.tp, *other_tp]):
        sequence_parallel = layout.sequence_parallel if tp == layout.tp else tp > 1
        chunks = math.lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1) * cp
        data, left = divmod(layout.devices * n_nodes, layout.pp * tp * cp)
        has_ep = data * cp * tp % layout.ep == 0 and (layout.ep == 1 or tp == 1 or sequence_parallel)
        if not left and has_ep and all(length % chunks == 0 for length in row_lengths):
            parallel = replace(layout, nodes=n_nodes, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
            yield from _data_layouts(parallel, data, global_batch_size)


def _data_layouts(layout: PlannedLayout, data: int, global_batch_size: int) -> Iterator[PlannedLayout]:
    """Yield the layouts with these model parallel degrees and `data` data parallel ranks."""
    first = layout.activation_checkpointing
    modes = [first, *(mode for mode in MODES if first not in (mode, "full"))]
    in_replica = data * layout.cp * layout.tp
    replicas = [n for n in range(layout.dp_replicate, 0, -1) if data % n == 0 and in_replica // n % layout.ep == 0]
    reductions = [True] if layout.reduce_each_micro_batch else [False, True]
    sizes = [n for n in range(layout.micro_batch_size, 0, -1) if global_batch_size % (n * data) == 0]
    for dp_replicate, reduce_each, mode, size in product(replicas, reductions, modes, sizes):
        accumulation = global_batch_size // (size * data)
        if layout.stages_per_rank > 1 and accumulation % layout.pp:
            continue  # an interleaved pipeline runs micro-batches in groups
        if accumulation == 1 and reduce_each != layout.reduce_each_micro_batch:
            continue  # no effect with one micro-batch
        yield replace(
            layout,
            dp_replicate=dp_replicate,
            dp_shard=data // dp_replicate,
            reduce_each_micro_batch=reduce_each,
            activation_checkpointing=mode,
            micro_batch_size=size,
            accumulation_steps=accumulation,
        )
