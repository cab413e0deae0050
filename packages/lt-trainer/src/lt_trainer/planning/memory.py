"""Training memory of one device by part, and the phase of a step in which it peaks.

The rank's master weights and optimizer state are permanent. The rest varies; the peak is in one of these phases:

- "loss": all activations, the buffers of the chunked loss, the gradients of earlier micro-batches;
- "head reduction": all activations, and the head's gradient in both dtypes, which is sent first;
- "last block": start of backward: all activations and the buffers of one block's backward;
- "first block": end of backward: the gradients of the other blocks, the activations of one block;
- "block reduction": the gradients of the first two blocks are being reduced;
- "embedding reduction": the unsharded gradient of the embedding in both dtypes, besides all others;
- "optimizer step": all gradients and the temporaries of the update.

Activations shrink block by block while gradients grow, both linearly, so no phase in between can peak.

A block's backward has two peaks: in the feed-forward layer, with all that the block has saved but few gradients, and at
its end, with all its gradients.

The reserve covers fragmentation in torch's allocator and the memory of CUDA and NCCL outside of it: a share of the peak
(`RESERVE_SHARE`) plus a fixed size (`RESERVE_BYTES`). Both are assumptions, not measurements. The peak without it is
compared with torch's CUDA allocator, on a device that computes nothing, in lt-trainer-gpu's tests.

Under pipeline parallelism a device has some layers, the first the embedding, the last the head. Besides the pass that
computes it keeps the activations of the other passes in flight (`PlannedLayout.max_in_flight`). With few micro-batches
these are most while there are no gradients yet, so the first backward pass and a later one are planned. The device that
needs most counts: often the first, which has the most in flight, or the last, which has the loss.

Activations: `memory_activations`; gathered weights, gradients and the optimizer: `memory_state`.

Cost: one pass over the parameter table for each pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lt_model import ModelConfig
from lt_model.activation_memory import loss_bytes, non_block_bytes_per_token
from lt_model.params import param_specs
from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.planning.memory_activations import (
    activations_per_token,
    attention_backward_per_token,
    block_backward_per_token,
)
from lt_trainer.planning.memory_state import UPCAST_BYTES, RankWeights, slot_bytes, update_bytes

Parts = dict[str, float]

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30
WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper and newer, which torch's allocator holds; 8 MiB on older GPUs."""
MESSAGES = 2
"""Activations and their gradients on their way between pipeline ranks."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Memory of one device in bytes.

    Attributes:
        parts: bytes by part in the peak phase.
        peak_phase: one of the phases in the module docstring.
        peak: sum of the parts; comparable with `torch.cuda.max_memory_allocated`.
        reserve: bytes beyond the peak.
        state_bytes: bytes of weights and optimizer state of one replica, i.e. of a checkpoint.
        host_bytes: bytes of host memory per device for offloaded optimizer state.
    """

    parts: Mapping[str, float]
    peak_phase: str
    peak: float
    reserve: float
    state_bytes: float
    host_bytes: float

    @property
    def needed(self) -> float:
        """Sum of peak and reserve."""
        return self.peak + self.reserve


