"""Parallelism applied to a model from outside: TP, CP, EP, activation checkpointing, compile, FSDP2.

The order matters. Tensor, context and expert parallelism first: they decide what a block computes; then
float8, in which its products are. Activation checkpointing next, inside the compiled region, so that the compiler sees
the recomputation. Then each block is compiled, as one graph, and what it saves is offloaded. FSDP last, around
everything: its hooks gather a block's weights before and free them after, in eager mode.

FSDP2 (`fully_shard`) on every block, on embedding and head where they are not tied, and on the root: each rank keeps
its slice of the parameters in the master dtype, gathers a module's weights in the compute dtype just before use and
reduces its gradients in the master dtype after, over the shards and then over the replicas. Gradients are summed, never
averaged: the loss is already divided by the valid tokens of the whole global batch. Expert-parallel experts are an
FSDP module of their own within the block's, over the ranks that hold the same ones.

Gathers run ahead of their use: in the forward pass a module asks for the next one's weights before it computes (the
host would ask in time only while it is ahead of the device), in the backward pass FSDP2 does the same by itself; of a
block with its experts the block asks for both of the next one's.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lt_model import ModelConfig, stage_layers
from lt_model.feed_forward import MoE
from lt_trainer.config.sections import MoeOptions
from lt_trainer_gpu.computation import Computation
from lt_trainer_gpu.devices import current_device
from lt_trainer_gpu.fsdp_sync import FsdpSync
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage, build_stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_DIM_NAMES = ("pp", "dp_replicate", "fsdp", "tp")
EXPERT_MESH_DIM_NAMES = ("pp", "dp_replicate", "efsdp", "ep")


def open_stages(
    config: ModelConfig, moe: MoeOptions, computation: Computation, mesh_layout: MeshLayout, timeout_s: float
) -> list[DecoderStage]:
    """Return this rank's stages: built without memory, parallelized, then allocated with undefined values.

    Args:
        config: the whole model.
        moe: losses of experts.
        computation: dtypes, attention and options.
        mesh_layout: degrees of parallelism and this rank's coordinates.
        timeout_s: timeout of a collective.
    """
    options = computation.options
    # An unsharded model needs no FSDP for its casts: it is built in the compute dtype.
    in_master_dtype = mesh_layout.uses_fsdp and not computation.rounds_stochastically
    layers = stage_layers(config, mesh_layout.pp * options.pipeline_stages_per_rank)
    stages = [
        build_stage(
            config,
            layers_of_stage,
            attention=computation.attention,
            dtype=computation.master_dtype if in_master_dtype else computation.dtype,
            pad_vocab_to_multiple_of=max(1, options.pad_vocab_to_multiple_of),
            loss_chunk_tokens=options.loss_chunk_tokens,
        )
        for layers_of_stage in layers[mesh_layout.pp_rank :: mesh_layout.pp]
    ]
    _parallelize(stages, moe, computation, mesh_layout, timeout_s)
    for stage in stages:
        if mesh_layout.uses_fsdp:
            stage.to_empty(device=computation.device)
        else:  # without to_empty's `empty_like` of a meta tensor, which imports sympy
            stage._apply(lambda like: torch.empty(like.shape, dtype=like.dtype, device=computation.device))
        stage.tie_weights()  # memory was allocated for each module separately
        if stage.balance is not None:
            stage.balance.allocate_loads(stage, computation)
    return stages


def _parallelize(
    stages: Sequence[DecoderStage],
    moe: MoeOptions,
    computation: Computation,
    layout: MeshLayout,
    timeout_s: float,
) -> None:
    """Shard, checkpoint, compile and wrap this rank's stages, in place; they are on the meta device."""
    options, device_type = computation.options, computation.device.type
    mesh, expert_mesh = None, None
    if layout.uses_fsdp or layout.tp > 1:
        sizes = (layout.pp, layout.dp_replicate, layout.fsdp_size, layout.tp)
        mesh = _init_mesh(sizes, MESH_DIM_NAMES, device_type, timeout_s)
    if layout.ep > 1:
        sizes = (layout.pp, layout.dp_replicate, layout.efsdp_size, layout.ep)
        expert_mesh = _init_mesh(sizes, EXPERT_MESH_DIM_NAMES, device_type, timeout_s)
    _divide_blocks(stages, moe, layout, mesh, expert_mesh, timeout_s)
    for stage in stages:
        if options.fp8 != "off":
            from lt_trainer_gpu.fp8 import apply_fp8

            apply_fp8(stage, options.fp8, options.fp8_skipped_blocks)
        if options.activation_checkpointing in ("full", "selective"):
            from lt_trainer_gpu.activation_checkpointing import apply_activation_checkpointing

            apply_activation_checkpointing(stage, options.activation_checkpointing)
        if computation.compile:
            from lt_trainer_gpu.compilation import compile_blocks

            budget = options.activation_memory_budget if options.activation_checkpointing == "memory_budget" else 1.0
            compile_blocks(stage.blocks, budget, exchanges_rows=layout.ep > 1)
            if stage.is_last:
                stage.lm_head.compile_loss = True  # pyright: ignore[reportArgumentType]
        if options.activation_offload:
            from lt_trainer_gpu.activation_offload import apply_activation_offload

            apply_activation_offload(stage.blocks, current_device(device_type))
        if layout.uses_fsdp:
            assert mesh is not None
            _apply_fsdp(stage, mesh, expert_mesh, layout, computation)
            stage.fsdp_sync = FsdpSync(stage, options)


