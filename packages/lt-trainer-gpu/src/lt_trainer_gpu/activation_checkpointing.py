"""Activation checkpointing of decoder blocks (arXiv:1604.06174).

- "full": a block saves only its input, and the choice of experts, and runs forward a second time: a third more work,
  the least memory.
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

from lt_model import Decoder, param_specs
from lt_model.params import PRODUCTS

_CHOICE_OPS = ("aten::topk", "aten::sort")
"""The choice of experts, which a second computation could make otherwise."""
_SAVED_OPS = (
    *_CHOICE_OPS,
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
)
_MATMUL_OPS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "lt_model::grouped_product")


def apply_activation_checkpointing(stage: Decoder, mode: str) -> None:
    """Apply `mode` ("full" or "selective") to the blocks of a stage, in place; call before compiling them."""
    saved: dict[int, list[bool]] = {index: [] for index in stage.layers}
    for spec in param_specs(stage.config):
        if spec.layer in saved and spec.type in PRODUCTS:
            saved[spec.layer].append(spec.is_saved and mode == "selective")
    for index, block in zip(stage.layers, stage.blocks, strict=True):
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode == "selective" or stage.config.layer(index).experts:
            ops = _SAVED_OPS if mode == "selective" else _CHOICE_OPS
            options["context_fn"] = partial(_selective_contexts, tuple(saved[index]), ops)
        block.forward = _wrap_with_checkpoint(block.forward, options)


def _wrap_with_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def _selective_contexts(is_saved: tuple[bool, ...], saved_ops: tuple[str, ...]) -> Any:
    """Return contexts of a forward pass and its recomputation; each counts its own matrix products."""
    return create_selective_checkpoint_contexts(partial(_selective_policy, is_saved, saved_ops, {False: 0, True: 0}))


def _selective_policy(
    is_saved: tuple[bool, ...],
    saved_ops: tuple[str, ...],
    products: dict[bool, int],
    context: Any,
    op: Any,
    *_args: Any,
    **_kwargs: Any,
) -> CheckpointPolicy:
    name = op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else str(op)
    if name in _MATMUL_OPS:
        number = products[context.is_recompute]
        products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_saved[number % len(is_saved)] else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if name in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE
