"""Bytes that one device holds while it trains, by part, and the moment of a step at which they are most.

This rank's weights and moments stay, in the master dtype. The rest comes and goes; the peak is at one of these moments:

- "loss": all activations, what the chunked loss holds, the gradients of the passes before;
- "last block": backward begins; all activations, and what the backward pass of a block holds;
- "first block": backward is nearly done; the gradients of the other blocks, the activations of one;
- "block reduction": of the first block, whose gradients and those of the second are on their way to the other ranks;
- "root reduction": of embedding and head, whose gradients are there whole in both dtypes, beside all others;
- "update": all gradients, and what the optimizer needs to widen narrow moments.

Activations shrink block by block while gradients grow, both evenly, so nothing between these can be more. The weights
of embedding and head stay gathered through a pass; of the blocks two are whole at a time, one in use and one on its
way, and what comes from other ranks is there twice while it is copied into place. On a device that shares its weights
with no other and computes in a narrower dtype, the "gathered weights" are the model's, beside their masters.

What torch's allocator cannot use, and what CUDA and NCCL take outside of it, is the reserve: a share of the peak and a
fixed size, stated in `RESERVE_SHARE` and `RESERVE_BYTES`. They are assumptions, not measured by us.

Cost: the parameter table, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lt_model import LlamaConfig
from lt_model.activations import block_backward_per_token, kept_per_token, loss_bytes, outer_per_token
from lt_model.params import Parameter, parameters
from lt_trainer.planning.layout import PlannedLayout

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30
GATHERED_BLOCKS = 2
"""Blocks whose weights are whole on a device at the same time during backward."""
OPTIMIZER_NUMBERS = 1 << 25
"""Numbers that the engine's optimizer widens at a time where moments are narrow."""
WIDENED_NUMBERS = 1 << 20
"""Likewise where only gradients are narrow."""
OPTIMIZER_TEMPORARIES = 3
"""Copies of narrow moments that it then holds in the master dtype."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Bytes of one device.

    Attributes:
        parts: by name, at the moment of the peak.
        moment: when the peak is, as in the module's text.
        peak: sum of the parts; to be compared with `torch.cuda.max_memory_allocated`.
        reserve: beyond it.
        state: bytes of weights and moments over all devices of one replica: a checkpoint.
    """

    parts: Mapping[str, float]
    moment: str
    peak: float
    reserve: float
    state: float

    @property
    def needed(self) -> float:
        """Peak and reserve."""
        return self.peak + self.reserve


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of this rank's part of the model before it is sharded (after tensor parallelism)."""

    all: float
    block: float
    """Of the largest block."""
    root: float
    """Of what stands outside the blocks: embedding, last norm, head."""
    head: float


