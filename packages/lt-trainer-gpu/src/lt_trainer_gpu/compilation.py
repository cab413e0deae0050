"""torch.compile per block: one graph, compiled once and reused for all blocks of the same shape.

`block.forward` is compiled, so FSDP's hooks around it run eagerly. A graph break is an error (`fullgraph`) rather than
a slower run.
"""

from __future__ import annotations

import torch

from lt_model.attention import unavailable_reason
from lt_model.llama import LlamaBlock
from lt_trainer_gpu.options import GpuOptions


def select_attention(options: GpuOptions, device: torch.device, dtype: torch.dtype, *, document_mask: bool) -> str:
    """Return the attention backend; "auto" in compiled blocks is the fastest that compiles once.

    lt-model's "auto" inspects the documents of every batch, which a compiled block cannot do.
    """
    if not (options.compile and options.attention == "auto"):
        return options.attention
    return (
        "varlen"
        if document_mask and device.type == "cuda" and unavailable_reason("varlen", "cuda", dtype) is None
        else "sdpa"
    )


def compile_blocks(blocks: list[LlamaBlock], activation_memory_budget: float) -> None:
    """Wrap `blocks` in torch.compile; compilation happens on first use.

    Args:
        blocks: the model's decoder blocks.
        activation_memory_budget: share of the activations saved for the backward pass; 1 saves what the compiler
            considers fastest.
    """
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = activation_memory_budget
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
