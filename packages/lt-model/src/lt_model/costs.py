"""Parameters and FLOPs per token in two conventions of a decoder, in closed form.

A training step reads each weight of a matrix product once forward (2 FLOPs per weight and token) and twice backward,
hence 6 FLOPs per parameter and token. Attention scores and their product with the values add 12 * n_layers * D * T
per token with D = n_heads * head width and T = seq_len ("full": PaLM, appendix B, arXiv:2204.02311; also nanoGPT,
Megatron), or half of it when only the causal triangle is counted ("causal"). In a layer with a window w < T, a token
sees w keys ("full") or w - w^2 / 2T ("causal") in place of T or T / 2. These are model FLOPs, as in MFU; recomputed
ones, which HFU adds, are counted apart.
"""

from __future__ import annotations

from typing import Literal

from lt_model.activation_memory import CheckpointingMode
from lt_model.config import ModelConfig, check_size
from lt_model.errors import ModelError
from lt_model.params import NORM_NAMES, PRODUCTS, ParamSpec, param_specs

FlopsConvention = Literal["full", "causal"]
FLOPS_CONVENTIONS: tuple[FlopsConvention, ...] = ("full", "causal")


def n_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(parameter.numel for parameter in param_specs(config) if parameter.is_trained)


def n_compute_parameters(config: ModelConfig) -> int:
    """Return the number of parameters multiplied per token: all but the input embedding, with the head.

    Of experts it has those that compute a token.
    """
    embedding = config.vocab_size * config.hidden_size
    active = sum(active_numel(row, config) for row in param_specs(config))
    return active - (0 if config.tie_word_embeddings else embedding)


def active_numel(row: ParamSpec, config: ModelConfig) -> int:
    """Return the elements of a parameter that a token uses: of experts those of its own."""
    if not row.is_trained:
        return 0
    return row.numel // config.n_experts * config.experts_per_token if row.is_per_expert else row.numel


def flops_per_token(config: ModelConfig, seq_len: int, convention: FlopsConvention = "full") -> int:
    """Return training FLOPs (forward and backward) per token at a sequence length of `seq_len` tokens.

    Args:
        config: the model.
        seq_len: tokens per row; document masks are not subtracted.
        convention: "full" counts the whole attention square, "causal" half of it.

    Raises:
        ModelError: `seq_len` below 1 or absurdly large, or an unknown convention.
    """
    check_size("seq_len", seq_len)
    if convention not in FLOPS_CONVENTIONS:
        raise ModelError(f"convention = {convention!r}: not one of {', '.join(FLOPS_CONVENTIONS)}")
    return 6 * n_compute_parameters(config) + attention_flops_per_token(config, seq_len, convention)


def attention_flops_per_token(config: ModelConfig, length: float, convention: FlopsConvention = "full") -> int:
    """Return the training FLOPs of attention per token that attends to `length` positions.

    Args:
        config: the model.
        length: tokens of the row, or of the document where a mask keeps documents apart; a mean, too.
        convention: see `flops_per_token`.
    """
    windows = [min(config.window(index) or length, length) for index in range(config.n_layers)]
    widths = 6 * config.n_heads * (config.head_width + config.head_value_width)
    if convention == "full":
        return round(widths * sum(windows))
    return int(widths * sum(w * (2 * length - w) for w in windows) // (2 * length))


def recomputed_flops_per_token(config: ModelConfig, seq_len: int, activation_checkpointing: CheckpointingMode) -> int:
    """Return FLOPs per token that activation checkpointing recomputes, in the "full" convention.

    "selective" keeps attention and every other matrix product. With "full" torch ends the recomputation once the
    backward pass has all that it needs, which the output of the last product is not. Recomputation inside a flash
    attention kernel's backward pass is never counted.

    Args:
        config: the model.
        seq_len: tokens per row.
        activation_checkpointing: what is recomputed.
    """
    if activation_checkpointing == "none":
        return 0
    is_full = activation_checkpointing == "full"
    ends_with_product = not NORM_NAMES[config.norm_place][-1]
    products = sum(
        active_numel(row, config)
        for row in param_specs(config)
        if row.type in PRODUCTS and not (ends_with_product and row.kind == "down_proj" if is_full else row.is_saved)
    )
    return 2 * products + (attention_flops_per_token(config, seq_len) // 3 if is_full else 0)


def memory_bytes(config: ModelConfig, *, micro_batch_size: int, seq_len: int) -> dict[str, int]:
    """Return the bytes by part that one unsharded process holds in fp32 with AdamW, without the blocks' activations.

    Args:
        config: the model.
        micro_batch_size: rows per forward pass.
        seq_len: tokens per row.

    Returns:
        "params", "grads", "moments" (both of AdamW's), and "logits": those of one micro-batch and their gradient, if
        they were materialized (the loss of `Decoder.forward` holds only a chunk of them).

    Raises:
        ModelError: `micro_batch_size` or `seq_len` below 1 or absurdly large.
    """
    check_size("micro_batch_size", micro_batch_size)
    check_size("seq_len", seq_len)
    n_bytes = 4 * n_parameters(config)
    logits = 8 * micro_batch_size * seq_len * config.vocab_size
    return {"params": n_bytes, "grads": n_bytes, "moments": 2 * n_bytes, "logits": logits}
