"""Choice of device, dtypes, attention and compilation, before anything is built.

All that a device or torch cannot do is refused here, before the ranks meet; what torch keeps for the whole process
(TF32, determinism) is set here. One choice needs the ranks: what `dtype = "auto"` is on CPUs (`agree_on_cpu_dtype`).
Products in bfloat16 are more than twice as fast as in float32 on CPUs with AVX512-BF16 or AMX, and slower on others;
those of experts are slower on all, as a kernel is made for every new number of rows, and kept. All ranks take the same
dtype, and a run keeps it, whatever CPU resumes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lt_model import ModelConfig
from lt_model.attention import available_backends, unavailable_reason
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.torch import cpu_multiplies_bfloat16
from lt_trainer_gpu.checks import DeviceFacts, check_device
from lt_trainer_gpu.compilation import choose_compile, find_missing_compiler
from lt_trainer_gpu.devices import compute_dtype, select_device
from lt_trainer_gpu.options import GpuOptions, gpu_options

DTYPE_FIELD = "engine.gpu.dtype"


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Decisions on how a rank computes.

    Attributes:
        options: the engine's options.
        device: the rank's device.
        dtype: dtype of forward and backward.
        attention: attention backend of lt-model.
        compile: whether blocks and loss are compiled.
        rounds_stochastically: the weights are in bfloat16, rounded stochastically (`optimizer.weights_dtype`).
        notes: lines for the log.
    """

    options: GpuOptions
    device: torch.device
    dtype: torch.dtype
    attention: str
    compile: bool
    rounds_stochastically: bool
    notes: tuple[str, ...]

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the weights' updates and of sums of gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def choose_computation(recipe: Recipe, config: ModelConfig, world: World) -> Computation:
    """Choose how this rank computes; make its device the current one and set torch's own options.

    Raises:
        DeviceError: there is no such device.
        RecipeError: the device or this torch cannot do what an option asks for.
    """
    options = gpu_options(recipe)
    device = select_device(options, world)
    compile, compile_note = choose_compile(
        options,
        device_type=device.type,
        torch_version=torch.__version__,
        missing_compiler=find_missing_compiler(),
    )
    dtype = compute_dtype(options, device)
    facts = DeviceFacts(
        type=device.type,
        dtype=str(dtype).removeprefix("torch."),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        is_rocm=torch.version.hip is not None,
        torch_version=torch.__version__,
    )
    check_device(recipe, facts)
    notes = [compile_note] if compile_note else []
    if options.fp8 != "off":
        from lt_trainer_gpu.fp8 import fp8_flops_share

        share = fp8_flops_share(config, recipe.data.seq_len, options.fp8, options.fp8_skipped_blocks)
        eager = "" if compile else "; without compile its casts cost more than it gains"
        notes.append(
            f"fp8 {options.fp8} in the blocks' linear layers: {share:.1%} of the model's FLOPs; mfu is relative to the "
            f"bfloat16 peak{eager}"
        )
    torch.set_float32_matmul_precision(options.float32_matmul_precision)
    if options.deterministic and (compile or device.type != "cpu"):
        torch.use_deterministic_algorithms(True)
    elif options.deterministic:
        torch.set_deterministic_debug_mode("error")  # the same, without importing the compiler
    return Computation(
        options=options,
        device=device,
        dtype=dtype,
        attention=_choose_attention(recipe, config, compile, device, dtype),
        compile=compile,
        rounds_stochastically=recipe.optimizer.weights_dtype == "bfloat16",
        notes=tuple(notes),
    )


def _choose_attention(
    recipe: Recipe, config: ModelConfig, compile: bool, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the attention backend; "auto" in compiled blocks is the fastest that compiles once.

    lt-model's "auto" inspects the documents of every batch, which a compiled block cannot do. For a window on CUDA no
    mask of all pairs is made.

    Raises:
        RecipeError: the backend that the recipe names cannot run on this device in this dtype.
    """
    attention = gpu_options(recipe).attention
    reason = unavailable_reason(attention, device.type, dtype)
    if reason is not None:
        raise RecipeError(
            f"this attention cannot run here: {reason}",
            values={"engine.gpu.attention": attention},
            remedy=f"set it to one of {', '.join(available_backends(device.type, dtype))}",
        )
    if not (compile and attention == "auto"):
        return attention
    if config.attention_softcap:
        names = ("flex", "reference")
    elif config.sliding_window:
        names = ("varlen", "flex", "sdpa")
    else:
        names = ("varlen", "sdpa") if recipe.data.document_mask else ("sdpa",)
    return next(name for name in names if unavailable_reason(name, device.type, dtype) is None)


def agree_on_cpu_dtype(computation: Computation, recipe: Recipe, world: World, control: Control) -> Computation:
    """Return the computation with the dtype that all ranks take where "auto" is for CPUs to decide; collective.

    It is that of the run's last start, if there was one, else bfloat16 if the CPUs of all ranks multiply it in
    hardware, or if the weights are in bfloat16 and need it.
    """
    if computation.device.type != "cpu" or computation.options.dtype != "auto":
        return computation
    recorded = control.broadcast(recorded_dtype(Path(recipe.run.dir)) if world.rank == 0 else "")
    is_fast = not control.all_reduce_max(not cpu_multiplies_bfloat16())
    dtype = recorded or ("bfloat16" if is_fast or computation.rounds_stochastically else "float32")
    if recorded:
        reason = "as at the run's last start" + ("" if is_fast or recorded != "bfloat16" else ", which is slow here")
    else:
        reason = f"as {'all' if is_fast else 'not all'} CPUs have products in bfloat16 (AVX512-BF16 or AMX)"
    note = f"{DTYPE_FIELD} = auto: {dtype}, {reason}"
    return replace(computation, dtype=getattr(torch, dtype), notes=(*computation.notes, note))


def recorded_dtype(run_dir: Path) -> str:
    """Return the dtype in which the run of this folder was started last; "" if it was not."""
    events = read_jsonl(run_dir / "events.jsonl") if (run_dir / "events.jsonl").exists() else []
    starts = [event["resolved"] for event in events if DTYPE_FIELD in event.get("resolved", {})]
    return starts[-1][DTYPE_FIELD] if starts else ""
