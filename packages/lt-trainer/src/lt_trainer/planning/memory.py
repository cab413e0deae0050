"""Training memory of one device by part, and the phase of a step in which it peaks.

The rank's master weights and optimizer state are permanent. The rest varies; the peak is in one of these phases:

- "loss": all activations, the buffers of the chunked loss, the gradients of earlier micro-batches;
- "last block": start of backward: all activations and the buffers of one block's backward;
- "first block": end of backward: the gradients of the other blocks, the activations of one block;
- "block reduction": the gradients of the first two blocks are being reduced;
- "root reduction": unsharded gradients of embedding and head in both dtypes, besides all others;
- "optimizer step": all gradients and the temporaries of the update.

Activations shrink block by block while gradients grow, both linearly, so no phase in between can peak. The weights of
embedding and head stay gathered during a micro-batch; two blocks are gathered at a time, one in use and one prefetched,
and all-gather output exists twice while it is copied into place. On a device that does not shard its weights and
computes in a narrower dtype, "gathered weights" are the model's weights beside the master weights.

The reserve covers fragmentation in torch's allocator and the memory of CUDA and NCCL outside of it: a share of the peak
(`RESERVE_SHARE`) plus a fixed size (`RESERVE_BYTES`). Both are assumptions, not measurements.

Cost: one pass over the parameter table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lt_model import LlamaConfig
from lt_model.activation_memory import (
    activation_bytes_per_token,
    block_backward_bytes_per_token,
    loss_bytes,
    non_block_bytes_per_token,
)
from lt_model.params import ParamSpec, param_specs
from lt_trainer.optimizers import ADAMW, optimizer_spec
from lt_trainer.planning.layout import PlannedLayout

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30
GATHERED_BLOCKS = 2
"""Blocks whose weights are gathered at the same time during backward."""
UPCAST_BYTES = 256 * 2**20
"""Temporaries of AdamW at most, if gradients or moments are narrower than the weights."""
UPDATE_TEMPORARIES = 4
"""Temporaries of one parameter, in the master dtype, beside the new slots, of an update without a fused kernel."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Memory of one device in bytes.

    Attributes:
        parts: bytes by part in the peak phase.
        peak_phase: one of the phases in the module docstring.
        peak: sum of the parts; comparable with `torch.cuda.max_memory_allocated`.
        reserve: bytes beyond the peak.
        state_bytes: bytes of weights and optimizer state of one replica, i.e. of a checkpoint.
    """

    parts: Mapping[str, float]
    peak_phase: str
    peak: float
    reserve: float
    state_bytes: float

    @property
    def needed(self) -> float:
        """Sum of peak and reserve."""
        return self.peak + self.reserve


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Parameter counts of a rank after tensor parallelism and before sharding."""

    all: float
    block: float
    """Parameters of the largest block."""
    root: float
    """Parameters outside the blocks: embedding, last norm, head."""
    head: float


def plan_memory(
    config: LlamaConfig,
    seq_len: int,
    layout: PlannedLayout,
    *,
    loss_chunk_rows: int | None = None,
    upcast_bytes: int = UPCAST_BYTES,
) -> PlannedMemory:
    """Return the memory of one device.

    Args:
        config: model config.
        seq_len: positions per row.
        layout: parallel layout.
        loss_chunk_rows: tokens per chunk of logits in the loss; the GPU default if None.
        upcast_bytes: what AdamW upcasts at a time; the default is a GPU's.
    """
    counts, size, master = _parameter_counts(config, layout.tp), layout.element_bytes, layout.master_bytes
    tokens = layout.micro_batch_size * seq_len
    block_activations = tokens * _activations_per_token(config, layout)
    activations = config.n_layers * block_activations + tokens * non_block_bytes_per_token(config, element_bytes=size)
    backward = tokens * _backward_per_token(config, layout)
    permanent = {
        "weights": counts.all * master / layout.dp_shard,
        "optimizer state": _optimizer_state(config, layout, layout.tp) / layout.dp_shard,
    }
    root, after_forward, in_backward, last = _gathered(config, counts, layout)
    loss = loss_bytes(config, tokens, element_bytes=size, chunk_tokens=loss_chunk_rows, tp=layout.tp)
    earlier, shard = _earlier_gradients(counts, layout), counts.all * layout.gradient_bytes / layout.dp_shard
    head = counts.head * size
    block = counts.block * size if layout.uses_fsdp or layout.has_separate_master_weights else 0.0
    other_blocks = (counts.all - counts.root - counts.block) * layout.gradient_bytes / layout.dp_shard
    reduced = counts.root * (size + master) if layout.uses_fsdp else 0.0
    sending = counts.block * master if layout.dp_shard > 1 else 0.0  # reduce-scatter input of one block
    phases = {
        "loss": _phase_parts(
            gathered=root + after_forward, activations=activations, gradients=earlier, loss=sum(loss.values())
        ),
        "last block": _phase_parts(
            gathered=root + max(after_forward, in_backward),
            activations=activations + backward,
            gradients=earlier + head + block,
        ),
        "first block": _phase_parts(
            gathered=root + in_backward,
            activations=block_activations + backward,
            gradients=max(other_blocks, earlier) + head + block + sending,
        ),
        "block reduction": _phase_parts(
            gathered=root + last,
            activations=tokens * config.hidden_size * size,
            gradients=max(shard, earlier) + head + block + 2 * sending,
        ),
        "root reduction": _phase_parts(
            gathered=root + last,
            activations=tokens * config.hidden_size * size,
            gradients=shard + reduced + (counts.root * master if earlier > shard else 0.0),
        ),
        "optimizer step": _phase_parts(
            gathered=root if layout.has_separate_master_weights else 0.0,
            gradients=shard,
            optimizer=_optimizer_temporaries(config, counts, layout, upcast_bytes),
        ),
    }
    peak_phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = permanent | phases[peak_phase]
    peak = sum(parts.values())
    return PlannedMemory(
        parts=parts,
        peak_phase=peak_phase,
        peak=peak,
        reserve=RESERVE_SHARE * peak + RESERVE_BYTES,
        state_bytes=master * sum(row.numel for row in param_specs(config)) + _optimizer_state(config, layout, 1),
    )