def plan_memory(
    config: ModelConfig,
    seq_len: int,
    layout: PlannedLayout,
    *,
    upcast_bytes: int = UPCAST_BYTES,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> PlannedMemory:
    """Return the memory of one device.

    Args:
        config: model config.
        seq_len: positions per row, of all context parallel ranks.
        layout: parallel layout.
        upcast_bytes: what AdamW upcasts at a time; the default is a GPU's.
        workspace_bytes: workspace of matrix products; the default is a GPU's.
    """
    ranks = [_RankPlan(config, seq_len, layout, RankWeights(config, layout, rank)) for rank in range(layout.pp)]
    peak_phase, parts = max((rank.peak(upcast_bytes, workspace_bytes) for rank in ranks), key=_size)
    peak, table = sum(parts.values()), param_specs(config)
    return PlannedMemory(
        parts=parts,
        peak_phase=peak_phase,
        peak=peak,
        reserve=RESERVE_SHARE * peak + RESERVE_BYTES,
        state_bytes=layout.weight_bytes * sum(row.numel for row in table) + slot_bytes(table, layout, 1),
        host_bytes=max(rank.optimizer_state for rank in ranks) * layout.optimizer_offload,
    )


def _size(phase: tuple[str, Parts]) -> float:
    return sum(phase[1].values())


class _RankPlan:
    """Phases of a step on one pipeline rank; for the arguments see `plan_memory`."""

    def __init__(self, config: ModelConfig, seq_len: int, layout: PlannedLayout, weights: RankWeights) -> None:
        size = layout.element_bytes
        self._config, self._layout, self._weights = config, layout, weights
        self._tokens = layout.micro_batch_size * seq_len // layout.cp
        self._stream = self._tokens * config.hidden_size * size
        kinds = {config.layer(layer).experts: layer for layer in weights.layers}
        saved = {kind: self._tokens * activations_per_token(config, layout, layer) for kind, layer in kinds.items()}
        self._saved = [saved[config.layer(layer).experts] for layer in weights.layers]
        self._outside = self._tokens * non_block_bytes_per_token(config, element_bytes=size)
        if not weights.has_head:  # nor the last norm
            self._outside -= self._stream
        self._activations = self._saved_by(len(weights.layers)) + self._outside
        self._sent = (weights.block - weights.experts) * layout.master_bytes if layout.fsdp_size > 1 else 0.0
        """Input of the reduce-scatter of one block; expert-parallel experts have one of their own before it."""
        self._sent_experts = weights.experts * layout.master_bytes if layout.efsdp_size > 1 else 0.0
        self.optimizer_state = slot_bytes(weights.rows, layout, layout.tp) / layout.fsdp_size

    def peak(self, upcast_bytes: int, workspace_bytes: int) -> tuple[str, Parts]:
        """Return the phase that needs most, and all parts in it."""
        layout, weights = self._layout, self._weights
        permanent = {
            "weights": weights.shards * layout.weight_bytes,
            "optimizer state": 0.0 if layout.optimizer_offload else self.optimizer_state,
            "workspace": float(workspace_bytes),
        }
        update = {
            "gathered weights": weights.gathered_after,
            "gradients": weights.shard_gradients,
            "optimizer": update_bytes(weights.rows, layout, upcast_bytes),
        }
        phases = [("optimizer step", update)]
        for in_flight, has_earlier, reduces in layout.fullest_backward_passes(weights.pp_rank):
            others = {"pipeline": self._other_passes(in_flight)} if layout.pp > 1 else {}
            found = self._pass_phases(weights.earlier_gradients * has_earlier, reduces=reduces)
            phases += [(name, parts | others) for name, parts in found]
        name, parts = max(phases, key=_size)
        return name, permanent | parts

    def _pass_phases(self, earlier: float, *, reduces: bool) -> Iterator[tuple[str, Parts]]:
        """Yield the phases of a pass and its backward pass, beside these gradients of earlier ones."""
        config, layout, weights, last = self._config, self._layout, self._weights, len(self._weights.layers) - 1
        size, chunk = layout.element_bytes, layout.loss_chunk_tokens
        loss = loss_bytes(config, self._tokens, element_bytes=size, chunk_tokens=chunk, tp=layout.tp)
        yield (
            "loss",
            {
                "gathered weights": weights.gathered_in_loss,
                "activations": self._activations,
                "gradients": earlier,
                "loss": sum(loss.values()) if weights.has_head else 0.0,
            },
        )
        for name, blocks in {"last block": (last, max(0, last - 1)), "first block": (min(1, last), 0)}.items():
            for index in blocks:
                yield name, self._block_backward(index, earlier, reduces=reduces)
        if not (layout.uses_fsdp and reduces):
            return
        ends = {"gathered weights": weights.gathered_outside, "activations": self._stream}
        in_blocks = weights.head_unsharded + weights.block * size + max(self._sent, self._sent_experts)
        yield (
            "head reduction",
            {
                "gathered weights": weights.gathered_at_start,
                "activations": self._activations,
                "gradients": earlier + weights.head_reduction,
            },
        )
        yield "block reduction", ends | {"gradients": max(weights.shard_gradients, earlier) + in_blocks}
        yield "embedding reduction", ends | {"gradients": weights.shard_gradients + weights.embedding_reduction}

    def _block_backward(self, index: int, earlier: float, *, reduces: bool) -> Parts:
        """Return the parts while block `index` runs backward, at the larger of its two peaks."""
        config, layout, weights, last = self._config, self._layout, self._weights, len(self._weights.layers) - 1
        done = (last - index) * weights.block
        if not reduces and layout.uses_fsdp:
            gradients = max(earlier, done * layout.master_bytes)
            gradients += weights.head * layout.element_bytes if index == last else 0.0
        else:
            others = (last - index) * weights.block_shard * layout.gradient_bytes
            if earlier > weights.shard_gradients:  # unsharded until they are sent
                others += earlier - done * layout.master_bytes
            gradients = max(others, earlier if earlier <= weights.shard_gradients else 0.0)
            gradients += weights.head_in_last_block if index == last else weights.head_in_first_block + self._sent
        held_now, held_after = (self._saved_by(n) for n in (index + 1, index))
        backward = self._tokens * block_backward_per_token(config, layout)
        has_experts = config.layer(weights.layers[index]).experts
        inner = config.expert_size if has_experts else config.intermediate_size
        in_mlp = held_now + backward, inner * config.hidden_size / layout.tp
        at_end = held_after + self._tokens * attention_backward_per_token(config, layout), weights.block
        held, own = max(in_mlp, at_end, key=lambda peak: peak[0] + peak[1] * layout.element_bytes)
        return {
            "gathered weights": weights.gathered_in_block(index),
            "activations": held + (self._outside if index == last else 0.0),
            "gradients": gradients + own * layout.element_bytes,
        }

    def _saved_by(self, n_blocks: int) -> float:
        """Return the bytes that the first blocks have saved and that are on the device."""
        return sum(self._saved[n_blocks - self._layout.resident_blocks(n_blocks) : n_blocks])

    def _other_passes(self, in_flight: int) -> float:
        """Return the bytes of the other passes in flight, and of messages on their way, on a pipeline rank."""
        layout = self._layout
        saved = max(0.0, in_flight / layout.stages_per_rank - 1) * sum(self._saved)
        if layout.activation_offload:  # the last block of each pass stays
            saved = (in_flight - 1) * self._saved[-1]
        message = self._stream / layout.tp if layout.sequence_parallel else self._stream
        return saved + (in_flight - 1 + MESSAGES) * message
