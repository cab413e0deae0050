"""Run time and energy from one number: MFU, assumed or measured.

MFU is the model's FLOPs ("full" convention, `lt_model.costs`) per second over the device's dense bfloat16 peak. If not
given, all FLOPs including recomputation are assumed to run at `ASSUMED_HFU` of the peak while a device works, so
recomputation and a pipeline's idle time lower MFU.
Neither communication nor matrix sizes are modeled: measure (`lt train bench`) and pass `--mfu`.

Energy is the boards' power limit times the run time, without hosts, network and cooling.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_model import ModelConfig, flops_per_token
from lt_model.costs import recomputed_flops_per_token
from lt_trainer.config.sections import Recipe
from lt_trainer.planning.devices import DeviceModel
from lt_trainer.planning.layout import PlannedLayout

ASSUMED_HFU = 0.45
"""Published bfloat16 runs of dense Llamas on H100 reach 0.36 to 0.48 of the peak, on A100 up to 0.68."""


@dataclass(frozen=True, kw_only=True)
class PlannedTime:
    """Time and energy of a whole run.

    Attributes:
        mfu: model FLOPs over the peak.
        mfu_source: "given" or the assumption.
        hfu: MFU including recomputed FLOPs.
        step_s: seconds per step, at the final batch size if there is a ramp.
        tokens_per_s: tokens per second of all devices.
        tokens: tokens of the whole run.
        seconds: seconds of the whole run, without checkpoints and validation.
        energy_kwh: energy of the boards at their power limit.
    """

    mfu: float
    mfu_source: str
    hfu: float
    step_s: float
    tokens_per_s: float
    tokens: int
    seconds: float
    energy_kwh: float


def plan_time(
    recipe: Recipe, config: ModelConfig, layout: PlannedLayout, device: DeviceModel, mfu: float | None
) -> PlannedTime:
    """Return time and energy of the whole run.

    Args:
        recipe: defines the batch and the number of steps.
        config: model config.
        layout: parallel layout.
        device: device model.
        mfu: measured MFU in the "full" convention; assumed if None.
    """
    seq_len = recipe.data.seq_len
    flops = flops_per_token(config, seq_len)
    hfu_per_mfu = 1 + recomputed_flops(config, seq_len, layout) / flops
    source = "given"
    if mfu is None:
        mfu = ASSUMED_HFU * layout.pipeline_efficiency / hfu_per_mfu
        source = f"assumed: {ASSUMED_HFU:.0%} of the peak, recomputation included"
        if layout.pp > 1:
            source += f", {1 - layout.pipeline_efficiency:.0%} of the time idle in the pipeline"
    tokens_per_s = layout.world_size * device.peak_flops * mfu / flops
    steps, ramp = recipe.schedule.max_steps, recipe.batch.batch_ramp(seq_len)
    tokens_per_step = recipe.batch.global_batch_size * seq_len
    tokens = steps * tokens_per_step if ramp is None else ramp.rows_before(steps) * seq_len
    seconds = tokens / tokens_per_s
    return PlannedTime(
        mfu=mfu,
        mfu_source=source,
        hfu=mfu * hfu_per_mfu,
        step_s=tokens_per_step / tokens_per_s,
        tokens_per_s=tokens_per_s,
        tokens=tokens,
        seconds=seconds,
        energy_kwh=layout.world_size * device.power_w * seconds / 3.6e6,
    )


def recomputed_flops(config: ModelConfig, seq_len: int, layout: PlannedLayout) -> float:
    """Return the recomputed FLOPs per token: a memory budget is assumed to recompute what it does not keep."""
    if layout.activation_checkpointing == "memory_budget":
        return (1 - layout.activation_memory_budget) * recomputed_flops_per_token(config, seq_len, "full")
    return recomputed_flops_per_token(config, seq_len, layout.activation_checkpointing)
