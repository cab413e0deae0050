"""Activation checkpointing of decoder blocks (arXiv:1604.06174).

- "full": a block saves only its input and runs forward a second time: a third more work, the least memory.
- "selective": the outputs of attention, of collectives and of every other matrix product (`is_saved` in the parameter
  table) are saved (torchtitan's policy); the rest of the block is recomputed.
- "memory_budget": torch.compile's partitioner chooses what to save: the least recomputation within a share of the
  memory of saving everything.

A block's `forward` is replaced, not its `__call__`: FSDP's hooks are outside the recomputed region, so weights are
gathered once per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lt_model import ModelConfig, param_specs
from lt_model.decoder import DecoderBlock

_SAVED_OPS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
)
_MATMUL_OPS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")


def apply_activation_checkpointing(blocks: list[DecoderBlock], mode: str, config: ModelConfig) -> None:
    """Apply `mode` ("full" or "selective") to `blocks` of a model, in place; call before compiling them."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        is_saved = tuple(spec.is_saved for spec in param_specs(config) if spec.layer == 0 and spec.type == "matrix")
        options["context_fn"] = partial(_selective_contexts, is_saved)
    for block in blocks:
        block.forward = _wrap_with_checkpoint(block.forward, options)


def _wrap_with_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def _selective_contexts(is_saved: tuple[bool, ...]) -> Any:
    """Return contexts of a forward pass and its recomputation; each counts its own matrix products."""
    return create_selective_checkpoint_contexts(partial(_selective_policy, is_saved, {False: 0, True: 0}))


def _selective_policy(
    is_saved: tuple[bool, ...], products: dict[bool, int], context: Any, op: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    name = op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else str(op)
    if name in _MATMUL_OPS:
        number = products[context.is_recompute]
        products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_saved[number % len(is_saved)] else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if name in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
