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

Activations: `memory_activations`; gathered weights and gradients: `memory_weights`; optimizer: `memory_optimizer`.

Cost: one pass over the parameter table for each pipeline rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lt_model import LlamaConfig
from lt_model.activation_memory import loss_bytes, non_block_bytes_per_token
from lt_model.params import param_specs
from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.planning.memory_activations import (
    activations_per_token,
    attention_backward_per_token,
    block_backward_per_token,
)
from lt_trainer.planning.memory_optimizer import UPCAST_BYTES, optimizer_state_bytes, optimizer_temporary_bytes
from lt_trainer.planning.memory_weights import RankWeights, iter_ranks

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
    config: LlamaConfig,
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
    ranks = list(iter_ranks(config, layout))
    plans = [_RankPlan(config, seq_len, layout, rank).peak(upcast_bytes, workspace_bytes) for rank in ranks]
    peak_phase, parts = max(plans, key=_size)
    peak, table = sum(parts.values()), param_specs(config)
    host_bytes = max(optimizer_state_bytes(rank.rows, layout, layout.tp) for rank in ranks) / layout.fsdp_size
    return PlannedMemory(
        parts=parts,
        peak_phase=peak_phase,
        peak=peak,
        reserve=RESERVE_SHARE * peak + RESERVE_BYTES,
        state_bytes=layout.weight_bytes * sum(row.numel for row in table) + optimizer_state_bytes(table, layout, 1),
        host_bytes=host_bytes * layout.optimizer_offload,
    )


def _size(phase: tuple[str, Parts]) -> float:
    return sum(phase[1].values())


class _RankPlan:
    """Phases of a step on one pipeline rank; for the arguments see `plan_memory`."""

    def __init__(self, config: LlamaConfig, seq_len: int, layout: PlannedLayout, weights: RankWeights) -> None:
        size = layout.element_bytes
        self._config, self._layout, self._weights = config, layout, weights
        self._tokens = layout.micro_batch_size * seq_len // layout.cp
        self._stream = self._tokens * config.hidden_size * size
        self._block_activations = self._tokens * activations_per_token(config, layout)
        self._outside = self._tokens * non_block_bytes_per_token(config, element_bytes=size)
        if not weights.has_head:  # nor the last norm
            self._outside -= self._stream
        self._activations = layout.resident_blocks(weights.n_layers) * self._block_activations + self._outside
        self._sent = weights.block * layout.master_bytes if layout.fsdp_size > 1 else 0.0
        """Input of the reduce-scatter of one block."""

    def peak(self, upcast_bytes: int, workspace_bytes: int) -> tuple[str, Parts]:
        """Return the phase that needs most, and all parts in it."""
        layout, weights = self._layout, self._weights
        state = 0.0 if layout.optimizer_offload else optimizer_state_bytes(weights.rows, layout, layout.tp)
        permanent = {
            "weights": weights.all * layout.weight_bytes / layout.fsdp_size,
            "optimizer state": state / layout.fsdp_size,
            "workspace": float(workspace_bytes),
        }
        update = {
            "gathered weights": weights.gathered_after,
            "gradients": weights.shard_gradients,
            "optimizer": optimizer_temporary_bytes(weights.rows, layout, upcast_bytes),
        }
        phases = [("optimizer step", update)]
        for planned_pass in layout.fullest_backward_passes(weights.pp_rank):
            earlier = weights.earlier_gradients * planned_pass.has_earlier
            found = self._pass_phases(earlier, reduces=planned_pass.reduces)
            if layout.uses_fsdp and planned_pass.reduces:
                found |= self._reductions(earlier)
            phases += self._with_others(found, planned_pass.in_flight)
        name, parts = max(phases, key=_size)
        return name, permanent | parts

    def _pass_phases(self, earlier: float, *, reduces: bool) -> dict[str, Parts]:
        """Return the phases of a pass and its backward pass, beside these gradients of earlier ones."""
        layout, last = self._layout, self._weights.n_layers - 1
        loss = loss_bytes(
            self._config,
            self._tokens,
            element_bytes=layout.element_bytes,
            chunk_tokens=layout.loss_chunk_tokens,
            tp=layout.tp,
        )
        in_loss = {
            "gathered weights": self._weights.gathered_in_loss,
            "activations": self._activations,
            "gradients": earlier,
            "loss": sum(loss.values()) if self._weights.has_head else 0.0,
        }
        ends = {"last block": (last, max(0, last - 1)), "first block": (min(1, last), 0)}
        return {"loss": in_loss} | {
            name: max(
                (self._block_backward(i, earlier, reduces=reduces) for i in blocks), key=lambda p: sum(p.values())
            )
            for name, blocks in ends.items()
        }

    def _block_backward(self, index: int, earlier: float, *, reduces: bool) -> Parts:
        """Return the parts while block `index` runs backward, at the larger of its two peaks."""
        config, layout, weights, last = self._config, self._layout, self._weights, self._weights.n_layers - 1
        done = (last - index) * weights.block
        if not reduces and layout.uses_fsdp:
            gradients = max(earlier, done * layout.master_bytes)
            gradients += weights.head * layout.element_bytes if index == last else 0.0
        else:
            others = done * layout.gradient_bytes / layout.fsdp_size
            if earlier > weights.shard_gradients:  # unsharded until they are sent
                others += earlier - done * layout.master_bytes
            gradients = max(others, earlier if earlier <= weights.shard_gradients else 0.0)
            gradients += weights.head_in_last_block if index == last else weights.head_in_first_block + self._sent
        held_now, held_after = (layout.resident_blocks(n) * self._block_activations for n in (index + 1, index))
        backward = self._tokens * block_backward_per_token(config, layout)
        in_mlp = held_now + backward, config.intermediate_size * config.hidden_size / layout.tp
        at_end = held_after + self._tokens * attention_backward_per_token(config, layout), weights.block
        held, own = max(in_mlp, at_end, key=lambda peak: peak[0] + peak[1] * layout.element_bytes)
        return {
            "gathered weights": weights.gathered_in_block(index),
            "activations": held + (self._outside if index == last else 0.0),
            "gradients": gradients + own * layout.element_bytes,
        }

    def _reductions(self, earlier: float) -> dict[str, Parts]:
        """Return the phases in which FSDP reduces gradients."""
        weights = self._weights
        in_blocks = weights.head_unsharded + weights.block * self._layout.element_bytes + self._sent
        return {
            "head reduction": {
                "gathered weights": weights.gathered_at_start,
                "activations": self._activations,
                "gradients": earlier + weights.head_reduction,
            },
            "block reduction": {
                "gathered weights": weights.gathered_outside,
                "activations": self._stream,
                "gradients": max(weights.shard_gradients, earlier) + in_blocks,
            },
            "embedding reduction": {
                "gathered weights": weights.gathered_outside,
                "activations": self._stream,
                "gradients": weights.shard_gradients + weights.embedding_reduction,
            },
        }

    def _with_others(self, phases: Mapping[str, Parts], in_flight: int) -> list[tuple[str, Parts]]:
        """Return the phases with the other passes in flight, and messages on their way, on a pipeline rank."""
        layout = self._layout
        if layout.pp == 1:
            return list(phases.items())
        blocks = max(0.0, in_flight / layout.stages_per_rank - 1) * self._weights.n_layers
        if layout.activation_offload:  # the last block of each pass stays
            blocks = in_flight - 1
        message = self._stream / layout.tp if layout.sequence_parallel else self._stream
        pipeline = blocks * self._block_activations + (in_flight - 1 + MESSAGES) * message
        return [(name, parts | {"pipeline": pipeline}) for name, parts in phases.items()]
