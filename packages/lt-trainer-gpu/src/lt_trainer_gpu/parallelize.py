"""Parallelism applied to a model from outside, in one ordered function; the model's code knows nothing of it.

The order is not free. Tensor parallelism first: it decides what a block computes. Activation checkpointing next, within
what is compiled, so that the compiler sees what is computed again. Then each block is compiled, as one graph. FSDP
last, around all that: its hooks gather a block's weights before and let go of them after, in eager mode.

FSDP2 (`fully_shard`) on every block and on the root: each rank keeps its slice of the parameters in the master dtype,
gathers a block's weights in the compute dtype just before use and reduces its gradients in the master dtype after, over
the shards and then over the replicas. Gradients are summed, never averaged: the loss is already divided by the valid
tokens of the whole global batch.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch

from lt_model import parameters
from lt_model.llama import Llama
from lt_trainer_gpu.layout import Layout
from lt_trainer_gpu.model import TrainedLlama, trained
from lt_trainer_gpu.options import GpuOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard", "tp")


def parallelize(
    model: Llama,
    *,
    layout: Layout,
    options: GpuOptions,
    device_type: str,
    compute: torch.dtype,
    master: torch.dtype,
    timeout_s: float,
) -> TrainedLlama:
    """Make `model` this rank's part of the model, in place.

    Args:
        model: on the meta device, in the master dtype; where it is not sharded, in the one that it computes in.
        layout: the degrees, and this rank's place.
        options: the engine's.
        device_type: "cuda" or "cpu".
        compute: dtype of forward and backward.
        master: dtype of the sharded weights, of the gradients' reduction and of the optimizer.
        timeout_s: how long a collective may take.

    Returns:
        The model, whose forward pass is the training loss.
    """
    sharded = layout.replicas * layout.shards > 1  # else there is nothing to gather or to reduce
    # DTensor's import takes seconds, which one process that needs none of it need not wait for.
    mesh = _mesh(layout, device_type, timeout_s) if sharded or layout.tp > 1 else None
    axis, first_id = None, 0
    if layout.tp > 1:
        from lt_trainer_gpu.collectives import TensorAxis
        from lt_trainer_gpu.tensor_parallel import apply_tensor_parallel

        assert mesh is not None
        group = mesh["tp"].get_group()
        axis = TensorAxis(
            size=layout.tp, rank=layout.tp_rank, group=group.group_name, sequence=layout.sequence_parallel
        )
        apply_tensor_parallel(model, layout, axis)
        first_id, _ = layout.tp_span(parameters(model.config)[0])
    blocks = list(model.model.layers)
    if options.activation_checkpointing in ("full", "selective"):
        from lt_trainer_gpu.activation_checkpointing import checkpoint_blocks

        checkpoint_blocks(blocks, options.activation_checkpointing)  # pyright: ignore[reportArgumentType]
    if options.compile:
        from lt_trainer_gpu.compilation import compile_blocks

        budget = options.activation_budget if options.activation_checkpointing == "budget" else 1.0
        compile_blocks(blocks, budget)  # pyright: ignore[reportArgumentType]
    made = trained(model, axis, first_id)
    if sharded:
        assert mesh is not None
        _shard(made, mesh, layout, options, compute, master)
    return made


def _mesh(layout: Layout, device_type: str, timeout_s: float) -> DeviceMesh:
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, (layout.replicas, layout.shards, layout.tp), mesh_dim_names=AXES)
    # Groups of a mesh have torch's own timeout, not that of the group of all ranks. Torch has renamed the setter.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    for axis in AXES:
        set_timeout(datetime.timedelta(seconds=timeout_s), mesh[axis].get_group())
    return mesh


def _shard(
    model: TrainedLlama,
    mesh: DeviceMesh,
    layout: Layout,
    options: GpuOptions,
    compute: torch.dtype,
    master: torch.dtype,
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    over = mesh["dp_replicate", "dp_shard"] if layout.replicas > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master)
    *others, last = model.model.layers
    for block in others:
        fully_shard(block, mesh=over, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    fully_shard(last, mesh=over, mp_policy=policy, reshard_after_forward=False)  # backward begins with it
    fully_shard(model, mesh=over, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
