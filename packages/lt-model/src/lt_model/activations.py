"""What one training pass keeps for its backward pass and holds while it runs: bytes by part, in closed form, no torch.

The formulas follow the model's code and are compared with what torch really keeps in `tests/test_activations.py`. They
hold for attention kernels of linear memory (flash, cuDNN, varlen and torch's CPU kernel), without torch.compile, which
keeps less: take them for an upper bound there.

Per token of a block, with D hidden_size, E = n_kv_heads * head_dim, I intermediate_size, H heads:

- "none" keeps the two inputs of the norms and their outputs (4 D), queries, keys and values after rotation and the
  attention's output (2 D + 2 E), gate, up and their product (3 I), and in fp32 two norm factors and the H normalisers
  of the softmax;
- "full" keeps the block's input (D) and computes the rest again, one block at a time;
- "selective" keeps the input, the attention's output with its normalisers and every other matrix product
  (`SELECTIVE`), and computes the rest again, one block at a time.

Tensor parallelism of degree t divides what lies between a column-wise and a row-wise product (queries, keys, values,
attention output, gate, up, product); sequence parallelism divides the residual stream and the norms' factors too, while
the gathered inputs of the products stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lt_model.config import LlamaConfig
from lt_model.errors import ModelError

Checkpointing = Literal["none", "full", "selective"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full", "selective")
SELECTIVE = ("q_proj", "v_proj", "gate_proj", "down_proj")
"""The products whose outputs "selective" keeps: every other one in the order in which a block does them."""

_WIDE = 4  # bytes of the fp32 numbers beside the compute dtype


def kept_per_token(
    config: LlamaConfig,
    checkpointing: Checkpointing = "none",
    *,
    element_bytes: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> Mapping[str, float]:
    """Return the bytes per token that one block keeps between forward and backward on one device, by tensor.

    Args:
        config: the model.
        checkpointing: what is computed again.
        element_bytes: bytes of a number in the compute dtype (bf16: 2).
        tp: tensor parallel degree.
        sequence_parallel: whether the residual stream is split along the sequence, too.

    Raises:
        ModelError: an unknown `checkpointing`, or numbers below 1.
    """
    if checkpointing not in CHECKPOINTING:
        raise ModelError(f"checkpointing = {checkpointing!r} is not one of {', '.join(CHECKPOINTING)}")
    if element_bytes < 1 or tp < 1:
        raise ModelError(f"element_bytes = {element_bytes} and tp = {tp} must both be at least 1")
    width, inner = config.hidden_size * element_bytes, config.intermediate_size * element_bytes / tp
    heads, kv = width / tp, config.n_kv_heads * config.head_dim * element_bytes / tp
    stream = width / tp if sequence_parallel else width
    factor = _WIDE / tp if sequence_parallel else _WIDE
    attention = {"attention output": heads, "softmax normalisers": config.n_heads * _WIDE / tp}
    if checkpointing == "full":
        return {"input": stream}
    if checkpointing == "selective":
        products = {
            "q_proj": heads,
            "k_proj": kv,
            "v_proj": kv,
            "o_proj": width,
            "gate_proj": inner,
            "up_proj": inner,
            "down_proj": width,
        }
        return {"input": stream, **attention, **{name: products[name] for name in SELECTIVE}}
    return {
        "input": stream,
        "first norm": width + factor,
        "queries": heads,
        "keys": kv,
        "values": kv,
        **attention,
        "stream between": stream,
        "second norm": width + factor,
        "gate": inner,
        "up": inner,
        "product": inner,
    }


def block_backward_per_token(
    config: LlamaConfig,
    checkpointing: Checkpointing = "none",
    *,
    element_bytes: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes per token that the backward pass of one block holds beyond what is kept.

    The gradient of the stream, and in the backward pass of SwiGLU four tensors of the feed-forward's width where one
    that was kept has just gone; with recomputation also what it brings back.

    Args:
        config: the model.
        checkpointing: as in `kept_per_token`, like the others.
        element_bytes: as there.
        tp: as there.
        sequence_parallel: as there.

    Raises:
        ModelError: as there.
    """
    options = {"element_bytes": element_bytes, "tp": tp, "sequence_parallel": sequence_parallel}
    held = (config.hidden_size + 3 * config.intermediate_size / tp) * element_bytes
    if checkpointing != "none":
        whole, kept = (sum(kept_per_token(config, mode, **options).values()) for mode in ("none", checkpointing))
        held += whole - min(kept, whole)
    return held


def outer_per_token(config: LlamaConfig, *, element_bytes: int = 2) -> float:
    """Return the bytes per token kept outside the blocks: ids, rotary tables, the last norm's input.

    `element_bytes` is as in `kept_per_token`.
    """
    tables = config.head_dim * element_bytes  # cosines and sines of half a head each
    return 8 + tables + config.hidden_size * element_bytes + _WIDE


def chunk_rows(vocab_size: int) -> int:
    """Return how many tokens' logits the loss holds at a time on a device that is not a CPU, if there are so many."""
    return max(1024, (1 << 27) // vocab_size // 128 * 128)


def loss_bytes(
    config: LlamaConfig, n_tokens: int, *, element_bytes: int = 2, rows: int | None = None, tp: int = 1
) -> Mapping[str, float]:
    """Return the bytes that the chunked loss holds at its peak, which lies in the forward pass, by part.

    Args:
        config: the model.
        n_tokens: tokens of the micro-batch.
        element_bytes: as in `kept_per_token`.
        rows: tokens of a chunk; `chunk_rows` when absent.
        tp: tensor parallel degree by which the vocabulary is divided.

    Returns:
        "hidden states": those that go in, their gradient; "gradient of the head": in fp32 or wider as it is summed up,
        and beside it in the compute dtype; "logits": of one chunk, in both dtypes.
    """
    rows = min(n_tokens, chunk_rows(config.vocab_size // tp) if rows is None else rows)
    wide = max(_WIDE, element_bytes)
    vocab, both = config.vocab_size / tp, wide + (element_bytes if element_bytes < wide else 0)
    return {
        "hidden states": 2 * n_tokens * config.hidden_size * element_bytes,
        "gradient of the head": vocab * config.hidden_size * both,
        "logits": rows * vocab * both,
    }