def _phase_parts(
    *,
    gathered: float = 0.0,
    activations: float = 0.0,
    gradients: float = 0.0,
    loss: float = 0.0,
    optimizer: float = 0.0,
) -> dict[str, float]:
    return {
        "gathered weights": gathered,
        "activations": activations,
        "gradients": gradients,
        "loss": loss,
        "optimizer": optimizer,
    }


def _gathered(config: LlamaConfig, counts: _Counts, layout: PlannedLayout) -> tuple[float, float, float, float]:
    """Return bytes of gathered weights: root; blocks after forward, during backward and at its end."""
    if not layout.uses_fsdp:
        return counts.all * layout.element_bytes if layout.has_separate_master_weights else 0.0, 0.0, 0.0, 0.0
    size, n_gathered = layout.element_bytes, min(GATHERED_BLOCKS, config.n_layers)
    block, receiving = counts.block * size, counts.block * size if layout.dp_shard > 1 else 0.0
    # The last block stays gathered: backward starts with it.
    after_forward = block if layout.reshard_after_forward else block * config.n_layers
    return counts.root * size, after_forward, n_gathered * block + receiving, block


def _optimizer_state(config: LlamaConfig, layout: PlannedLayout, tp: int) -> float:
    """Return bytes of the optimizer's slots after tensor parallelism and before sharding."""
    spec = optimizer_spec(layout.optimizer.name)
    return sum(
        spec.state_bytes(layout.optimizer, [row.shape], layout.master_bytes) / (1 if row.tp_dim is None else tp)
        for row in param_specs(config)
    )


def _optimizer_temporaries(config: LlamaConfig, counts: _Counts, layout: PlannedLayout, upcast_bytes: int) -> float:
    """Return bytes of temporaries: AdamW upcasts in buckets, others work by parameter."""
    spec = optimizer_spec(layout.optimizer.name)
    if spec is not ADAMW:
        largest = max(row.numel for row in param_specs(config)) / layout.tp / layout.dp_shard
        return (UPDATE_TEMPORARIES + len(spec.slots)) * layout.master_bytes * largest
    slot_bytes = [slot.n_bytes(layout.optimizer, (1,), layout.master_bytes) for slot in spec.slots]
    narrower = sum(size < layout.master_bytes for size in (layout.gradient_bytes, *slot_bytes))
    return min(upcast_bytes, narrower * layout.master_bytes * counts.all / layout.dp_shard)


def _backward_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return bytes per token of a block's backward; "memory_budget" may recompute as much as "full"."""
    mode = "full" if layout.activation_checkpointing == "memory_budget" else layout.activation_checkpointing
    return block_backward_bytes_per_token(
        config,
        mode,  # pyright: ignore[reportArgumentType] - same names as the engine's options
        element_bytes=layout.element_bytes,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
    )


def _activations_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return activation bytes per token and block; "memory_budget" interpolates between "full" and "none"."""
    options = {
        "element_bytes": layout.element_bytes,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.activation_checkpointing == "memory_budget":
        none, full = (sum(activation_bytes_per_token(config, mode, **options).values()) for mode in ("none", "full"))
        return full + layout.activation_memory_budget * (none - full)
    return sum(activation_bytes_per_token(config, layout.activation_checkpointing, **options).values())  # pyright: ignore[reportArgumentType]


def _earlier_gradients(counts: _Counts, layout: PlannedLayout) -> float:
    """Return gradient bytes of earlier micro-batches: unsharded master dtype unless each one reduces."""
    if layout.accumulation_steps == 1:
        return 0.0
    unsharded = counts.all * layout.master_bytes
    return unsharded / layout.dp_shard if layout.reduce_each_micro_batch or not layout.uses_fsdp else unsharded


def _parameter_counts(config: LlamaConfig, tp: int) -> _Counts:
    table = param_specs(config)
    by_block: dict[int, float] = {}
    for row in table:
        if row.layer is not None:
            by_block[row.layer] = by_block.get(row.layer, 0.0) + _local_size(row, tp)
    total = sum(_local_size(row, tp) for row in table)
    return _Counts(
        all=total,
        block=max(by_block.values()),
        root=total - sum(by_block.values()),
        head=math.ceil(config.vocab_size / tp) * config.hidden_size,
    )


def _local_size(row: ParamSpec, tp: int) -> float:
    return row.numel if row.tp_dim is None else row.numel / tp
