"""Which part of each whole parameter this rank holds, as checkpoints and initial weights need to know it."""

from __future__ import annotations

from torch import Tensor

from lt_model import Parameter
from lt_trainer.torch import Part, local_part
from lt_trainer_gpu.layout import Layout


def part_of(parameter: Parameter, tensor: Tensor, layout: Layout) -> Part:
    """The part that `tensor`, one of this rank's model, is of `parameter`.

    Args:
        parameter: the whole, a row of the parameter table.
        tensor: plain, or sharded by FSDP: then its offset is that within what tensor parallelism has left.
        layout: this rank's place.
    """
    local, offset = local_part(tensor)
    if layout.tp > 1 and parameter.tp_dim is not None:
        first, _ = layout.tp_span(parameter)
        offset = tuple(at + first * (dim == parameter.tp_dim) for dim, at in enumerate(offset))
    copies, copy = layout.copies(parameter)
    return Part(local=local.detach(), shape=parameter.shape, offset=offset, copies=copies, copy=copy)