def planned_memory(
    config: LlamaConfig, seq_len: int, layout: PlannedLayout, *, rows_of_loss: int | None = None
) -> PlannedMemory:
    """Return what one device holds.

    Args:
        config: the model.
        seq_len: positions of a row.
        layout: how the run lies on its devices.
        rows_of_loss: tokens of which the loss holds logits at a time; what a GPU takes when absent.
    """
    counts, size, master = _counts(config, layout.tp), layout.element_bytes, layout.master_bytes
    tokens = layout.micro_batch * seq_len
    of_block = tokens * _kept(config, layout)
    kept = config.n_layers * of_block + tokens * outer_per_token(config, element_bytes=size)
    back = tokens * _backward(config, layout)
    always = {
        "weights": counts.all * master / layout.shard,
        "moments": 2 * counts.all * layout.moment_bytes / layout.shard,
    }
    root, after_forward, in_backward, last = _gathered(config, counts, layout)
    loss = loss_bytes(config, tokens, element_bytes=size, rows=rows_of_loss, tp=layout.tp)
    earlier, shard = _earlier_gradients(counts, layout), counts.all * layout.gradient_bytes / layout.shard
    head, narrow = counts.head * size, counts.block * size if layout.wrapped or layout.doubled else 0.0
    of_others = (counts.all - counts.root - counts.block) * layout.gradient_bytes / layout.shard
    reduced = counts.root * (size + master) if layout.wrapped else 0.0
    leaving = counts.block * master if layout.shard > 1 else 0.0  # of one block, as it is sent to the other ranks
    moments = {
        "loss": _moment(gathered=root + after_forward, activations=kept, gradients=earlier, loss=sum(loss.values())),
        "last block": _moment(
            gathered=root + max(after_forward, in_backward),
            activations=kept + back,
            gradients=earlier + head + narrow,
        ),
        "first block": _moment(
            gathered=root + in_backward,
            activations=of_block + back,
            gradients=max(of_others, earlier) + head + narrow + leaving,
        ),
        "block reduction": _moment(
            gathered=root + last,
            activations=tokens * config.hidden_size * size,
            gradients=max(shard, earlier) + head + narrow + 2 * leaving,
        ),
        "root reduction": _moment(
            gathered=root + last,
            activations=tokens * config.hidden_size * size,
            gradients=shard + reduced + (counts.root * master if earlier > shard else 0.0),
        ),
        "update": _moment(
            gathered=root if layout.doubled else 0.0, gradients=shard, optimizer=_widened(config, counts, layout)
        ),
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = always | moments[moment]
    peak = sum(parts.values())
    return PlannedMemory(
        parts=parts,
        moment=moment,
        peak=peak,
        reserve=RESERVE_SHARE * peak + RESERVE_BYTES,
        state=(master + 2 * layout.moment_bytes) * sum(row.size for row in parameters(config)),
    )


def _moment(
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
    """Bytes of gathered weights: the root's; the blocks' after forward, during backward, and at its end."""
    if not layout.wrapped:
        return counts.all * layout.element_bytes if layout.doubled else 0.0, 0.0, 0.0, 0.0
    size, n_whole = layout.element_bytes, min(GATHERED_BLOCKS, config.n_layers)
    block, arriving = counts.block * size, counts.block * size if layout.shard > 1 else 0.0
    after_forward = block if layout.reshard else block * config.n_layers  # the last block is needed again at once
    return counts.root * size, after_forward, n_whole * block + arriving, block


def _widened(config: LlamaConfig, counts: _Counts, layout: PlannedLayout) -> float:
    """What the optimizer holds while it widens gradients or moments that are narrower than the weights, by parts."""
    largest = max(row.size for row in parameters(config)) / layout.tp / layout.shard
    if layout.moment_bytes == layout.master_bytes:
        at_a_time = min(counts.all, WIDENED_NUMBERS + largest)
        return at_a_time * layout.master_bytes if layout.gradient_bytes < layout.master_bytes else 0.0
    numbers = min(counts.all / layout.shard, OPTIMIZER_NUMBERS + largest)
    copies = OPTIMIZER_TEMPORARIES + (layout.gradient_bytes < layout.master_bytes)
    return copies * layout.master_bytes * numbers


def _backward(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Bytes per token that the backward pass of a block holds; a budget may bring back as much as full."""
    mode = "full" if layout.checkpointing == "budget" else layout.checkpointing
    return block_backward_per_token(
        config,
        mode,  # pyright: ignore[reportArgumentType] - the engine's options name the same
        element_bytes=layout.element_bytes,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
    )


def _kept(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Bytes per token that a block keeps; of a budget, its share of what none and full differ by."""
    options = {
        "element_bytes": layout.element_bytes,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.checkpointing == "budget":
        none, full = (sum(kept_per_token(config, mode, **options).values()) for mode in ("none", "full"))
        return full + layout.budget * (none - full)
    return sum(kept_per_token(config, layout.checkpointing, **options).values())  # pyright: ignore[reportArgumentType]


def _earlier_gradients(counts: _Counts, layout: PlannedLayout) -> float:
    """Gradients of the passes before the last one: whole in the master dtype unless each pass reduces them."""
    if layout.accumulation == 1:
        return 0.0
    whole = counts.all * layout.master_bytes
    return whole / layout.shard if layout.reduce_each or not layout.wrapped else whole


def _counts(config: LlamaConfig, tp: int) -> _Counts:
    table = parameters(config)
    by_block: dict[int, float] = {}
    for row in table:
        if row.layer is not None:
            by_block[row.layer] = by_block.get(row.layer, 0.0) + _local(row, tp)
    everything = sum(_local(row, tp) for row in table)
    return _Counts(
        all=everything,
        block=max(by_block.values()),
        root=everything - sum(by_block.values()),
        head=math.ceil(config.vocab_size / tp) * config.hidden_size,
    )


def _local(row: Parameter, tp: int) -> float:
    return row.size if row.tp_dim is None else row.size / tp
