"""How long a run takes and what it draws, from one number: MFU, assumed or measured.

MFU is the model's FLOPs ("full" convention, `lt_model.costs`) per second over the device's dense bfloat16 peak. Where
none is given, the hardware is assumed to be busy for `ASSUMED_HFU` of its peak with all FLOPs that are really done,
those of recomputation included; what it spends on them is lost to MFU. Neither communication nor the size of the
products is modelled: measure (`lt train bench`) and give `--mfu`.

Energy is the boards' power limit times the time: hosts, network and cooling come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_model import LlamaConfig, flops_per_token
from lt_model.activations import SELECTIVE
from lt_model.params import parameters
from lt_trainer.planning.devices import PlannedDevice
from lt_trainer.planning.layout import PlannedLayout
from lt_trainer.recipe import Recipe

ASSUMED_HFU = 0.45
"""Published bfloat16 runs of dense Llamas on H100 reach 0.36 to 0.48 of the peak, on A100 up to 0.68."""

# Matrix products of a block that are not done a second time. With "full" torch stops before the last one, whose result
# no one needs.
_ONCE = {"selective": SELECTIVE, "full": ("down_proj",)}


@dataclass(frozen=True, kw_only=True)
class PlannedTime:
    """Of a whole run.

    Attributes:
        mfu: model FLOPs over the peak.
        mfu_source: "given" or what was assumed.
        hfu: with what is computed again.
        step_s: seconds of one update, of the batch that has grown where it grows.
        tokens_per_s: of all devices.
        tokens: of the whole run.
        seconds: of the whole run, without saves and validation.
        energy_kwh: of the boards, at their limit.
    """

    mfu: float
    mfu_source: str
    hfu: float
    step_s: float
    tokens_per_s: float
    tokens: int
    seconds: float
    energy_kwh: float


def planned_time(
    recipe: Recipe, config: LlamaConfig, layout: PlannedLayout, device: PlannedDevice, mfu: float | None
) -> PlannedTime:
    """Return time and energy of the whole run.

    Args:
        recipe: for the batch and the number of updates.
        config: the model.
        layout: how the run lies on its devices.
        device: one of them.
        mfu: measured share of the peak in the "full" convention; assumed when None.
    """
    seq_len = recipe.data.seq_len
    flops = flops_per_token(config, seq_len)
    more = 1 + recomputed_flops_per_token(config, seq_len, layout) / flops
    source = "given"
    if mfu is None:
        mfu, source = ASSUMED_HFU / more, f"assumed: {ASSUMED_HFU:.0%} of the peak for all that is computed"
    per_s = layout.world * device.peak_flops * mfu / flops
    steps, ramp = recipe.schedule.max_steps, recipe.batch.grows(seq_len)
    tokens_of_step = recipe.batch.global_batch * seq_len
    tokens = steps * tokens_of_step if ramp is None else ramp.rows_before(steps) * seq_len
    seconds = tokens / per_s
    return PlannedTime(
        mfu=mfu,
        mfu_source=source,
        hfu=mfu * more,
        step_s=tokens_of_step / per_s,
        tokens_per_s=per_s,
        tokens=tokens,
        seconds=seconds,
        energy_kwh=layout.world * device.power_w * seconds / 3.6e6,
    )


def recomputed_flops_per_token(config: LlamaConfig, seq_len: int, layout: PlannedLayout) -> float:
    """Return the FLOPs per token that are done a second time: what the engine reports as HFU beyond MFU.

    "selective" keeps attention and every other product. A budget is taken to recompute in proportion to what it does
    not keep.
    """
    mode = "full" if layout.checkpointing == "budget" else layout.checkpointing
    if mode == "none":
        return 0.0
    products = 2 * sum(
        row.size for row in parameters(config) if row.role == "block" and row.kind not in (*_ONCE[mode], "norm")
    )
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * seq_len if mode == "full" else 0
    return (products + attention) * (1 - layout.budget if layout.checkpointing == "budget" else 1.0)
