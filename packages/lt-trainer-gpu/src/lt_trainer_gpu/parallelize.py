"""Parallelism applied to a model from outside: TP, activation checkpointing, compile, FSDP2.

The order matters. Tensor parallelism first: it decides what a block computes. Activation checkpointing next, inside the
compiled region, so that the compiler sees the recomputation. Then each block is compiled, as one graph. FSDP last,
around everything: its hooks gather a block's weights before and free them after, in eager mode.

FSDP2 (`fully_shard`) on every block, on embedding and head where they are not tied, and on the root: each rank keeps
its slice of the parameters in the master dtype, gathers a module's weights in the compute dtype just before use and
reduces its gradients in the master dtype after, over the shards and then over the replicas. Gradients are summed, never
averaged: the loss is already divided by the valid tokens of the whole global batch.

Gathers run ahead of their use: in the forward pass a module asks for the next one's weights before it computes (the
host would ask in time only while it is ahead of the device), in the backward pass FSDP2 does the same by itself.
"""

from __future__ import annotations

import datetime
import itertools
from typing import TYPE_CHECKING, Any

import torch

from lt_model import param_specs
from lt_model.llama import Llama
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import LlamaWithLoss, attach_loss
from lt_trainer_gpu.options import GpuOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_DIM_NAMES = ("pp", "dp_replicate", "fsdp", "tp")


def parallelize(
    model: Llama,
    *,
    mesh_layout: MeshLayout,
    options: GpuOptions,
    device_type: str,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    timeout_s: float,
) -> LlamaWithLoss:
    """Shard, checkpoint, compile and wrap `model` for this rank, in place.

    Args:
        model: on the meta device, in the master dtype; in the compute dtype if it is not sharded.
        mesh_layout: degrees of parallelism and this rank's coordinates.
        options: the engine's options.
        device_type: "cuda" or "cpu".
        compute_dtype: dtype of forward and backward.
        master_dtype: dtype of the sharded weights, of the gradients' reduction and of the optimizer.
        timeout_s: timeout of a collective.

    Returns:
        The model, whose forward pass is the training loss.
    """
    sharded = mesh_layout.uses_fsdp
    # Imported here: DTensor's import takes seconds, and an unsharded model does not need it.
    mesh = _init_mesh(mesh_layout, device_type, timeout_s) if mesh_layout.world_size > 1 else None
    tp_group, vocab_start_index = None, 0
    if mesh_layout.tp > 1:
        from lt_trainer_gpu.collectives import TensorParallelGroup
        from lt_trainer_gpu.tensor_parallel import apply_tensor_parallel

        assert mesh is not None
        group = mesh["tp"].get_group()
        tp_group = TensorParallelGroup(
            size=mesh_layout.tp,
            rank=mesh_layout.tp_rank,
            group_name=group.group_name,
            sequence_parallel=mesh_layout.sequence_parallel,
        )
        apply_tensor_parallel(model, mesh_layout, tp_group)
        vocab_start_index, _ = mesh_layout.tp_shard_range(param_specs(model.config)[0])
    blocks = list(model.model.layers)
    if options.activation_checkpointing in ("full", "selective"):
        from lt_trainer_gpu.activation_checkpointing import apply_activation_checkpointing

        apply_activation_checkpointing(blocks, options.activation_checkpointing)  # pyright: ignore[reportArgumentType]
    if options.compile is True:
        from lt_trainer_gpu.compilation import compile_blocks

        budget = options.activation_memory_budget if options.activation_checkpointing == "memory_budget" else 1.0
        compile_blocks(blocks, budget)  # pyright: ignore[reportArgumentType]
    with_loss = attach_loss(model, tp_group, vocab_start_index, compile=options.compile is True)
    if sharded:
        assert mesh is not None
        _apply_fsdp(with_loss, mesh, mesh_layout, options, compute_dtype, master_dtype)
    return with_loss


def _init_mesh(mesh_layout: MeshLayout, device_type: str, timeout_s: float) -> DeviceMesh:
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        device_type,
        (mesh_layout.pp, mesh_layout.dp_replicate, mesh_layout.fsdp_size, mesh_layout.tp),
        mesh_dim_names=MESH_DIM_NAMES,
    )
    # Mesh groups have torch's default timeout, not the world group's. Torch has renamed the setter.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    for name in MESH_DIM_NAMES:
        set_timeout(datetime.timedelta(seconds=timeout_s), mesh[name].get_group())
    return mesh


def _apply_fsdp(
    model: LlamaWithLoss,
    mesh: DeviceMesh,
    mesh_layout: MeshLayout,
    options: GpuOptions,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    fsdp_mesh = mesh["dp_replicate", "fsdp"] if mesh_layout.dp_replicate > 1 else mesh["fsdp"]
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    *others, last = model.model.layers
    for block in others:
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    # Backward starts with the last block; the norm after it is too small for a collective of its own.
    fully_shard([last, model.model.norm], mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    in_order: list[Any] = [*others, last]
    if not model.config.tie_word_embeddings:  # a weight with two uses stays in the root's group
        ends: list[Any] = [model.model.embed_tokens, model.lm_head]
        for module in ends:
            fully_shard(module, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
            # Neither's backward reads the weight: the loss has computed its gradients in the forward pass.
            module.set_unshard_in_backward(False)
        in_order = [ends[0], *in_order, ends[1]]
    for module, following in itertools.pairwise(in_order):
        module.set_modules_to_forward_prefetch([following])
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
