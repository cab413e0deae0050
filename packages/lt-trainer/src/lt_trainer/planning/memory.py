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

With FSDP a module's weights are gathered while it computes, and in backward the next block's are being gathered
beside. What an all-gather returns exists twice while it is copied into place, and the forward pass keeps the last such
buffer until it ends. The head is gathered for the loss only, and its gradient stays in flight until the next reduction;
tied to the embedding, it stays gathered, and the gradient stays unsharded, for the whole micro-batch. On a device that
does not shard its weights and computes in a narrower dtype, "gathered weights" are the model's weights beside the
master weights.

A block's backward has two peaks: in the feed-forward layer, with all that the block has saved but few gradients, and at
its end, with all its gradients.

The reserve covers fragmentation in torch's allocator and the memory of CUDA and NCCL outside of it: a share of the peak
(`RESERVE_SHARE`) plus a fixed size (`RESERVE_BYTES`). Both are assumptions, not measurements. The peak without it is
compared with torch's CUDA allocator, on a device that computes nothing, in lt-trainer-gpu's tests.

Under context parallelism a device has the activations of its own positions only, but attention's keys and values are
those that these positions see of all devices (`SELECTED_KEYS`). They are counted for rows of one document, the most;
short documents need hardly more than a device's own.

Under pipeline parallelism a device has some layers, the first the embedding, the last the head. Besides the pass that
computes it keeps the activations of the other passes in flight (`PlannedLayout.max_in_flight`). The device that needs
most is planned: often the first, which has the most in flight, or the last, which has the loss.

Cost: one pass over the parameter table for each pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lt_model import LlamaConfig
from lt_model.activation_memory import (
    activation_bytes_per_token,
    block_backward_bytes_per_token,
    loss_bytes,
    non_block_bytes_per_token,
)
from lt_model.params import ParamSpec, param_specs
from lt_model.stages import stage_layers
from lt_trainer.optimizers import ADAMW, optimizer_spec
from lt_trainer.optimizers.spec import DTYPE_BYTES
from lt_trainer.planning.layout import PlannedLayout

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30
ATTENTION_TENSORS = 6
"""Tensors of the stream's size at the end of a block's backward: gradients of queries, keys, values, output, stream."""
SELECTED_KEYS = 0.5
"""Keys beyond all of the cp devices' equal shares that a device selects at most: it has a head and a tail chunk of each
row, and keys that both see are selected twice."""
WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper and newer, which torch's allocator holds; 8 MiB on older GPUs."""
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


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """Part of the model on one pipeline rank."""

    pp_rank: int
    rows: tuple[ParamSpec, ...]
    n_layers: int
    has_head: bool
    is_tied: bool
    """Embedding and head are one tensor on this rank."""


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Parameter counts of a rank after tensor parallelism and before sharding."""

    all: float
    block: float
    """Parameters of the largest block."""
    head: float
    """Parameters of the head; 0 where it is on another pipeline rank."""
    embedding: float
    """Parameters of the embedding; 0 where it is on another pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """Bytes of gathered weights in the phases of a micro-batch."""

    loss: float
    start_of_backward: float
    outside_blocks: float
    """While no block is gathered."""
    block: float
    keeps_blocks: bool
    prefetched: float
    """Of the next block, while the one before it computes."""
    last_buffer: float
    """Beside the last block, in the first backward after a forward that keeps buffers."""
    afterwards: float

    def in_block(self, index: int, last: int) -> float:
        """Return the bytes while block `index` of 0 to `last` runs backward."""
        n_gathered = index + 1 if self.keeps_blocks else 1
        prefetched = self.prefetched if index > 0 else 0.0
        return self.outside_blocks + n_gathered * self.block + prefetched + self.last_buffer * (index == last)


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
    plans = [
        _plan_rank(config, seq_len, layout, stages, upcast_bytes, workspace_bytes)
        for stages in _iter_stages(config, layout)
    ]
    peak_phase, parts = max(plans, key=lambda plan: sum(plan[1].values()))
    peak = sum(parts.values())
    return PlannedMemory(
        parts=parts,
        peak_phase=peak_phase,
        peak=peak,
        reserve=RESERVE_SHARE * peak + RESERVE_BYTES,
        state_bytes=layout.weight_bytes * sum(row.numel for row in param_specs(config))
        + _optimizer_state(param_specs(config), layout, 1),
        host_bytes=max(_optimizer_state(stages.rows, layout, layout.tp) for stages in _iter_stages(config, layout))
        / layout.fsdp_size
        * layout.optimizer_offload,
    )


