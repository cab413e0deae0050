"""The engine's own knobs, `[engine.gpu]` in a recipe. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of the torch-native engine."""

    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "device type; auto takes cuda where there is one, else the CPU"
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = option(
        "auto",
        "dtype of forward and backward; auto is bfloat16 on cuda and float32 on a CPU; weights and moments are "
        "float32 (float64 with float64)",
    )
    attention: Literal["auto", "reference", "sdpa", "cudnn", "flash", "split", "varlen", "flex", "flash-attn"] = option(
        "auto", "attention backend of lt-model; auto takes the fastest that can run"
    )
    compile: bool = option(False, "compile each block with torch.compile")
    activation_checkpointing: Literal["none", "full", "selective", "budget"] = option(
        "none",
        "what of a block's activations is computed again in the backward pass: nothing, all, all but attention and "
        "every other matrix product, or what torch.compile chooses for engine.gpu.activation_budget",
    )
    activation_budget: float = option(
        0.5, "share of a block's activations that is kept, 0 to 1; for activation_checkpointing = budget"
    )
    pad_vocab_to: int = option(
        0, "the head's matrix products are done with a multiple of this many rows; same results; 0 = not"
    )
    reshard_after_forward: bool = option(
        True, "let go of a block's gathered weights between forward and backward: less memory, one more gathering"
    )
    reduce_each_micro_batch: bool = option(
        False, "reduce gradients after every micro-batch, not once a step: less memory, more traffic"
    )
    deterministic: bool = option(
        False, "deterministic kernels only, slower on cuda; without it a resume on cuda is close, not bit-equal"
    )

    def __post_init__(self) -> None:
        check_types(self, "engine.gpu")
        at_least(self, "engine.gpu", 0, "pad_vocab_to")
        if not 0 <= self.activation_budget <= 1:
            raise wrong(self, "engine.gpu", "activation_budget", "must lie in [0, 1]", "the default is 0.5")
        if self.activation_checkpointing != "budget" and self.activation_budget != GpuOptions.activation_budget:
            problem = "only activation_checkpointing = 'budget' has a budget"
            remedy = "leave engine.gpu.activation_budget out, or set engine.gpu.activation_checkpointing to budget"
            raise wrong(self, "engine.gpu", "activation_budget activation_checkpointing", problem, remedy)
        if self.activation_checkpointing == "budget" and not self.compile:
            problem = "the budget is torch.compile's"
            remedy = "set engine.gpu.compile to true, or engine.gpu.activation_checkpointing to selective"
            raise wrong(self, "engine.gpu", "activation_checkpointing compile", problem, remedy)
        if self.compile and self.attention == "split":
            problem = "this attention would be compiled anew for every batch"
            remedy = "set engine.gpu.attention to auto, sdpa, varlen or flex"
            raise wrong(self, "engine.gpu", "attention compile", problem, remedy)
