"""Choice of device, dtypes, attention and compilation, before anything is built.

All that a device or torch cannot do is refused here, before the ranks meet; what torch keeps for the whole process
(TF32, determinism) is set here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.engine import World
from lt_trainer_gpu.checks import check_bf16_weights, check_fp8_device, check_offload
from lt_trainer_gpu.compilation import (
    CompileConditions,
    find_missing_compiler,
    fp8_note,
    resolve_compile,
    select_attention,
)
from lt_trainer_gpu.devices import compute_capability, compute_dtype, select_device
from lt_trainer_gpu.options import GpuOptions


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Decisions on how a rank computes.

    Attributes:
        options: the engine's options, with `compile` resolved.
        device: the rank's device.
        dtype: dtype of forward and backward.
        master_dtype: dtype of the weights' updates and of sums of gradients.
        attention: attention backend of lt-model.
        rounds_stochastically: the weights are in bfloat16, rounded stochastically (`optimizer.weights_dtype`).
        notes: lines for the log.
    """

    options: GpuOptions
    device: torch.device
    dtype: torch.dtype
    master_dtype: torch.dtype
    attention: str
    rounds_stochastically: bool
    notes: tuple[str, ...]


def choose_computation(recipe: Recipe, world: World) -> Computation:
    """Choose how this rank computes; make its device the current one and set torch's own options.

    Raises:
        DeviceError: there is no such device.
        RecipeError: the device or this torch cannot do what an option asks for.
    """
    options: GpuOptions = recipe.engine["gpu"]
    device = select_device(options, world)
    conditions = CompileConditions(
        device_type=device.type,
        tp=recipe.parallel.tp,
        torch_version=torch.__version__,
        missing_compiler=find_missing_compiler(),
    )
    options, compile_note = resolve_compile(options, conditions)
    dtype = compute_dtype(options, device)
    check_fp8_device(options.fp8, device.type, compute_capability(device), is_rocm=torch.version.hip is not None)
    check_offload(options, device.type)
    rounds_stochastically = recipe.optimizer.weights_dtype == "bfloat16"
    if rounds_stochastically:
        check_bf16_weights(str(dtype).removeprefix("torch."))
    attention = select_attention(options, device, dtype, document_mask=recipe.data.document_mask)
    torch.set_float32_matmul_precision(options.float32_matmul_precision)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    return Computation(
        options=options,
        device=device,
        dtype=dtype,
        master_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        attention=attention,
        rounds_stochastically=rounds_stochastically,
        notes=tuple(note for note in (compile_note, fp8_note(options)) if note),
    )
