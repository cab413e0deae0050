"""The nearest layout that fits: candidates in a stated order, and the first that fits is the answer.

Nearest means: as little as possible is changed, and what costs least comes first. From the innermost loop outwards:

1. `batch.micro_batch`: smaller divisors (the same update, more passes);
2. `engine.gpu.activation_checkpointing`: the recipe's, then selective, then full;
3. `engine.gpu.reduce_each_micro_batch`: the recipe's, then true;
4. `parallel.dp_replicate`: fewer replicas, each sharded over more devices;
5. `parallel.tp`: the recipe's, then greater powers of two within a node that divide the key/value heads, with sequence
   parallelism, then smaller ones;
6. more nodes, doubled up to `MOST_NODES`.

Nothing that changes what is learnt is touched: not the global batch, the sequence or the dtypes.

Cost: some thousand closed forms, well under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lt_trainer.planning.layout import PlannedLayout

MOST_NODES = 1024
LARGEST_TP = 8
"""Tensor parallelism leaves no node: its collectives stand between all products of a block."""


def nearest(
    layout: PlannedLayout,
    *,
    global_batch: int,
    kv_heads: int,
    fits: Callable[[PlannedLayout], bool],
) -> PlannedLayout | None:
    """Return the first candidate for which `fits` holds, or None.

    Args:
        layout: what does not fit; it is the first candidate.
        global_batch: rows of an update, which every candidate keeps.
        kv_heads: of the model; tensor parallel degrees divide them.
        fits: whether a layout fits.
    """
    nodes = layout.nodes
    while nodes <= max(MOST_NODES, layout.nodes):
        for candidate in candidates(replace(layout, nodes=nodes), global_batch=global_batch, kv_heads=kv_heads):
            if fits(candidate):
                return candidate
        nodes *= 2
    return None


def candidates(layout: PlannedLayout, *, global_batch: int, kv_heads: int) -> Iterator[PlannedLayout]:
    """Yield every layout of these devices in the module's order."""
    for tp in _tensor_degrees(layout, kv_heads):
        if layout.world % tp:
            continue
        data = layout.world // tp
        for replicas in _descending_divisors(layout.replicate, data):
            for reduce_each in _either(layout.reduce_each):
                for checkpointing in _checkpointing(layout.checkpointing):
                    for micro_batch in range(layout.micro_batch, 0, -1):
                        rows = micro_batch * data
                        if global_batch % rows:
                            continue
                        accumulation = global_batch // rows
                        if accumulation == 1 and reduce_each != layout.reduce_each:
                            continue  # with one pass there is nothing to choose
                        yield replace(
                            layout,
                            tp=tp,
                            sequence_parallel=layout.sequence_parallel if tp == layout.tp else tp > 1,
                            replicate=replicas,
                            shard=data // replicas,
                            reduce_each=reduce_each,
                            checkpointing=checkpointing,
                            micro_batch=micro_batch,
                            accumulation=accumulation,
                        )


def _tensor_degrees(layout: PlannedLayout, kv_heads: int) -> list[int]:
    most = min(LARGEST_TP, layout.devices)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most and kv_heads % (1 << i) == 0]
    greater = [degree for degree in powers if degree > layout.tp]
    smaller = [degree for degree in reversed(powers) if degree < layout.tp]
    return [layout.tp, *greater, *smaller]


def _descending_divisors(most: int, of: int) -> list[int]:
    return [n for n in range(most, 0, -1) if of % n == 0]


def _either(first: bool) -> list[bool]:
    return [first] if first else [False, True]


def _checkpointing(first: str) -> list[str]:
    return [first, *(mode for mode in ("selective", "full") if mode != first)] if first != "full" else ["full"]
