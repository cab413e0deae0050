"""Activation memory of a training pass: bytes by tensor, saved and at the peak, in closed form.

The formulas follow the model's code and are compared with what torch saves in `tests/test_activations.py`. They hold
for attention kernels of linear memory (flash, cuDNN, varlen and torch's CPU kernel) without torch.compile, which saves
less: there they are an upper bound. No torch.

Per token of a block, with D hidden_size, E = n_kv_heads * head_dim, I intermediate_size, H heads:

- "none" saves the two inputs of the norms and their outputs (4 D), queries, keys and values after rotation and the
  attention's output (2 D + 2 E), gate, up and their product (3 I), and in fp32 two norm factors and the H normalizers
  of the softmax;
- "full" saves the block's input (D) and recomputes the rest, one block at a time;
- "selective" saves the input, the attention's output with its normalizers and every other matrix product
  (`SELECTIVE_SAVED_PRODUCTS`), and recomputes the rest, one block at a time.

Tensor parallelism of degree t divides the tensors between a column-wise and a row-wise product (queries, keys, values,
attention output, gate, up, product); sequence parallelism divides the residual stream and the norms' factors too, while
the gathered inputs of the products stay full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lt_model.config import ModelConfig
from lt_model.errors import ModelError

CheckpointingMode = Literal["none", "full", "selective"]
CHECKPOINTING_MODES: tuple[CheckpointingMode, ...] = ("none", "full", "selective")
SELECTIVE_SAVED_PRODUCTS = ("q_proj", "v_proj", "gate_proj", "down_proj")
"""Matrix products whose outputs "selective" saves: every other one in the order of the block."""

_FP32_BYTES = 4  # of the numbers that are fp32 in any compute dtype


def activation_bytes_per_token(
    config: ModelConfig,
    activation_checkpointing: CheckpointingMode = "none",
    *,
    element_bytes: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> Mapping[str, float]:
    """Return bytes per token saved by one block between forward and backward on one device, by tensor.

    Args:
        config: the model.
        activation_checkpointing: what is recomputed.
        element_bytes: bytes of a number in the compute dtype (bf16: 2).
        tp: tensor parallel degree.
        sequence_parallel: whether the residual stream is sharded along the sequence as well.

    Raises:
        ModelError: an unknown `activation_checkpointing`, or numbers below 1.
    """
    if activation_checkpointing not in CHECKPOINTING_MODES:
        raise ModelError(
            f"activation_checkpointing = {activation_checkpointing!r}: not one of {', '.join(CHECKPOINTING_MODES)}"
        )
    if element_bytes < 1 or tp < 1:
        raise ModelError(f"element_bytes = {element_bytes} and tp = {tp}: must both be at least 1")
    width, inner = config.hidden_size * element_bytes, config.intermediate_size * element_bytes / tp
    heads, kv = width / tp, config.n_kv_heads * config.head_dim * element_bytes / tp
    stream = width / tp if sequence_parallel else width
    factor = _FP32_BYTES / tp if sequence_parallel else _FP32_BYTES
    attention = {"attention output": heads, "softmax normalizers": config.n_heads * _FP32_BYTES / tp}
    if activation_checkpointing == "full":
        return {"input": stream}
    if activation_checkpointing == "selective":
        products = {
            "q_proj": heads,
            "k_proj": kv,
            "v_proj": kv,
            "o_proj": width,
            "gate_proj": inner,
            "up_proj": inner,
            "down_proj": width,
        }
        return {"input": stream, **attention, **{name: products[name] for name in SELECTIVE_SAVED_PRODUCTS}}
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


def block_backward_bytes_per_token(
    config: ModelConfig,
    activation_checkpointing: CheckpointingMode = "none",
    *,
    element_bytes: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes per token that the backward pass of one block holds beyond what was saved.

    The gradient of the residual stream, and in the backward pass of SwiGLU four tensors of the feed-forward's width
    where one that was saved has just been freed; with recomputation also what it recomputes.

    Args:
        config: the model.
        activation_checkpointing: see `activation_bytes_per_token`.
        element_bytes: see there.
        tp: see there.
        sequence_parallel: see there.

    Raises:
        ModelError: see there.
    """
    options = {"element_bytes": element_bytes, "tp": tp, "sequence_parallel": sequence_parallel}
    n_bytes = (config.hidden_size + 3 * config.intermediate_size / tp) * element_bytes
    if activation_checkpointing != "none":
        all_bytes, saved_bytes = (
            sum(activation_bytes_per_token(config, mode, **options).values())
            for mode in ("none", activation_checkpointing)
        )
        n_bytes += all_bytes - min(saved_bytes, all_bytes)
    return n_bytes


def non_block_bytes_per_token(config: ModelConfig, *, element_bytes: int = 2) -> float:
    """Return the bytes per token saved outside the blocks: ids, rotary tables, the last norm's input.

    For `element_bytes` see `activation_bytes_per_token`.
    """
    tables = config.head_dim * element_bytes  # cosines and sines of half a head each
    return 8 + tables + config.hidden_size * element_bytes + _FP32_BYTES


def loss_chunk_tokens(vocab_size: int) -> int:
    """Return the tokens of a chunk of the loss on a device other than a CPU, unless there are fewer."""
    return max(1024, (1 << 27) // vocab_size // 128 * 128)


def loss_bytes(
    config: ModelConfig, n_tokens: int, *, element_bytes: int = 2, chunk_tokens: int = 0, tp: int = 1
) -> Mapping[str, float]:
    """Return the bytes that the chunked loss holds at its peak, in the forward pass, by part.

    Args:
        config: the model.
        n_tokens: tokens of the micro-batch.
        element_bytes: see `activation_bytes_per_token`.
        chunk_tokens: tokens of a chunk; 0: `loss_chunk_tokens`.
        tp: tensor parallel degree by which the vocabulary is divided.

    Returns:
        "hidden states": the input and its gradient; "gradient of the head": in the compute dtype and, if it is summed
        over several chunks, in fp32 or wider; "logits": of one chunk, in both dtypes.
    """
    chunk_tokens = min(n_tokens, chunk_tokens or loss_chunk_tokens(config.vocab_size // tp))
    wide = max(_FP32_BYTES, element_bytes)
    vocab, both = config.vocab_size / tp, wide + (element_bytes if element_bytes < wide else 0)
    head = both if chunk_tokens < n_tokens else element_bytes
    return {
        "hidden states": 2 * n_tokens * config.hidden_size * element_bytes,
        "gradient of the head": vocab * config.hidden_size * head,
        "logits": chunk_tokens * vocab * both,
    }
