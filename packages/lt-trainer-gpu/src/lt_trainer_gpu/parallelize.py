"""Parallelism applied to a model from outside, in one ordered function; the model's code knows nothing of it.

FSDP2 (`fully_shard`) on every block and on the root: each rank keeps its slice of the parameters in the master dtype,
gathers a block's weights in the compute dtype just before use and reduces its gradients in the master dtype right
after. Gradients are summed, never averaged: the loss is already divided by the valid tokens of the whole global batch.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lt_model.llama import Llama


def parallelize(model: Llama, *, mesh: DeviceMesh, compute_dtype: torch.dtype, master_dtype: torch.dtype) -> None:
    """Shard `model` in place over the `dp_shard` axis of `mesh`.

    A world of one rank that computes in the master dtype has nothing to gather, to reduce or to cast, and is left as
    it is.
    """
    if mesh.size() == 1 and compute_dtype == master_dtype:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
