"""torch.compile on each block: one graph, compiled once and used for all blocks of the same shape.

`block.forward` is compiled, so FSDP's hooks, which stand around it, run as they are. A block that does not become one
graph (`fullgraph`) is an error rather than a slower run.
"""

from __future__ import annotations

import torch

from lt_model.attention import obstacle
from lt_model.llama import LlamaBlock
from lt_trainer_gpu.options import GpuOptions


def attention_of(options: GpuOptions, device: torch.device, dtype: torch.dtype, *, documents: bool) -> str:
    """The attention backend to use: the option, but "auto" in compiled blocks is the fastest that compiles once.

    lt-model's "auto" looks at the documents of every batch, which a compiled block cannot do.
    """
    if not (options.compile and options.attention == "auto"):
        return options.attention
    return "varlen" if documents and device.type == "cuda" and obstacle("varlen", "cuda", dtype) is None else "sdpa"


def compile_blocks(blocks: list[LlamaBlock], activation_budget: float) -> None:
    """Compile `blocks` when they first run.

    Args:
        blocks: the model's.
        activation_budget: share of their activations that is kept for the backward pass; 1 keeps what the compiler
            thinks is fastest.
    """
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = activation_budget
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
