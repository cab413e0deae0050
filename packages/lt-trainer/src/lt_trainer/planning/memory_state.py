"""Part of the model on each pipeline rank: bytes of gathered weights, of gradients and of the optimizer.

With FSDP a module's weights are gathered while it computes, and in backward the next block's are being gathered
beside. What an all-gather returns exists twice while it is copied into place, and the forward pass keeps the last such
buffer until it ends. The head is gathered for the loss only, and its gradient stays in flight until the next reduction;
tied to the embedding, it stays gathered, and the gradient stays unsharded, for the whole micro-batch. On a device that
does not shard its weights and computes in a narrower dtype, "gathered weights" are the model's weights beside the
master weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lt_model import ModelConfig
from lt_model.params import ParamSpec, param_specs
from lt_model.stages import stage_layers
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.adamw import ADAMW
from lt_trainer.optimizers.spec import DTYPE_BYTES
from lt_trainer.planning.layout import PlannedLayout

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


def local_size(row: ParamSpec, layout: PlannedLayout) -> float:
    """Return a device's elements of a parameter after tensor or expert parallelism, before sharding."""
    if row.type == "experts" and layout.ep > 1:
        return row.numel / layout.ep
    return row.numel if row.tp_dim is None else row.numel / layout.tp


def shard_size(row: ParamSpec, layout: PlannedLayout) -> float:
    """Return a device's elements of a sharded parameter; of experts the same with and without expert parallelism."""
    return row.numel / layout.fsdp_size / (1 if row.tp_dim is None else layout.tp)


class RankWeights:
    """Weights and gradients of one pipeline rank: numbers before sharding, and of shards.

    Args:
        config: model config.
        layout: parallel layout.
        pp_rank: the rank.
    """

    def __init__(self, config: ModelConfig, layout: PlannedLayout, pp_rank: int) -> None:
        table, stages = param_specs(config), stage_layers(config, layout.pp * layout.stages_per_rank)
        own = {layer for stage in stages[pp_rank :: layout.pp] for layer in stage}
        is_first, self.has_head = pp_rank == 0, pp_rank == layout.pp - 1
        ends = {"embed": is_first, "final": self.has_head}
        self.rows = [row for row in table if (row.layer in own if row.layer is not None else ends[row.role])]
        if config.tie_word_embeddings and self.has_head and not is_first:  # its own copy of the embedding
            self.rows.append(table[0])
        self.pp_rank, self.layers, self._layout = pp_rank, sorted(own), layout
        self.is_tied = config.tie_word_embeddings and is_first and self.has_head
        end = math.ceil(config.vocab_size / layout.tp) * config.hidden_size
        blocks = [[row for row in self.rows if row.layer == layer] for layer in self.layers]
        of_block = max(blocks, key=lambda rows: sum(local_size(row, layout) for row in rows))  # one stands for all
        self.all, self.shards = (sum(size(row, layout) for row in self.rows) for size in (local_size, shard_size))
        self.block, self.block_shard = (sum(size(row, layout) for row in of_block) for size in (local_size, shard_size))
        self.experts = sum(local_size(row, layout) for row in of_block if row.type == "experts") * (layout.ep > 1)
        self.head = end if self.has_head else 0
        self.embedding = end if is_first else 0
        self.shard_gradients = self.shards * layout.gradient_bytes
        self._count_gathered()
        self._count_head_gradients()

    def _count_gathered(self) -> None:
        """Set the bytes of gathered weights in the phases of a micro-batch."""
        layout, size = self._layout, self._layout.element_bytes
        if not layout.uses_fsdp:
            model = self.all * size if layout.has_separate_master_weights else 0.0
            self.gathered_in_loss = self.gathered_at_start = self.gathered_outside = self.gathered_after = model
            self._gathered_block, self._prefetched = 0.0, 0.0
            return
        head, block, is_sharded = self.head * size, self.block * size, layout.fsdp_size > 1
        # All-gather output that the forward pass keeps: of the last group in it.
        buffer = (block if self.is_tied or not self.has_head else head) * is_sharded
        # Embedding and head outside their own computation.
        ends = head if self.is_tied else 0.0 if layout.reshard_after_forward else head + self.embedding * size
        # The last block stays gathered: backward starts with it.
        blocks = block if layout.reshard_after_forward else block * len(self.layers)
        self.gathered_in_loss, self.gathered_at_start = max(ends, head) + buffer + blocks, ends + blocks
        self.gathered_outside, self.gathered_after = ends, 0.0
        self._gathered_block = block
        self._prefetched = block * (is_sharded and layout.reshard_after_forward)

    def gathered_in_block(self, index: int) -> float:
        """Return the bytes of gathered weights while block `index` runs backward."""
        n_gathered = 1 if self._layout.reshard_after_forward else index + 1
        return self.gathered_outside + n_gathered * self._gathered_block + (self._prefetched if index > 0 else 0.0)

    def _count_head_gradients(self) -> None:
        """Set the bytes of the head's gradient beside those of earlier micro-batches and the shards of the blocks.

        It is kept unsharded if it is tied or nothing is sharded, else sent at once.
        """
        layout = self._layout
        narrow, wide = self.head * layout.element_bytes, self.head * layout.master_bytes
        if not layout.uses_fsdp or self.is_tied:
            self.head_reduction = 0.0
            self.head_in_last_block = self.head_in_first_block = self.head_unsharded = narrow
            return
        self.head_unsharded = 0.0
        if layout.accumulation_steps > 1:  # earlier gradients have it: sharded, or wide and unsharded
            self.head_reduction = wide + (narrow if layout.reduce_each_micro_batch else 0.0)
            self.head_in_last_block, self.head_in_first_block = wide, 0.0
        else:
            shard = wide / layout.fsdp_size
            self.head_reduction, self.head_in_last_block, self.head_in_first_block = narrow + wide, wide + shard, shard

    @property
    def embedding_reduction(self) -> float:
        """Bytes beyond all sharded gradients while the embedding's are cast and reduced."""
        layout, wide = self._layout, self.embedding * self._layout.master_bytes
        unsharded = wide if layout.keeps_unsharded else self.embedding * layout.element_bytes
        # First the unsharded gradient and its copy to send, then that copy and the shard.
        found = max(unsharded + wide - wide / layout.fsdp_size, wide)
        if self.is_tied and layout.uses_fsdp and not layout.keeps_unsharded:
            # Before them the gradients of both uses and their sum, while the last block's is being reduced.
            found = max(found, 3 * unsharded - wide / layout.fsdp_size + self.block * layout.master_bytes)
        return found

    @property
    def earlier_gradients(self) -> float:
        """Gradient bytes of earlier micro-batches: unsharded master dtype unless each one reduces."""
        layout = self._layout
        if layout.accumulation_steps == 1:
            return 0.0
        is_sharded = layout.reduce_each_micro_batch or not layout.uses_fsdp
        return (self.shards if is_sharded else self.all) * layout.master_bytes


