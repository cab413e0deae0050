"""`[schedule]`: learning rate over the steps; the formulas are in `lt_trainer.schedule`."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rate over the steps; the formula is in `lt_trainer.schedule`."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "how the learning rate falls after the warm-up; wsd: not before the last decay_steps updates"
    )
    max_steps: int = option(10000, "updates in the whole run", hp="MAX_STEPS")
    warmup_steps: int = option(500, "updates until the highest learning rate", hp="WARMUP_STEPS")
    min_lr: float = option(4e-4, "learning rate of the last update (cosine, linear)", hp="MIN_LR")
    decay_steps: int = option(0, "updates in which wsd falls to min_lr; 0 = a tenth of max_steps")
    decay_shape: Literal["1-sqrt", "linear"] = option("1-sqrt", "how wsd falls: fast at first, or evenly")

    def __post_init__(self) -> None:
        check_types(self, "schedule")
        at_least(self, "schedule", 1, "max_steps")
        at_least(self, "schedule", 0, "warmup_steps", "min_lr", "decay_steps")
        if self.warmup_steps > self.max_steps:
            remedy = f"set schedule.warmup_steps (WARMUP_STEPS) to at most {self.max_steps}"
            raise wrong(self, "schedule", "warmup_steps max_steps", "the warm-up is longer than the run", remedy)
        if self.kind == "constant" and self.min_lr != ScheduleOptions.min_lr:
            remedy = "leave schedule.min_lr (MIN_LR) out, or set schedule.kind to cosine or linear"
            raise wrong(self, "schedule", "min_lr kind", "a constant schedule has no final learning rate", remedy)
        for name in ("decay_steps", "decay_shape"):
            if self.kind != "wsd" and getattr(self, name) != getattr(ScheduleOptions, name):
                remedy = f"leave schedule.{name} out, or set schedule.kind to wsd"
                raise wrong(self, "schedule", f"{name} kind", "only a wsd schedule has it", remedy)
        if self.warmup_steps + self.decay_steps > self.max_steps:
            problem = "warm-up and decay are longer than the run"
            remedy = f"set schedule.decay_steps to at most {self.max_steps - self.warmup_steps}"
            raise wrong(self, "schedule", "decay_steps warmup_steps max_steps", problem, remedy)

    @property
    def decay(self) -> int:
        """Updates after the warm-up in which the learning rate falls; 0 for a constant one."""
        if self.kind == "constant":
            return 0
        after_warmup = self.max_steps - self.warmup_steps
        if self.kind == "wsd":
            return self.decay_steps or min(after_warmup, -(-self.max_steps // 10))
        return after_warmup