def _divide_blocks(
    stages: Sequence[DecoderStage],
    moe: MoeOptions,
    layout: MeshLayout,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    timeout_s: float,
) -> None:
    """Let blocks compute this rank's part of positions, heads, widths and experts."""
    # Imported on use: DTensor's import takes seconds, and an unsharded model does not need it.
    cp_group = None
    if layout.cp > 1:
        from lt_trainer_gpu.context_parallel import apply_context_parallel, init_context_parallel_group

        cp_group = init_context_parallel_group(layout, timeout_s)
        for stage in stages:
            apply_context_parallel(stage, cp_group)
    for stage in stages:
        if layout.tp > 1:
            from lt_trainer_gpu.collectives import TensorParallelGroup
            from lt_trainer_gpu.tensor_parallel import apply_tensor_parallel

            assert mesh is not None
            tp_group = TensorParallelGroup(
                size=layout.tp,
                rank=layout.tp_rank,
                group_name=mesh["tp"].get_group().group_name,
                sequence_parallel=layout.sequence_parallel,
            )
            apply_tensor_parallel(stage, layout, tp_group)
        if expert_mesh is not None:
            from lt_trainer_gpu.expert_parallel import apply_expert_parallel

            apply_expert_parallel(stage, layout, expert_mesh["ep"].get_group().group_name)
        if stage.config.has_experts:
            from lt_trainer_gpu.balancing import Balance, apply_balancing

            sp = layout.tp // layout.router_copies
            sizes = {"dp_replicate": layout.dp_replicate, "fsdp": layout.fsdp_size, "tp": sp}
            names = {axis: mesh[axis].get_group().group_name for axis, size in sizes.items() if mesh and size > 1}
            row_names = [names["tp"]] if sp > 1 else []
            balance = Balance(
                options=moe,
                group_names=tuple(names.values()),
                row_group_names=(*row_names, *([] if cp_group is None else [cp_group.group_name])),
                n_row_groups=layout.dp_replicate * layout.dp_shard,
                tp=layout.router_copies,
                sp=sp,
                sp_rank=layout.tp_rank % sp,
            )
            apply_balancing(stage, balance)


def _init_mesh(sizes: tuple[int, ...], names: tuple[str, ...], device_type: str, timeout_s: float) -> DeviceMesh:
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    # Mesh groups have torch's default timeout, not the world group's. Torch has renamed the setter.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    for name in names:
        set_timeout(datetime.timedelta(seconds=timeout_s), mesh[name].get_group())
    return mesh


def _apply_fsdp(
    model: DecoderStage,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    mesh_layout: MeshLayout,
    computation: Computation,
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Shard

    def shards(mesh: DeviceMesh, axis: str) -> DeviceMesh:
        return mesh["dp_replicate", axis] if mesh_layout.dp_replicate > 1 else mesh[axis]

    fsdp_mesh = shards(mesh, "fsdp")
    policy = MixedPrecisionPolicy(param_dtype=computation.dtype, reduce_dtype=computation.master_dtype)
    reshard = computation.options.reshard_after_forward
    *others, last = model.blocks
    groups: list[list[Any]] = []
    for block in model.blocks:
        groups.append([block])
        if expert_mesh is not None and isinstance(block.mlp, MoE):
            experts: Any = block.mlp.experts
            fully_shard(
                experts,
                mesh=shards(expert_mesh, "efsdp"),
                mp_policy=replace(policy, cast_forward_inputs=False),
                reshard_after_forward=reshard and block is not last,
                shard_placement_fn=lambda weight: Shard(mesh_layout.expert_fsdp_dim(weight.shape)),
            )
            register_fsdp_forward_method(experts, "compute_block")
            block.forward = partial(experts.compute_block, block.forward)
            groups[-1].append(experts)
    for block in others:
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Backward starts with the last block; the norm after it is too small for a collective of its own.
    group: list[Any] = [last, model.model.norm] if model.is_last else [last]
    fully_shard(group, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    has_two_uses = model.config.tie_word_embeddings and model.is_first and model.is_last
    first: list[Any] = [model.model.embed_tokens] if model.is_first and not has_two_uses else []
    head: list[Any] = [model.lm_head] if model.is_last and not has_two_uses else []
    for module in (*first, *head):  # a weight with two uses stays in the root's group
        fully_shard(module, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard)
        # Neither's backward reads the weight: the loss has computed its gradients in the forward pass.
        module.set_unshard_in_backward(False)
    in_order = [[module] for module in first] + groups + [[module] for module in head]
    for (module, *_), following in itertools.pairwise(in_order):
        module.set_modules_to_forward_prefetch(following)
    if expert_mesh is not None:
        for earlier, (block, *_) in itertools.pairwise(groups):
            block.set_modules_to_backward_prefetch(earlier)
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