def _iter_stages(config: LlamaConfig, layout: PlannedLayout) -> Iterator[_Stages]:
    """Yield each pipeline rank's part of the model."""
    layers, rows = stage_layers(config, layout.pp * layout.stages_per_rank), param_specs(config)
    for pp_rank in range(layout.pp):
        own = {layer for stage in layers[pp_rank :: layout.pp] for layer in stage}
        is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
        ends = {"embed": is_first, "final": is_last}
        found = [row for row in rows if (row.layer in own if row.layer is not None else ends[row.role])]
        if config.tie_word_embeddings and is_last and not is_first:  # its own copy of the embedding
            found.append(rows[0])
        is_tied = config.tie_word_embeddings and is_first and is_last
        yield _Stages(pp_rank=pp_rank, rows=tuple(found), n_layers=len(own), has_head=is_last, is_tied=is_tied)


def _plan_rank(
    config: LlamaConfig,
    seq_len: int,
    layout: PlannedLayout,
    stages: _Stages,
    upcast_bytes: int,
    workspace_bytes: int,
) -> tuple[str, dict[str, float]]:
    """Return the peak phase of a pipeline rank and the parts in it; for the arguments see `plan_memory`."""
    counts, size, master = _parameter_counts(config, stages, layout), layout.element_bytes, layout.master_bytes
    tokens = layout.micro_batch_size * seq_len // layout.cp
    block_activations = tokens * _activations_per_token(config, layout)
    outside = tokens * non_block_bytes_per_token(config, element_bytes=size)
    activations = layout.resident_blocks(stages.n_layers) * block_activations + outside
    backward = tokens * _backward_per_token(config, layout)
    permanent = {
        "weights": counts.all * layout.weight_bytes / layout.fsdp_size,
        "optimizer state": 0.0
        if layout.optimizer_offload
        else _optimizer_state(stages.rows, layout, layout.tp) / layout.fsdp_size,
        "workspace": float(workspace_bytes),
    }
    if layout.pp > 1:
        permanent["pipeline"] = _in_flight_bytes(config, tokens, block_activations, layout, stages)
    gathered = _gathered(counts, layout, stages)
    loss = loss_bytes(config, tokens, element_bytes=size, chunk_tokens=layout.loss_chunk_tokens, tp=layout.tp)
    earlier, shard = _earlier_gradients(counts, layout), counts.all * layout.gradient_bytes / layout.fsdp_size
    head = _head_gradients(counts, layout, stages)
    sending = counts.block * master if layout.fsdp_size > 1 else 0.0  # reduce-scatter input of one block
    last = stages.n_layers - 1

    def block_backward(index: int) -> dict[str, float]:
        """Return the parts while block `index` runs backward, at the larger of its two peaks."""
        done = (last - index) * counts.block
        others = done * layout.gradient_bytes / layout.fsdp_size
        if earlier > shard:  # unsharded until they are sent
            others += earlier - done * master
        gradients = max(others, earlier if earlier <= shard else 0.0) + (
            head.last_block if index == last else head.first_block + sending
        )
        held_now, held_after = (layout.resident_blocks(n) * block_activations for n in (index + 1, index))
        in_mlp = held_now + backward, config.intermediate_size * config.hidden_size / layout.tp
        at_end = held_after + tokens * _attention_backward_per_token(config, layout), counts.block
        held, own = max(in_mlp, at_end, key=lambda peak: peak[0] + peak[1] * size)
        held += outside if index == last else 0.0
        return _phase_parts(gathered=gathered.in_block(index, last), activations=held, gradients=gradients + own * size)

    phases = {
        "loss": _phase_parts(
            gathered=gathered.loss,
            activations=activations,
            gradients=earlier,
            loss=sum(loss.values()) if stages.has_head else 0.0,
        ),
        "last block": _peak_of(block_backward(index) for index in (last, max(0, last - 1))),
        "first block": _peak_of(block_backward(index) for index in (min(1, last), 0)),
        "optimizer step": _phase_parts(
            gathered=gathered.afterwards,
            gradients=shard,
            optimizer=_optimizer_temporaries(stages.rows, layout, upcast_bytes),
        ),
    }
    if layout.uses_fsdp:
        stream = tokens * config.hidden_size * size
        phases |= {
            "head reduction": _phase_parts(
                gathered=gathered.start_of_backward, activations=activations, gradients=earlier + head.reduction
            ),
            "block reduction": _phase_parts(
                gathered=gathered.outside_blocks,
                activations=stream,
                gradients=max(shard, earlier) + head.unsharded + counts.block * size + sending,
            ),
            "embedding reduction": _phase_parts(
                gathered=gathered.outside_blocks,
                activations=stream,
                gradients=shard + _embedding_reduction(counts, layout),
            ),
        }
    peak_phase = max(phases, key=lambda name: sum(phases[name].values()))
    return peak_phase, permanent | phases[peak_phase]


