"""The engine's own knobs, `[engine.gpu]` in a recipe. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option


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
    attention: Literal["sdpa", "reference"] = option("sdpa", "attention backend of lt-model")
    deterministic: bool = option(
        False, "deterministic kernels only, slower on cuda; without it a resume on cuda is close, not bit-equal"
    )

    def __post_init__(self) -> None:
        check_types(self, "engine.gpu")
