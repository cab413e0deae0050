"""Activations that a block does not keep for its backward pass but computes again (arXiv:1604.06174).

- "full": a block keeps its input alone and runs forward a second time: a third more work, the least memory.
- "selective": of what is costly to compute again, the outputs of attention, of collectives and of every other matrix
  product are kept (the policy of torchtitan); the rest of the block is computed again.
- "budget": torch.compile's partitioner chooses what to keep, for the least work within a share of the memory that
  keeping all would take.

A block's `forward` is replaced, not its `__call__`: FSDP's hooks stand outside of what runs twice, so weights are
gathered once per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lt_model.llama import LlamaBlock

_KEPT = (
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
_PRODUCTS = ("aten::mm", "aten::addmm")


def checkpoint_blocks(blocks: list[LlamaBlock], mode: str) -> None:
    """Make `blocks` compute activations again as `mode` ("full" or "selective") says; before they are compiled."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _contexts
    for block in blocks:
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return again


def _contexts() -> Any:
    """Contexts of a forward pass and of its repetition, which count their matrix products apart."""
    return create_selective_checkpoint_contexts(partial(_policy, {False: 0, True: 0}))


def _policy(products: dict[bool, int], context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else str(op)
    if name in _PRODUCTS:
        products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if products[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