def _in_flight_bytes(
    config: LlamaConfig, tokens: int, block_activations: float, layout: PlannedLayout, stages: _Stages
) -> float:
    """Return bytes of the passes in flight beside the one that computes, and of messages on their way."""
    in_flight, stream = layout.max_in_flight(stages.pp_rank), tokens * config.hidden_size * layout.element_bytes
    stream /= layout.tp if layout.sequence_parallel else 1
    other_layers = max(0.0, (in_flight / layout.stages_per_rank - 1) * stages.n_layers)
    if layout.activation_offload:
        other_layers = 0.0
    return other_layers * block_activations + (in_flight - 1 + MESSAGES) * stream


def _peak_of(phases: Iterable[dict[str, float]]) -> dict[str, float]:
    return max(phases, key=lambda parts: sum(parts.values()))


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


def _gathered(counts: _Counts, layout: PlannedLayout, stages: _Stages) -> _Gathered:
    size, block = layout.element_bytes, counts.block * layout.element_bytes
    if not layout.uses_fsdp:
        model = counts.all * size if layout.has_separate_master_weights else 0.0
        return _Gathered(
            loss=model,
            start_of_backward=model,
            outside_blocks=model,
            block=0.0,
            keeps_blocks=False,
            prefetched=0.0,
            last_buffer=0.0,
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
    return _Gathered(
        loss=max(ends, head) + buffer + blocks,
        start_of_backward=ends + blocks,
        outside_blocks=ends,
        block=block,
        keeps_blocks=not layout.reshard_after_forward,
        prefetched=block * gathers_in_backward,
        last_buffer=block * (gathers_in_backward and layout.accumulation_steps > 1),
        afterwards=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _HeadGradients:
    """Bytes of the head's gradient beside those of earlier micro-batches and the shards of the blocks."""

    reduction: float = 0.0
    last_block: float
    first_block: float
    unsharded: float
    """Of the embedding too if they are tied."""


def _head_gradients(counts: _Counts, layout: PlannedLayout, stages: _Stages) -> _HeadGradients:
    """Return the head's gradients: kept unsharded if it is tied or nothing is sharded, else sent at once."""
    narrow, wide = counts.head * layout.element_bytes, counts.head * layout.master_bytes
    if not layout.uses_fsdp or stages.is_tied:
        return _HeadGradients(last_block=narrow, first_block=narrow, unsharded=narrow)
    shard = wide / layout.fsdp_size
    if layout.accumulation_steps > 1:  # the gradients of earlier micro-batches have it: sharded, or wide and unsharded
        added = narrow if layout.reduce_each_micro_batch else 0.0
        return _HeadGradients(reduction=added + wide, last_block=wide, first_block=0.0, unsharded=0.0)
    return _HeadGradients(reduction=narrow + wide, last_block=wide + shard, first_block=shard, unsharded=0.0)


def _embedding_reduction(counts: _Counts, layout: PlannedLayout) -> float:
    """Return the bytes beyond all sharded gradients while the embedding's are cast and reduced."""
    if not layout.uses_fsdp:
        return 0.0
    wide = counts.embedding * layout.master_bytes
    accumulates = layout.accumulation_steps > 1 and not layout.reduce_each_micro_batch
    unsharded = wide if accumulates else counts.embedding * layout.element_bytes
    shard = wide / layout.fsdp_size
    # First the unsharded gradient and its copy to send, then that copy and the shard.
    return max(unsharded + wide - shard, wide)


def _optimizer_state(rows: Sequence[ParamSpec], layout: PlannedLayout, tp: int) -> float:
    """Return bytes of the optimizer's slots after tensor parallelism and before sharding."""
    spec = optimizer_spec(layout.optimizer.name)
    return sum(
        spec.for_params([row]).state_bytes(layout.optimizer, [row.shape], layout.master_bytes)
        / (1 if row.tp_dim is None else tp)
        for row in rows
    )


def _optimizer_temporaries(table: Sequence[ParamSpec], layout: PlannedLayout, upcast_bytes: int) -> float:
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
            numel = sum(_local_size(row, layout.tp) for row in rows) / layout.fsdp_size
            buffers = 0.0
            if layout.optimizer_offload:
                buffers = min(OFFLOAD_BUFFER_BYTES, sum(slot_bytes) * numel)
                numel = min(numel, OFFLOAD_BUFFER_BYTES / 2 / sum(slot_bytes))
            found.append(buffers + min(upcast_bytes, narrower * master * numel))
            continue
        copies = sum(slot_bytes) * layout.optimizer_offload
        found.append(((UPDATE_TEMPORARIES + len(spec.slots)) * master + copies) * largest / shards)
        if spec.transform is not None:
            element = DTYPE_BYTES.get(spec.transform.dtype(layout.optimizer), master)
            side = min(min(row.shape) for row in rows if row.numel == largest)
            exchanged = EXCHANGED_MATRICES if shards > 1 else 0
            found.append(element * ((exchanged + TRANSFORM_MATRICES) * largest + TRANSFORM_SQUARES * side**2))
    return max(found)


def _backward_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return bytes per token of a block's backward; "memory_budget" may recompute as much as "full"."""
    mode = "full" if layout.activation_checkpointing == "memory_budget" else layout.activation_checkpointing
    n_bytes = block_backward_bytes_per_token(
        config,
        mode,  # pyright: ignore[reportArgumentType] - same names as the engine's options
        element_bytes=layout.element_bytes,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
    )
    return n_bytes if mode == "none" else n_bytes + _foreign_keys_per_token(config, layout)


def _attention_backward_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return bytes per token at the end of a block's backward, where its attention's is.

    Under context parallelism: input, norm, queries and output with their gradients; selected keys and values with
    theirs, which flash kernels compute for every query head; and the buffer in which they are added up.
    """
    width = config.hidden_size * layout.element_bytes
    if layout.cp == 1:
        return ATTENTION_TENSORS * width
    heads, kv, selected = width / layout.tp, _kv_per_token(config, layout), layout.cp + SELECTED_KEYS
    per_head = 2 * heads * selected if config.n_kv_heads < config.n_heads else 0.0
    return 3 * width + 3 * heads + 2 * kv * selected + max(per_head, kv * layout.cp)


def _activations_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return activation bytes per token and block; "memory_budget" interpolates between "full" and "none"."""

    def saved(mode: str) -> float:
        n_bytes = activation_bytes_per_token(
            config,
            mode,  # pyright: ignore[reportArgumentType] - same names as the engine's options
            element_bytes=layout.element_bytes,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
        )
        return sum(n_bytes.values()) + (_foreign_keys_per_token(config, layout) if mode == "none" else 0.0)

    if layout.activation_checkpointing == "memory_budget":
        return saved("full") + layout.activation_memory_budget * (saved("none") - saved("full"))
    return saved(layout.activation_checkpointing)


def _kv_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return bytes of the keys and values of a token in one block."""
    return 2 * config.n_kv_heads * config.head_dim * layout.element_bytes / layout.tp


def _foreign_keys_per_token(config: LlamaConfig, layout: PlannedLayout) -> float:
    """Return bytes of selected keys and values per token of this device, beyond those of the token itself."""
    return 0.0 if layout.cp == 1 else (layout.cp + SELECTED_KEYS - 1) * _kv_per_token(config, layout)


def _earlier_gradients(counts: _Counts, layout: PlannedLayout) -> float:
    """Return gradient bytes of earlier micro-batches: unsharded master dtype unless each one reduces."""
    if layout.accumulation_steps == 1:
        return 0.0
    unsharded = counts.all * layout.master_bytes
    return unsharded / layout.fsdp_size if layout.reduce_each_micro_batch or not layout.uses_fsdp else unsharded


def _parameter_counts(config: LlamaConfig, stages: _Stages, layout: PlannedLayout) -> _Counts:
    by_block: dict[int, float] = {}
    for row in stages.rows:
        if row.layer is not None:
            by_block[row.layer] = by_block.get(row.layer, 0.0) + _local_size(row, layout.tp)
    end = math.ceil(config.vocab_size / layout.tp) * config.hidden_size
    return _Counts(
        all=sum(_local_size(row, layout.tp) for row in stages.rows),
        block=max(by_block.values()),
        head=end if stages.has_head else 0.0,
        embedding=end if stages.pp_rank == 0 else 0.0,
    )


def _local_size(row: ParamSpec, tp: int) -> float:
    return row.numel if row.tp_dim is None else row.numel / tp
