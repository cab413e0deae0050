"""Losses that balance the load of experts, added in the backward pass, and the load itself.

Of a layer and a micro-step, over the tokens with a label of all ranks that have other tokens of it (dp_replicate,
dp_shard, cp, with expert parallelism tp): f_e is the share of tokens that expert e computes, which add up to K, and P_e
its mean score. The auxiliary loss is E / K * sum(f * P), 1 where all experts have the same (Switch Transformers,
arXiv:2101.03961), through whose P gradients flow; the sequence-wise one is the mean over rows of the same within each
row, whose tokens these ranks share (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20; a row is a sequence, whatever
its documents, as in Megatron-LM); the z-loss is the mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906). A step adds
them over layers, as means over its micro-batches. So the rows of a micro-step are part of what is trained.

The default weight is three times Switch's. In 300 steps of tiny-30m-a9m on 1,024 tokens of Python's library (bfloat16,
lr 2e-3, one seed) busiest over mean expert, as the mean over the last 50 steps, was 1.33 to 1.44 in its layers. In a
smaller shape the worst layer had 1.64 with 0.01, 1.46 with 0.03, 1.38 with 0.1. No expert was without tokens then; all
passed through 3 to 4 while the learning rate rose. With four micro-batches instead of one, f of the micro-batches of a
step so far balanced as f of each (1.41, 1.42): it is not offered, as recomputation would count twice.

All enter at the weights of the choice (`_AddLosses`, as in Megatron-LM): stages, recomputation and loss know nothing of
it. The load goes the same way, as the gradient of a tensor of its own: autograd adds it up over micro-batches, and
neither a second forward pass nor validation counts.

Cost: one all-reduce of E numbers per layer and micro-batch, one of all layers' per step; with cp the sequence-wise loss
has another of B * E.

Shapes: B rows of a rank, N of its tokens, E experts, K experts per token, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_model.feed_forward import MoE, Router
from lt_model.loss import IGNORE_INDEX
from lt_trainer.config.sections import MoeOptions
from lt_trainer_gpu.computation import Computation
from lt_trainer_gpu.model import DecoderStage
from lt_trainer_gpu.module_class import exchange_class
from lt_trainer_gpu.tensor_parallel import PartialGradRouter

_ops = torch.ops._c10d_functional


@dataclass(kw_only=True)
class Balance:
    """What the routers of a stage share.

    Attributes:
        options: coefficients of the losses.
        group_names: process groups over which a micro-step's tokens are spread.
        row_group_names: those of them over which the tokens of a row are.
        n_row_groups: groups of ranks that have other rows.
        tp: ranks that compute the same losses.
        sp: parts of a row's positions, of which tensor-parallel ranks route one each.
        sp_rank: this rank's part.
        dtype: of router logits.
        counted_BT1: 1 where a token of the pass that this rank routes has a label, else 0.
        shares_BT1: the same over the micro-batches of the step.
    """

    options: MoeOptions
    group_names: tuple[str, ...] = ()
    row_group_names: tuple[str, ...] = ()
    n_row_groups: int = 1
    tp: int = 1
    sp: int = 1
    sp_rank: int = 0
    dtype: torch.dtype = torch.float32
    counted_BT1: Tensor | None = None
    shares_BT1: Tensor | None = None

    def begin_pass(self, labels_BT: Tensor, n_micro_batches: int) -> None:
        """Take the micro-batch that the next forward or backward pass is of."""
        counted_BT = labels_BT.chunk(self.sp, dim=1)[self.sp_rank] != IGNORE_INDEX
        self.counted_BT1 = counted_BT[..., None].to(self.dtype)
        self.shares_BT1 = self.counted_BT1 / n_micro_batches

    def allocate_loads(self, stage: DecoderStage, computation: Computation) -> None:
        """Make the tensors that collect the load, in the dtype of router logits."""
        self.dtype = torch.promote_types(computation.dtype, torch.float32)
        for router in stage_routers(stage).values():
            assert isinstance(router, BalancedRouter)
            size, device = router.out_features + 1, computation.device
            router.load = torch.zeros(size, dtype=self.dtype, device=device, requires_grad=True)


class BalancedRouter(Router):
    """Router with the losses of `Balance` in training; made by `apply_balancing`.

    Attributes:
        balance: what it shares with other routers.
        load: zeros, whose gradient is this rank's tokens per expert of the step, and the auxiliary loss / (E K).
    """

    balance: Balance
    load: Tensor

    def choose(self, x_ND: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what a router does."""
        weights_NK, experts_NK, scores_NE, logits_NE = super().choose(x_ND, weight_ED)
        if not self.training:
            return weights_NK, experts_NK, scores_NE, logits_NE
        balance, options = self.balance, self.balance.options
        assert balance.counted_BT1 is not None
        assert balance.shares_BT1 is not None
        n_rows, n_experts, top_k = len(balance.counted_BT1), logits_NE.shape[1], experts_NK.shape[1]
        experts_BTK = experts_NK.view(n_rows, -1, top_k)
        counts_BEK = torch.zeros(n_rows, n_experts, top_k, dtype=logits_NE.dtype, device=x_ND.device)
        counts_BEK.scatter_add_(1, experts_BTK, balance.counted_BT1.expand_as(experts_BTK))
        counts_E = counts_BEK.sum(dim=(0, 2))
        total_E = _all_reduce(counts_E, balance.group_names)
        n_choices = total_E.sum().clamp(min=top_k)
        if not self.is_softmax:  # whose sum is 1
            scores_NE = scores_NE / scores_NE.sum(dim=-1, keepdim=True)
        scores_BE = (scores_NE.view(n_rows, -1, n_experts) * balance.shares_BT1).sum(dim=1)
        aux_loss = (total_E / n_choices / n_choices * scores_BE).sum()
        losses = [(options.aux_loss * n_experts * top_k, aux_loss)]
        if options.router_z_loss:
            squares_N1 = logits_NE.logsumexp(dim=-1, keepdim=True).square()
            losses.append(
                (options.router_z_loss * top_k, (squares_N1 * balance.shares_BT1.flatten(0, 1)).sum() / n_choices)
            )
        if options.sequence_aux_loss:
            row_totals_BE = _all_reduce(counts_BEK.sum(dim=2), balance.row_group_names)
            n_choices_B1 = row_totals_BE.sum(dim=1, keepdim=True).clamp(min=top_k)
            products = (row_totals_BE / n_choices_B1 * scores_BE / n_choices_B1).sum()
            coefficient = options.sequence_aux_loss * n_experts * top_k / (n_rows * balance.n_row_groups)
            losses.append((coefficient, products))
        coefficients, values = zip(*losses, strict=True)
        load = torch.cat((counts_E, aux_loss.detach()[None]))
        coefficients = tuple(one / balance.tp for one in coefficients)
        weights_NK = _AddLosses.apply(weights_NK, self.load, load, coefficients, *values)
        return weights_NK, experts_NK, scores_NE, logits_NE


