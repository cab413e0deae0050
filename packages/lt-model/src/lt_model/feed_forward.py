"""Feed-forward layers: one for all tokens, or a mixture of experts.

A router scores the experts for each token in fp32 or wider; the token is computed by the `experts_per_token` best ones,
whatever the load: none is dropped. Rows are sorted by expert, multiplied by the stacked weights [E, out, in] in one
grouped product each (`grouped_product`), and returned by the inverse permutation to [N, K, D], where they are weighted
and summed in fp32 or wider: one rounding, no atomics, and the same order wherever the experts are.

Cost: per token the products of K experts and of the router; memory of K rows per token where the feed-forward layer
has one. Without float64 and from torch 2.10 on there is no wait for the host, and a block compiles as one graph.

Shapes: B batch, T tokens, N = B * T, D hidden_size, E experts, K experts per token, R = N * K rows, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_model.config import ModelConfig
from lt_model.grouped_product import grouped_product
from lt_model.shared_input import apply_to_shared_input
from lt_model.swiglu import swiglu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


CLAMPED_SLOPE = 1.702
"""Factor within the sigmoid of the clamped activation."""


def _activate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up) if name == "silu" else ACTIVATIONS[name](gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return gate sigmoid(1.702 gate) (up + 1), where gates are at most `limit` and ups within it (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)


class MLP(nn.Module):
    """Feed-forward layer: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.activation = config.activation
        if config.gated:
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.is_gated = config.gated

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward output, of the shape of x."""
        if not self.is_gated:
            return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))
        return self.down_proj(_activate(self.activation, *apply_to_shared_input(x, self.gate_proj, self.up_proj)))


class Router(nn.Linear):
    """Scores of the experts, and the choice of some for each token."""

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.n_experts, bias=config.expert_bias)
        self.top_k, self.normalize, self.scale = config.experts_per_token, config.normalize_top_k, config.expert_scale
        self.is_softmax = config.router_score == "softmax"
        self.n_groups, self.top_groups = config.n_groups, config.top_groups
        bias = torch.zeros(config.n_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return weights [N, K], experts [N, K], scores and logits [N, E], in fp32 or wider."""
        return self.choose(x_ND, self.weight)

    def choose(self, x_ND: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what `forward` does, with the weight given."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits_NE = F.linear(x_ND.to(wide), weight_ED.to(wide), bias)
        scores_NE = logits_NE.softmax(dim=-1) if self.is_softmax else logits_NE.sigmoid()
        if self.e_score_correction_bias is None and self.n_groups == 1:
            weights_NK, experts_NK = scores_NE.topk(self.top_k, dim=-1)
        else:
            experts_NK = self._select(scores_NE.detach())
            weights_NK = scores_NE.gather(1, experts_NK)
        if self.normalize:
            sums_N1 = weights_NK.sum(dim=-1, keepdim=True)
            weights_NK = weights_NK / (sums_N1 if self.is_softmax else sums_N1 + 1e-20)  # sigmoids may all be 0
        return weights_NK if self.scale == 1 else weights_NK * self.scale, experts_NK, scores_NE, logits_NE

    def _select(self, scores_NE: Tensor) -> Tensor:
        """Return the experts [N, K] with the largest scores, their bias added, of the best groups."""
        bias = self.e_score_correction_bias
        choice_NE = scores_NE if bias is None else scores_NE + bias
        if self.n_groups > 1:
            choice = choice_NE.unflatten(1, (self.n_groups, -1))
            groups = choice.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices
            is_closed = torch.ones(choice.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, groups, False)
            choice_NE = choice.masked_fill(is_closed[..., None], float("-inf")).flatten(1)
        return choice_NE.topk(self.top_k, dim=-1).indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weight; the selection bias stays in fp32, where steps of 0.001 count."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(moved.device)
        return self


class Experts(nn.Module):
    """Weights of all experts, stacked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation, self.limit, self.has_bias = config.activation, config.glu_limit, config.expert_bias
        n, hidden, inner = config.n_experts, config.hidden_size, config.expert_size
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            weight = torch.empty(n, *shape)
            self.register_parameter(
                f"{name}_proj", nn.Parameter(weight if weight.is_meta else nn.init.normal_(weight, std=0.02))
            )
            if self.has_bias:
                self.register_parameter(f"{name}_proj_bias", nn.Parameter(torch.zeros(n, shape[0])))

    def forward(self, rows_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the experts' outputs [R, D]; the rows of expert e end before `ends_E[e]` (int32)."""
        gate, up = (self._product(rows_RD, name, ends_E) for name in ("gate_proj", "up_proj"))
        inner = clamped_swiglu(gate, up, self.limit) if self.limit else _activate(self.activation, gate, up)
        return self._product(inner, "down_proj", ends_E)

    def _product(self, rows_RD: Tensor, name: str, ends_E: Tensor) -> Tensor:
        out_RF = grouped_product(rows_RD, getattr(self, name), ends_E)
        if not self.has_bias:
            return out_RF
        counts_E, bias_EF = ends_E.diff(prepend=ends_E.new_zeros(1)), getattr(self, f"{name}_bias")
        return out_RF + bias_EF.repeat_interleave(counts_E, dim=0, output_size=len(out_RF))


class MoE(nn.Module):
    """Mixture of experts, with a shared one that computes every token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config, config.shared_expert_size) if config.shared_expert_size else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs of each token's experts, weighted and summed, [B, T, D]."""
        x_ND = x_BTD.flatten(0, -2)
        weights_NK, experts_NK, *_ = self.gate(x_ND)
        n_copies = experts_NK.shape[1]
        # A radix sort passes once over each byte of a number.
        sorted_R, order_R = experts_NK.flatten().to(torch.int16).sort(stable=True)
        places_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        every_expert = torch.arange(self.gate.out_features, dtype=torch.int16, device=order_R.device)
        ends_E = torch.searchsorted(sorted_R, every_expert, right=True, out_int32=True)
        out_RD = self.experts(TakeRows.apply(x_ND, order_R, places_R, n_copies), ends_E)
        out_NKD = TakeRows.apply(out_RD, places_R, order_R, 1).unflatten(0, (-1, n_copies))
        out_ND = _weighted_sum(out_NKD.to(weights_NK.dtype), weights_NK).to(x_ND.dtype)
        if self.shared_experts is not None:
            shared_BTD = self.shared_experts(x_BTD)
            if self.shared_expert_gate is not None:
                shared_BTD = shared_BTD * self.shared_expert_gate(x_BTD).sigmoid()
            return out_ND.view_as(x_BTD) + shared_BTD
        return out_ND.view_as(x_BTD)


def _weighted_sum(x_NKD: Tensor, weights_NK: Tensor) -> Tensor:
    if x_NKD.is_cpu:
        return torch.bmm(weights_NK[:, None], x_NKD)[:, 0]  # in half the time
    return (x_NKD * weights_NK[..., None]).sum(dim=1)


class TakeRows(torch.autograd.Function):
    """Rows of `n_copies` adjacent copies of each row of x, in another order; no atomics in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, n_copies: int) -> Tensor:
        """Return the copies numbered by `order`, of which `places` is the inverse."""
        ctx.save_for_backward(places)
        ctx.n_copies = n_copies
        return x.index_select(0, order // n_copies if n_copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of x: sums over the copies."""
        (places,) = ctx.saved_tensors
        rows = upstream.index_select(0, places)
        return rows if ctx.n_copies == 1 else rows.unflatten(0, (-1, ctx.n_copies)).sum(dim=1), None, None, None
