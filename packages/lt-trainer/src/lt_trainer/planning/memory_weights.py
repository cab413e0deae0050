"""Bytes of gathered weights and of gradients in the phases of a micro-batch.

With FSDP a module's weights are gathered while it computes, and in backward the next block's are being gathered
beside. What an all-gather returns exists twice while it is copied into place, and the forward pass keeps the last such
buffer until it ends. The head is gathered for the loss only, and its gradient stays in flight until the next reduction;
tied to the embedding, it stays gathered, and the gradient stays unsharded, for the whole micro-batch. On a device that
does not shard its weights and computes in a narrower dtype, "gathered weights" are the model's weights beside the
master weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.planning.memory_stages import ParameterCounts, PlannedStages


@dataclass(frozen=True, kw_only=True)
class GatheredWeights:
    """Bytes of gathered weights in the phases of a micro-batch."""

    loss: float
    start_of_backward: float
    outside_blocks: float
    """While no block is gathered."""
    block: float
    keeps_blocks: bool
    prefetched: float
    """Of the next block, while the one before it computes."""
    afterwards: float

    def in_block(self, index: int) -> float:
        """Return the bytes while block `index` runs backward."""
        n_gathered = index + 1 if self.keeps_blocks else 1
        prefetched = self.prefetched if index > 0 else 0.0
        return self.outside_blocks + n_gathered * self.block + prefetched


def gathered_weights(counts: ParameterCounts, layout: PlannedLayout, stages: PlannedStages) -> GatheredWeights:
    """Return the gathered weights of a rank."""
    size, block = layout.element_bytes, counts.block * layout.element_bytes
    if not layout.uses_fsdp:
        model = counts.all * size if layout.has_separate_master_weights else 0.0
        return GatheredWeights(
            loss=model,
            start_of_backward=model,
            outside_blocks=model,
            block=0.0,
            keeps_blocks=False,
            prefetched=0.0,
            afterwards=model,
        )
    head, is_sharded, tied = counts.head * size, layout.fsdp_size > 1, stages.is_tied
    # All-gather output that the forward pass keeps: of the last group in it.
    buffer = (block if tied or not stages.has_head else head) * is_sharded
    # Embedding and head outside their own computation.
    ends = head if tied else 0.0 if layout.reshard_after_forward else head + counts.embedding * size
    # The last block stays gathered: backward starts with it.
    blocks = block if layout.reshard_after_forward else block * stages.n_layers
    gathers_in_backward = is_sharded and layout.reshard_after_forward
    return GatheredWeights(
        loss=max(ends, head) + buffer + blocks,
        start_of_backward=ends + blocks,
        outside_blocks=ends,
        block=block,
        keeps_blocks=not layout.reshard_after_forward,
        prefetched=block * gathers_in_backward,
        afterwards=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class HeadGradients:
    """Bytes of the head's gradient beside those of earlier micro-batches and the shards of the blocks."""

    reduction: float = 0.0
    last_block: float
    first_block: float
    unsharded: float
    """Of the embedding too if they are tied."""


def head_gradients(counts: ParameterCounts, layout: PlannedLayout, stages: PlannedStages) -> HeadGradients:
    """Return the head's gradients: kept unsharded if it is tied or nothing is sharded, else sent at once."""
    narrow, wide = counts.head * layout.element_bytes, counts.head * layout.master_bytes
    if not layout.uses_fsdp or stages.is_tied:
        return HeadGradients(last_block=narrow, first_block=narrow, unsharded=narrow)
    shard = wide / layout.fsdp_size
    if layout.accumulation_steps > 1:  # the gradients of earlier micro-batches have it: sharded, or wide and unsharded
        added = narrow if layout.reduce_each_micro_batch else 0.0
        return HeadGradients(reduction=added + wide, last_block=wide, first_block=0.0, unsharded=0.0)
    return HeadGradients(reduction=narrow + wide, last_block=wide + shard, first_block=shard, unsharded=0.0)


def embedding_reduction_bytes(counts: ParameterCounts, layout: PlannedLayout) -> float:
    """Return the bytes beyond all sharded gradients while the embedding's are cast and reduced."""
    if not layout.uses_fsdp:
        return 0.0
    wide = counts.embedding * layout.master_bytes
    unsharded = wide if layout.keeps_unsharded else counts.embedding * layout.element_bytes
    shard = wide / layout.fsdp_size
    # First the unsharded gradient and its copy to send, then that copy and the shard.
    return max(unsharded + wide - shard, wide)


def earlier_gradient_bytes(counts: ParameterCounts, layout: PlannedLayout) -> float:
    """Return gradient bytes of earlier micro-batches: unsharded master dtype unless each one reduces."""
    if layout.accumulation_steps == 1:
        return 0.0
    unsharded = counts.all * layout.master_bytes
    return unsharded / layout.fsdp_size if layout.reduce_each_micro_batch or not layout.uses_fsdp else unsharded
