"""Global shape and offset of this rank's parameter shards, for checkpoints and initialization."""

from __future__ import annotations

from torch import Tensor

from lt_model import ParamSpec
from lt_trainer.torch import LocalShard, local_slice
from lt_trainer_gpu.mesh_layout import MeshLayout


def parameter_shard(parameter: ParamSpec, tensor: Tensor, mesh_layout: MeshLayout) -> LocalShard:
    """Return the position of this rank's `tensor` within `parameter`.

    Args:
        parameter: the unsharded parameter, a row of the parameter table.
        tensor: plain, or sharded by FSDP: then its offset is relative to the part that FSDP shards.
        mesh_layout: this rank's coordinates.
    """
    local, offset = local_slice(tensor)
    offset = tuple(at + first for at, first in zip(offset, mesh_layout.part_of(parameter)[0], strict=True))
    n_replicas, replica_index = mesh_layout.replica_count_and_index(parameter)
    return LocalShard(
        local=local.detach(), shape=parameter.shape, offset=offset, n_replicas=n_replicas, replica_index=replica_index
    )
