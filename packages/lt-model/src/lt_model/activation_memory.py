"""Activation memory of a training pass: bytes by tensor, saved and at the peak, in closed form.

The formulas follow the model's code and are compared with what torch saves in `tests/test_activations.py`. They hold
for attention kernels of linear memory (flash, cuDNN, varlen and torch's CPU kernel) without torch.compile, which saves
less: there they are an upper bound. No torch.

Per token of a block of a Llama, with D hidden_size, E = n_kv_heads * head width, I intermediate_size, H heads:

- "none" saves the two inputs of the norms and their outputs (4 D), queries, keys and values after rotation and the
  attention's output (2 D + 2 E), gate, up and their product (3 I), and in fp32 two norm factors and the H normalizers
  of the softmax; other families: each norm of the stream D more, norms of queries and keys their inputs, a norm with
  1 + w as much again, an activation other than SwiGLU its output, latent attention its latents;
- "full" saves the block's input (D) and recomputes the rest, one block at a time;
- "selective" saves the input, the attention's output with its normalizers and every other matrix product (`is_saved`
  in the parameter table), and recomputes the rest, one block at a time.

Tensor parallelism of degree t divides the tensors between a column-wise and a row-wise product (queries, keys, values,
attention output, gate, up, product); sequence parallelism divides the residual stream and the norms' factors too, while
the gathered inputs of the products stay full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lt_model.config import ModelConfig
from lt_model.params import NORM_NAMES, param_specs

CheckpointingMode = Literal["none", "full", "selective"]

_FP32_BYTES = 4  # of the numbers that are fp32 in any compute dtype


def activation_bytes_per_token(
    config: ModelConfig,
    activation_checkpointing: CheckpointingMode = "none",
    *,
    element_bytes: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
    layer: int | None = None,
) -> Mapping[str, float]:
    """Return bytes per token saved by one block between forward and backward on one device, by tensor.

    Args:
        config: the model.
        activation_checkpointing: what is recomputed.
        element_bytes: bytes of a number in the compute dtype (bf16: 2).
        tp: tensor parallel degree.
        sequence_parallel: whether the residual stream is sharded along the sequence as well.
        layer: the block; by default one with experts, if some have them, as it has the most bytes.
    """
    layer = _representative(config) if layer is None else layer
    has_experts = config.layer(layer).experts
    width, inner = config.hidden_size * element_bytes, _inner_size(config, layer) * element_bytes / tp
    heads = config.n_heads * config.head_width * element_bytes / tp
    kv = config.n_kv_heads * config.head_width * element_bytes / tp
    outputs = config.n_heads * config.head_value_width * element_bytes / tp
    stream = width / tp if sequence_parallel else width
    factor = (_FP32_BYTES / tp if sequence_parallel else _FP32_BYTES) * (2 if config.norm == "layer" else 1)
    attention = {"attention output": outputs, "softmax normalizers": config.n_heads * _FP32_BYTES / tp}
    if activation_checkpointing == "full":
        return {"input": stream}
    if activation_checkpointing == "selective":
        products = {
            row.kind: row.shape[-2] * element_bytes / (tp if row.tp_dim == len(row.shape) - 2 else 1)
            for row in param_specs(config)
            if row.layer == layer and row.is_saved and row.type == "matrix"
        }
        n_copies = config.experts_per_token if has_experts else 0
        products |= {"experts": n_copies * (config.expert_size / tp + config.hidden_size) * element_bytes}  # gate, down
        if config.attention_softcap:  # "flex" is compiled as a whole, so that its outputs are not seen
            attention = {}
        return {"input": stream, **attention, **products, "choice of experts": 28 * n_copies}
    names = ("first norm", "norm after attention", "second norm", "norm after the feed-forward layer")
    n_copies, has_norm = _normed_copies(config), NORM_NAMES[config.norm_place]
    # Before a product its output, which is gathered; after it its input.
    sizes = (width + (n_copies - 1) * stream, n_copies * stream) * 2
    norms = {name: size + factor for name, size, is_there in zip(names, sizes, has_norm, strict=True) if is_there}
    # Over all heads, of which a rank has a part, a norm is computed in fp32 step by step, and two steps are kept.
    qk_copies = 2 * _FP32_BYTES / element_bytes if config.qk_norm == "full" and tp > 1 else n_copies
    return {
        "input": stream if has_norm[0] else width,
        **norms,
        "queries": heads,
        "keys": kv,
        "values": outputs + config.n_heads * config.nope_width * element_bytes / tp if config.kv_rank else kv,
        **({"latents": _latent_bytes(config, element_bytes)} if config.kv_rank else {}),
        **({"norms of queries and keys": qk_copies * (heads + kv)} if config.qk_norm != "none" else {}),
        **attention,
        **({} if config.parallel_residual else {"stream between": stream if has_norm[2] else width}),
        **({"gate": inner} if config.gated else {}),
        "up": inner,
        **({"activation": inner} if config.gated and config.activation != "silu" else {}),
        "product": inner,
        **(_mixture_bytes(config, element_bytes) if has_experts else {}),
    }


def _normed_copies(config: ModelConfig) -> int:
    """Return how many tensors of its width a norm saves: of n + n w also n."""
    return 2 if config.norm == "rms_plus_one" else 1


def _latent_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return what latent attention saves of its latents: each before and after its norm, with the shared keys."""
    n_numbers = 2 * (config.q_rank + config.kv_rank) + config.rope_width
    return n_numbers * element_bytes + _FP32_BYTES * (1 + (config.q_rank > 0))


