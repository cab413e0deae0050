"""torch.compile per block: one graph, compiled once and reused for all blocks of the same shape.

`block.forward` is compiled, so FSDP's hooks around it run eagerly. A graph break is an error (`fullgraph`) rather than
a slower run; with expert parallelism alone experts are eager, with recomputation their whole block. The loss is
compiled apart (`lt_model.loss`).

A compiled step is faster only where Triton makes its kernels, and right only with torch versions whose compiled blocks
were compared with eager ones. So `compile = "auto"` compiles on CUDA, with such a version, if Triton and the C compiler
of its launchers are installed; otherwise the run is eager, and the log has the reason. `true` never falls back.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

from lt_model.attention import BACKENDS
from lt_model.decoder import DecoderBlock
from lt_model.feed_forward import MoE
from lt_trainer.errors import RecipeError
from lt_trainer.toml import format_value
from lt_trainer_gpu import checks
from lt_trainer_gpu.checks import parse_torch_version
from lt_trainer_gpu.options import GpuOptions

MAX_GRAPHS = 64
"""Graphs of one block: row lengths x with and without documents x training and validation x kinds of linear layers.
Torch's own limit of 8 would end such a run."""


def choose_compile(
    options: GpuOptions, *, device_type: str, torch_version: str, missing_compiler: str
) -> tuple[bool, str]:
    """Return whether to compile, and a note for the log; "" if the option is not "auto".

    Args:
        options: the engine's options.
        device_type: type of the compute device.
        torch_version: such as "2.15.0+cu132".
        missing_compiler: missing part of Triton's tool chain; "" if it is complete.

    Raises:
        RecipeError: an option needs the compiler, and "auto" does not compile here.
    """
    if options.compile != "auto":
        return options.compile, ""
    reason = ""
    if device_type != "cuda":
        reason = f"auto compiles on cuda only, not on {device_type}"
    elif options.attention != "auto" and not BACKENDS[options.attention].supports_compile:
        reason = f"attention = {format_value(options.attention)} would be recompiled for every batch"
    elif parse_torch_version(torch_version) not in checks.COMPILE_TORCH_VERSIONS:
        passed = checks.passed_versions()
        reason = f"compiled blocks have not passed the parity tests with torch {torch_version}; they have with {passed}"
    elif missing_compiler:
        reason = missing_compiler
    if reason and options.activation_checkpointing == "memory_budget":
        raise RecipeError(
            f"memory_budget requires torch.compile, and {reason}",
            values={"engine.gpu.activation_checkpointing": "memory_budget", "engine.gpu.compile": "auto"},
            remedy="set engine.gpu.activation_checkpointing to selective, or engine.gpu.compile to true",
        )
    return not reason, f"engine.gpu.compile = auto: {f'eager, as {reason}' if reason else 'compiled'}"


def find_missing_compiler() -> str:
    """Return what is missing for Triton to make and launch kernels on this machine; "" if nothing is."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]  # Triton's own order
    if not any(shutil.which(name) for name in compilers):
        return f"Triton finds no C compiler ({' or '.join(compilers)}) for its launchers"
    return ""


def compile_blocks(
    blocks: list[DecoderBlock], activation_memory_budget: float, *, exchanges_rows: bool = False
) -> None:
    """Wrap `blocks` in torch.compile; compilation happens on first use.

    Args:
        blocks: the model's decoder blocks.
        activation_memory_budget: share of the activations saved for the backward pass; 1 saves what the compiler
            considers fastest.
        exchanges_rows: experts are on several ranks: their exchange, which waits for the host, and they are eager.
    """
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._functorch.config.activation_memory_budget = activation_memory_budget
    for block in blocks:
        mixture = block.mlp if exchanges_rows and isinstance(block.mlp, MoE) else None
        if mixture is not None:
            experts: Any = mixture.experts
            experts.forward = torch.compiler.disable(experts.forward)
        block.forward = torch.compile(block.forward, fullgraph=mixture is None)
