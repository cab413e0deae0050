"""Engine options, `[engine.gpu]` in a recipe. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from lt_trainer.config.recipe import engine_options
from lt_trainer.config.section import Section, option

if TYPE_CHECKING:
    from lt_trainer.config.sections import Recipe


class GpuOptions(Section, table="engine.gpu"):
    """Options of the torch-native engine."""

    needs = (("activation_memory_budget", "activation_checkpointing", "memory_budget"), ("fp8_skipped_blocks", "fp8"))

    device: Literal["auto", "cuda", "mps", "neuron", "cpu"] = option(
        "auto",
        "device type; auto takes cuda (NVIDIA, ROCm) or neuron (AWS TorchNeuron, Trainium 2 and 3) where there is one, "
        "else the CPU; mps (an Apple GPU, one process) only where it is named",
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = option(
        "auto",
        "dtype of forward and backward; auto is bfloat16 on cuda, neuron and CPUs that multiply it in hardware, else "
        "float32, and as before where a run goes on; weights and moments are float32 (float64 with float64)",
    )
    float32_matmul_precision: Literal["highest", "high"] = option(
        "highest", "matrix products of float32 tensors on cuda: highest is exact, high uses TF32, as in torch"
    )
    attention: Literal["auto", "reference", "sdpa", "cudnn", "flash", "split", "varlen", "flex", "flash-attn"] = option(
        "auto", "attention backend of lt-model; auto takes the fastest that can run"
    )
    compile: Literal["auto", True, False] = option(
        "auto",
        "compile each block and the loss with torch.compile; auto does on cuda, with a torch version that passed the "
        "parity tests and a working compiler, else says in the log why not",
    )
    fp8: Literal["off", "tensorwise", "rowwise"] = option(
        "off",
        "matrix products of the blocks' linear layers in float8, with one scale per operand (faster) or per row (more "
        "accurate, weight gradients in dtype); cuda of compute capability 8.9 or newer",
    )
    fp8_skipped_blocks: int = option(1, "blocks at either end of the model that keep dtype; for fp8", ge=0)
    cuda_graphs: bool = option(
        False,
        "record a step's kernels once for each shape of its arrays, then launch them by one call: less time of the "
        "host, more memory; cuda, one rank, no offloading",
    )
    activation_checkpointing: Literal["none", "full", "selective", "memory_budget"] = option(
        "none",
        "what of a block's activations is recomputed in the backward pass: nothing, all, all but attention and "
        "every other matrix product, or what torch.compile chooses for engine.gpu.activation_memory_budget",
    )
    activation_memory_budget: float = option(
        0.5,
        "fraction of a block's activations that is saved, 0 to 1; for activation_checkpointing = memory_budget",
        ge=0,
        le=1,
    )
    activation_offload: bool = option(
        False,
        "keep what a block saves for the backward pass in host memory in between, copied while others compute: the "
        "device holds two blocks' activations; cuda",
    )
    optimizer_offload: bool = option(
        False,
        "keep the optimizer's moments in host memory, copied to the device and back in chunks during the update; same "
        "bits, slower steps; cuda",
    )
    pad_vocab_to_multiple_of: int = option(
        0,
        "pad the head's matrix products to a multiple of this many rows; same results; 0 = off",
        ge=0,
    )
    loss_chunk_tokens: int = option(
        0, "tokens whose logits exist at a time; 0 = 256 on a CPU, elsewhere as many as 2^28 logits are", ge=0
    )
    pipeline_stages_per_rank: int = option(
        1, "pipeline stages of each rank: 1 = 1F1B; more = interleaved 1F1B, less idle time and more messages", ge=1
    )
    reshard_after_forward: bool = option(
        True, "free a block's gathered weights between forward and backward: less memory, one more all-gather"
    )
    reduce_each_micro_batch: bool = option(
        False, "reduce gradients after every micro-batch, not once a step: less memory, more traffic"
    )
    deterministic: bool = option(
        False, "deterministic kernels only, slower on cuda; without it a resume on cuda is close, not bit-equal"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.activation_checkpointing == "memory_budget" and self.compile is False:
            remedy = "set engine.gpu.compile to auto or true, or engine.gpu.activation_checkpointing to selective"
            raise self.wrong("activation_checkpointing compile", "memory_budget requires torch.compile", remedy)
        if self.compile is True and self.attention == "split":
            problem = "this attention would be recompiled for every batch"
            raise self.wrong("attention compile", problem, "set engine.gpu.attention to auto, sdpa, varlen or flex")
        return self


def gpu_options(recipe: Recipe) -> GpuOptions:
    """Return the options of this engine, which may be registered under another name."""
    return engine_options(recipe, recipe.run.engine, GpuOptions)
