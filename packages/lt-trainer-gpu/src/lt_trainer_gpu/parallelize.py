"""Parallelism applied to a model from outside, in one ordered function; the model's code knows nothing of it.

FSDP2 (`fully_shard`) on every block and on the root: each rank keeps its slice of the parameters in the master dtype,
gathers a block's weights in the compute dtype just before use and reduces its gradients in the master dtype after.
Gradients are summed, never averaged: the loss is already divided by the valid tokens of the whole global batch.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lt_model.llama import Llama


def parallelize(model: Llama, *, device_type: str, ranks: int, compute: torch.dtype, master: torch.dtype) -> None:
    """Shard `model` in place over all ranks.

    Args:
        model: on the meta device, in the master dtype.
        device_type: "cuda" or "cpu".
        ranks: how many ranks share one copy of the weights; with 1 only the dtypes are taken care of.
        compute: dtype of forward and backward.
        master: dtype of the sharded weights, of the gradients' reduction and of the optimizer.
    """
    mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
