"""Bytes of optimizer state and of the temporaries of its update."""

from __future__ import annotations

from collections.abc import Sequence

from lt_model.params import ParamSpec
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.adamw import ADAMW
from lt_trainer.optimizers.spec import DTYPE_BYTES
from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.planning.memory_weights import local_size

UPCAST_BYTES = 256 * 2**20
"""Temporaries of AdamW at most, if gradients or moments are narrower than the weights."""
OFFLOAD_BUFFER_BYTES = 2 * 128 * 2**20
"""Optimizer state on the device at most, if it is offloaded: AdamW's comes in chunks, two at a time."""
UPDATE_TEMPORARIES = 4
"""Temporaries of one parameter, in the master dtype, beside the new slots, of an update without a fused kernel."""
EXCHANGED_MATRICES = 2
"""Matrices in slices beside the whole ones, where ranks exchange slices."""
TRANSFORM_MATRICES, TRANSFORM_SQUARES = 3, 2
"""Whole matrices, and squares of their smaller side, that the Newton-Schulz iteration of Muon holds."""


def optimizer_state_bytes(rows: Sequence[ParamSpec], layout: PlannedLayout, tp: int) -> float:
    """Return bytes of the optimizer's slots after tensor parallelism and before sharding."""
    spec = optimizer_spec(layout.optimizer.name)
    return sum(
        spec.for_params([row]).state_bytes(layout.optimizer, [row.shape], layout.master_bytes)
        / (1 if row.tp_dim is None else tp)
        for row in rows
    )


def optimizer_temporary_bytes(table: Sequence[ParamSpec], layout: PlannedLayout, upcast_bytes: int) -> float:
    """Return bytes of temporaries: AdamW upcasts in buckets, others work by parameter or by matrix.

    Offloaded slots on the device are counted too.
    """
    shards, master, found = layout.tp * layout.fsdp_size, layout.master_bytes, []
    optimizer = optimizer_spec(layout.optimizer.name)
    for spec in {optimizer.for_params([row]).name: optimizer.for_params([row]) for row in table}.values():
        rows = [row for row in table if optimizer.for_params([row]) is spec]
        slot_bytes = [slot.n_bytes(layout.optimizer, (1,), master) for slot in spec.slots]
        largest = max(row.numel for row in rows)
        if spec is ADAMW:
            narrower = sum(size < master for size in (layout.weight_bytes, layout.gradient_bytes, *slot_bytes))
            numel = sum(local_size(row, layout.tp) for row in rows) / layout.fsdp_size
            buffers = 0.0
            if layout.optimizer_offload:
                buffers = min(OFFLOAD_BUFFER_BYTES, sum(slot_bytes) * numel)
                numel = min(numel, OFFLOAD_BUFFER_BYTES / 2 / sum(slot_bytes))
            found.append(buffers + min(upcast_bytes, narrower * master * numel))
            continue
        copies = sum(slot_bytes) * layout.optimizer_offload
        element = DTYPE_BYTES.get(spec.transform.dtype(layout.optimizer), master) if spec.transform else master
        temporaries = UPDATE_TEMPORARIES - (element < master) + len(spec.slots)  # a narrow matrix is no gradient
        found.append((temporaries * master + copies) * largest / shards)
        if spec.transform is not None:
            side = min(min(row.shape) for row in rows if row.numel == largest)
            exchanged = EXCHANGED_MATRICES if shards > 1 else 0
            found.append(element * ((exchanged + TRANSFORM_MATRICES) * largest + TRANSFORM_SQUARES * side**2))
    return max(found)