class BalancedPartialGradRouter(BalancedRouter, PartialGradRouter):
    """The same on tensor-parallel ranks."""


def _all_reduce(counts: Tensor, group_names: tuple[str, ...]) -> Tensor:
    for name in group_names:
        counts = _ops.wait_tensor(_ops.all_reduce(counts, "sum", name))
    return counts


class _AddLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights_NK: Tensor, place: Tensor, load: Tensor, coefficients: tuple[float, ...], *losses: Tensor
    ) -> Tensor:
        ctx.save_for_backward(load)
        ctx.coefficients = coefficients
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (load,) = ctx.saved_tensors
        return upstream, load, None, None, *(load.new_full((), one) for one in ctx.coefficients)


def apply_balancing(stage: DecoderStage, balance: Balance) -> None:
    """Let the routers of a stage balance their experts, in place; call after tensor parallelism."""
    stage.balance = balance
    for router in stage_routers(stage).values():
        is_partial = isinstance(router, PartialGradRouter)
        exchange_class(router, BalancedPartialGradRouter if is_partial else BalancedRouter)
        assert isinstance(router, BalancedRouter)
        router.balance = balance


def stage_routers(stage: DecoderStage) -> dict[int, Router]:
    """Return the routers of a stage by layer."""
    blocks = zip(stage.layers, stage.blocks, strict=True)
    return {index: block.mlp.gate for index, block in blocks if isinstance(block.mlp, MoE)}


def pop_load(stages: Sequence[DecoderStage], tp: int) -> Tensor:
    """Return tokens per expert and the auxiliary loss [L, E + 1] of the step, equal on all ranks, and begin anew.

    Collective. Layers without experts have zeros.
    """
    config, device = stages[0].config, next(stages[0].parameters()).device
    load_LE = torch.zeros(config.n_layers, config.n_experts + 1, device=device)
    for stage in stages:
        for index, router in stage_routers(stage).items():
            assert isinstance(router, BalancedRouter)
            assert router.load.grad is not None
            load_LE[index] = router.load.grad
            router.load.grad = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(load_LE)
    load_LE[:, -1] *= config.n_experts * config.experts_per_token
    return load_LE / tp


@torch.no_grad()
def move_selection_biases(stages: Sequence[DecoderStage], load_LE: Tensor, rate: float, finite: Tensor) -> None:
    """Raise the bias of each expert with fewer tokens than the mean by `rate`, lower that of others; their mean stays.

    As in DeepSeek-V3 (arXiv:2412.19437), which moves by 0.001 for batches of millions of tokens. Alone, in 300 steps of
    1,024 tokens, that leaves busiest over mean expert of 50 steps together at 1.84 in the worst of four layers, 0.01 at
    1.07; moves in proportion to the lack (rates 0.003, 0.01) at 1.26 and 1.08. Of a single step it is 1.3 to 1.4,
    probably by the text of its rows. In a step that is skipped, as `finite` says on the device, nothing moves.
    """
    for index, router in ((index, router) for stage in stages for index, router in stage_routers(stage).items()):
        bias_E, counts_E = router.e_score_correction_bias, load_LE[index, :-1]
        if bias_E is not None:
            moves_E = rate * (counts_E.mean() - counts_E).sign()
            bias_E += torch.where(finite, moves_E - moves_E.mean(), 0)
