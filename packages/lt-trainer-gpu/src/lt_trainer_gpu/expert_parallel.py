"""Expert parallelism applied from outside: each rank has some whole experts, and rows travel to theirs and back.

A rank routes its own tokens and sorts their rows by expert, so those for a rank are together. The ranks tell each other
how many (one all-to-all of E numbers), the host reads how much to send and to expect, the only wait of a layer, and an
all-to-all takes the rows to the ranks of their experts. There they are put in the order of the experts, multiplied, put
back, and a second one returns them. Weights of the choice do not travel: each rank weights and sums the
outputs of its own tokens, in the order of one process. No row is dropped; a rank computes as many as it is sent.

An expert's gradient is of the tokens of all ep ranks, so it is summed over the ranks that hold the same expert alone
(dp_replicate and FSDP).

Cost: two all-to-alls of R rows forward, two backward; a recomputed forward pass waits for the host again.

Shapes: S ranks of the group, E experts, L = E / S experts of a rank, R rows of a rank's tokens, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lt_model.feed_forward import Experts, MoE, TakeRows
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage, stage_param_specs
from lt_trainer_gpu.module_class import exchange_class

_ops = torch.ops._c10d_functional


class ExpertParallelExperts(Experts):
    """This rank's experts, which compute the rows of all ranks of the group.

    Attributes:
        group_name: name of the process group.
        group_size: number of its ranks.
    """

    group_name: str
    group_size: int

    def __call__(self, rows_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Return what `forward` does; its FSDP hooks are those of `compute_block`."""
        return self.forward(rows_RD, ends_E)

    def compute_block(self, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return `forward(*args)`, a block's with these experts; FSDP gathers them before and frees them after.

        So its hooks are outside what is compiled and recomputed.
        """
        return forward(*args)

    def forward(self, rows_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Return what `Experts` does, of rows and experts of all ranks."""
        size, name = self.group_size, self.group_name
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        each = [len(counts_E) // size] * size
        received_SL = _all_to_all(counts_E, each, each, name).view(size, -1)
        sent, received = split_sizes(counts_E.view(size, -1), received_SL, len(rows_RD))
        rows = _Exchange.apply(rows_RD, received, sent, name)
        order, places = expert_order(received_SL, len(rows))
        ends_L = received_SL.sum(dim=0).cumsum(dim=0, dtype=torch.int32)
        out = super().forward(TakeRows.apply(rows, order, places, 1), ends_L)
        return _Exchange.apply(TakeRows.apply(out, places, order, 1), sent, received, name)


def split_sizes(sent_SL: Tensor, received_SL: Tensor, n_rows: int) -> tuple[list[int], list[int]]:
    """Return how many of `n_rows` rows are for each rank, and how many come from each; waits for the device."""
    sent, received = torch.stack((sent_SL, received_SL)).sum(dim=-1).tolist()
    assert sum(sent) == n_rows
    return sent, received


def expert_order(received_SL: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation from the order of source ranks to that of experts, and its inverse."""
    by_source, by_expert = received_SL.flatten(), received_SL.T.flatten()
    starts_SL = (by_source.cumsum(0) - by_source).view_as(received_SL)
    shift_SL = (by_expert.cumsum(0) - by_expert).view_as(received_SL.T).T - starts_SL
    rows = torch.arange(n_rows, device=received_SL.device)
    places = rows + shift_SL.flatten().repeat_interleave(by_source, output_size=n_rows)
    return rows - shift_SL.T.flatten().repeat_interleave(by_expert, output_size=n_rows), places


def apply_expert_parallel(stage: DecoderStage, mesh_layout: MeshLayout, group_name: str) -> None:
    """Replace the experts of a stage (on the meta device) by this rank's, in place."""
    specs = stage_param_specs(stage)
    for name, module in stage.named_modules():
        if not isinstance(module, MoE):
            continue
        experts = module.experts
        for attribute, full in experts.named_parameters():
            _, shape = mesh_layout.part_of(specs[f"{name}.experts.{attribute}"])
            setattr(experts, attribute, nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta")))
        exchange_class(experts, ExpertParallelExperts)
        assert isinstance(experts, ExpertParallelExperts)
        experts.group_name, experts.group_size = group_name, mesh_layout.ep


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group_name))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
        ctx.splits = sent, received, group_name
        return _all_to_all(x, received, sent, group_name)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(upstream, *ctx.splits), None, None, None