def _representative(config: ModelConfig) -> int:
    """Return the first layer with experts, if some have them, else the first."""
    return next((index for index in range(config.n_layers) if config.layer(index).experts), 0)


def _inner_size(config: ModelConfig, layer: int) -> int:
    """Return the inner features that compute a token of a layer."""
    if not config.layer(layer).experts:
        return config.intermediate_size
    return config.experts_per_token * config.expert_size + config.shared_expert_size


def _mixture_bytes(config: ModelConfig, element_bytes: int) -> dict[str, float]:
    """Return what a mixture of experts saves per token beyond a feed-forward layer of the same inner size."""
    width, n_copies, wide = config.hidden_size, config.experts_per_token, max(_FP32_BYTES, element_bytes)
    normed = 0 if config.shared_expert_size else width * element_bytes  # which is not kept beside its fp32 copy
    copy = wide * width - normed if wide > element_bytes else 0
    return {
        "router": copy + wide * config.n_experts,
        "choice of experts": 24 * n_copies + wide * n_copies,
        "rows of experts": n_copies * width * element_bytes,
        "outputs of experts": n_copies * width * wide,
        **({"shared output": (width + 1) * element_bytes} if config.shared_expert_gate else {}),
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
    where one that was saved has just been freed; with another activation one fewer, and two fewer without a gate; with
    recomputation also what it recomputes. What a last norm has saved is free by then.

    Args:
        config: the model.
        activation_checkpointing: see `activation_bytes_per_token`.
        element_bytes: see there.
        tp: see there.
        sequence_parallel: see there.
    """
    options = {"element_bytes": element_bytes, "tp": tp, "sequence_parallel": sequence_parallel}
    n_inner = 1 if not config.gated else 3 if config.activation == "silu" else 2
    shared = config.shared_expert_size  # whose backward pass is over before that of the others, and its tensors freed
    n_features = n_inner * (_inner_size(config, _representative(config)) - shared) - (2 + config.gated) * shared
    n_bytes = (config.hidden_size + n_features / tp) * element_bytes
    if NORM_NAMES[config.norm_place][-1]:
        stream = config.hidden_size * element_bytes / (tp if sequence_parallel else 1)
        n_bytes -= _normed_copies(config) * stream
    if config.has_experts:  # the gradient of the experts' outputs, in fp32 or wider and cast
        n_bytes += config.experts_per_token * config.hidden_size * (_FP32_BYTES + element_bytes)
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
    n_ropes = len({config.rope(index) for index in range(config.n_layers)} - {None})
    tables = n_ropes * config.rotary_width * element_bytes  # cosines and sines of half a head each
    return 8 + tables + config.hidden_size * element_bytes + _FP32_BYTES


def loss_chunk_tokens(vocab_size: int) -> int:
    """Return the tokens of a chunk of the loss on a device other than a CPU, unless there are fewer.

    2^28 logits, in whole tiles of a matrix product. With 128k ids an H200 took 97.3, 90.8, 90.5 and 89.3 ms for 32,768
    tokens in chunks of 1024, 2048, 4096 and 8192.
    """
    return max(1024, (1 << 28) // vocab_size // 128 * 128)


def loss_part_tokens(vocab_size: int) -> int:
    """Return the tokens of a chunk of the loss whose logits are in fp32 at a time: 2^26 logits."""
    return max(128, (1 << 26) // vocab_size // 128 * 128)


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
        "hidden states": the input and its gradient; "gradient of the head": in fp32 or wider if it is summed over
        several chunks, else in the compute dtype; "logits": of one chunk, and of a part of it in fp32 or wider, or
        the sum rounded to the compute dtype after them, whichever is more.
    """
    chunk_tokens = min(n_tokens, chunk_tokens or loss_chunk_tokens(config.vocab_size // tp))
    wide, vocab, is_summed = max(_FP32_BYTES, element_bytes), config.vocab_size / tp, chunk_tokens < n_tokens
    is_narrow = element_bytes < wide
    part_tokens = min(chunk_tokens, loss_part_tokens(config.vocab_size // tp))
    wide_tokens = part_tokens * (is_narrow + (config.logits_softcap > 0))  # with the slopes of a cap
    rounded = vocab * config.hidden_size * element_bytes * is_summed * is_narrow
    return {
        "hidden states": 2 * n_tokens * config.hidden_size * element_bytes,
        "gradient of the head": vocab * config.hidden_size * (wide if is_summed else element_bytes),
        "logits": max(vocab * (chunk_tokens * element_bytes + wide_tokens * wide), rounded),
    }
