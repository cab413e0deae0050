"""torch.compile per block: one graph, compiled once and reused for all blocks of the same shape.

`block.forward` is compiled, so FSDP's hooks around it run eagerly. A graph break is an error (`fullgraph`) rather than
a slower run. The loss is compiled apart (`lt_model.loss`).

A compiled step is faster only where Triton makes its kernels, and right only with torch versions whose compiled blocks
were compared with eager ones. So `compile = "auto"` compiles on CUDA, with such a version, if Triton and the C compiler
of its launchers are installed; otherwise the run is eager, and the log has the reason. `true` never falls back.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from lt_model.attention import BACKENDS, available_backends, unavailable_reason
from lt_model.llama import LlamaBlock
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.checks import compile_torch_versions, parse_torch_version
from lt_trainer_gpu.options import GpuOptions

MAX_GRAPHS = 64
"""Graphs of one block: row lengths x with and without documents x training and validation x kinds of linear layers.
Torch's own limit of 8 would end such a run."""


@dataclass(frozen=True, kw_only=True)
class CompileConditions:
    """Facts that decide whether "auto" compiles.

    Attributes:
        device_type: type of the compute device.
        tp: tensor-parallel degree.
        torch_version: such as "2.15.0+cu132".
        missing_compiler: missing part of Triton's tool chain; "" if it is complete.
    """

    device_type: str
    tp: int
    torch_version: str
    missing_compiler: str


def eager_reason(options: GpuOptions, conditions: CompileConditions) -> str:
    """Return the reason for which "auto" does not compile; "" if it does."""
    versions = compile_torch_versions(conditions.tp)
    if conditions.device_type != "cuda":
        return f"auto compiles on cuda only, not on {conditions.device_type}"
    if options.attention != "auto" and not BACKENDS[options.attention].supports_compile:
        return f"attention = {options.attention!r} would be recompiled for every batch"
    if parse_torch_version(conditions.torch_version) not in versions:
        passed = " or ".join(f"{major}.{minor}" for major, minor in versions)
        return (
            f"compiled blocks have not passed the parity tests with torch {conditions.torch_version}"
            + (" under tensor parallelism" if conditions.tp > 1 else "")
            + f"; they have with {passed}"
        )
    return conditions.missing_compiler


def resolve_compile(options: GpuOptions, conditions: CompileConditions) -> tuple[GpuOptions, str]:
    """Return the options with `compile` resolved, and a note for the log; "" if it was not "auto".

    Raises:
        RecipeError: an option needs the compiler, and "auto" does not compile here.
    """
    if options.compile != "auto":
        return options, ""
    reason = eager_reason(options, conditions)
    if reason and options.activation_checkpointing == "memory_budget":
        raise RecipeError(
            f"memory_budget requires torch.compile, and {reason}",
            values={"engine.gpu.activation_checkpointing": "memory_budget", "engine.gpu.compile": "auto"},
            remedy="set engine.gpu.activation_checkpointing to selective, or engine.gpu.compile to true",
        )
    note = f"engine.gpu.compile = auto: eager, as {reason}" if reason else "engine.gpu.compile = auto: compiled"
    return replace(options, compile=not reason), note


def find_missing_compiler() -> str:
    """Return what is missing for Triton to make and launch kernels on this machine; "" if nothing is."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]  # Triton's own order
    if not any(shutil.which(name) for name in compilers):
        return f"Triton finds no C compiler ({' or '.join(compilers)}) for its launchers"
    return ""


def fp8_note(options: GpuOptions) -> str:
    """Return a note for the log on fp8; "" without it."""
    if options.fp8 == "off":
        return ""
    eager = "" if options.compile is True else "; without compile its casts cost more than it gains"
    return f"fp8 {options.fp8} in the blocks' linear layers; mfu is relative to the bfloat16 peak{eager}"


def select_attention(options: GpuOptions, device: torch.device, dtype: torch.dtype, *, document_mask: bool) -> str:
    """Return the attention backend; "auto" in compiled blocks is the fastest that compiles once.

    lt-model's "auto" inspects the documents of every batch, which a compiled block cannot do.

    Raises:
        RecipeError: the backend that the recipe names cannot run on this device in this dtype.
    """
    reason = unavailable_reason(options.attention, device.type, dtype)
    if reason is not None:
        raise RecipeError(
            f"this attention cannot run here: {reason}",
            values={"engine.gpu.attention": options.attention},
            remedy=f"set it to one of {', '.join(available_backends(device.type, dtype))}",
        )
    if not (options.compile is True and options.attention == "auto"):
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
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._functorch.config.activation_memory_budget = activation_memory_budget
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