def slot_bytes(rows: Sequence[ParamSpec], layout: PlannedLayout, tp: int) -> float:
    """Return bytes of the optimizer's slots after tensor parallelism and before sharding."""
    spec = optimizer_spec(layout.optimizer.name)
    return sum(
        spec.for_params([row]).state_bytes(layout.optimizer, [row.shape], layout.master_bytes)
        / (1 if row.tp_dim is None else tp)
        for row in rows
    )


def update_bytes(table: Sequence[ParamSpec], layout: PlannedLayout, upcast_bytes: int) -> float:
    """Return bytes of temporaries: AdamW upcasts in buckets, others work by parameter or by matrix.

    Offloaded slots on the device are counted too.
    """
    shards, master, found = layout.tp * layout.fsdp_size, layout.master_bytes, []
    optimizer = optimizer_spec(layout.optimizer.name)
    for spec in {optimizer.for_params([row]).name: optimizer.for_params([row]) for row in table}.values():
        rows = [row for row in table if optimizer.for_params([row]) is spec]
        per_element = [slot.n_bytes(layout.optimizer, (1,), master) for slot in spec.slots]
        largest = max(row.numel for row in rows)
        if spec is ADAMW:
            narrower = sum(size < master for size in (layout.weight_bytes, layout.gradient_bytes, *per_element))
            numel = sum(shard_size(row, layout) for row in rows)
            buffers = 0.0
            if layout.optimizer_offload:
                buffers = min(OFFLOAD_BUFFER_BYTES, sum(per_element) * numel)
                numel = min(numel, OFFLOAD_BUFFER_BYTES / 2 / sum(per_element))
            found.append(buffers + min(upcast_bytes, narrower * master * numel))
            continue
        copies = sum(per_element) * layout.optimizer_offload
        element = DTYPE_BYTES.get(spec.transform.dtype(layout.optimizer), master) if spec.transform else master
        temporaries = UPDATE_TEMPORARIES - (element < master) + len(spec.slots)  # a narrow matrix is no gradient
        found.append((temporaries * master + copies) * largest / shards)
        if spec.transform is not None:
            side = min(min(row.shape) for row in rows if row.numel == largest)
            exchanged = EXCHANGED_MATRICES if shards > 1 else 0
            found.append(element * ((exchanged + TRANSFORM_MATRICES) * largest + TRANSFORM_SQUARES * side**2))
    return max(found)
