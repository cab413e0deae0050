"""`[schedule]`: learning rate over the steps; the formulas are in `lt_trainer.schedule`."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rate over the steps; the formula is in `lt_trainer.schedule`."""

    kind: Literal["cosine", "linear", "constant"] = option("cosine", "how the learning rate falls after the warm-up")
    max_steps: int = option(10000, "updates in the whole run", hp="MAX_STEPS")
    warmup_steps: int = option(500, "updates until the highest learning rate", hp="WARMUP_STEPS")
    min_lr: float = option(4e-4, "learning rate of the last update (cosine, linear)", hp="MIN_LR")

    def __post_init__(self) -> None:
        check_types(self, "schedule")
        at_least(self, "schedule", 1, "max_steps")
        at_least(self, "schedule", 0, "warmup_steps", "min_lr")
        if self.warmup_steps > self.max_steps:
            remedy = f"set schedule.warmup_steps (WARMUP_STEPS) to at most {self.max_steps}"
            raise wrong(self, "schedule", "warmup_steps max_steps", "the warm-up is longer than the run", remedy)
        if self.kind == "constant" and self.min_lr != ScheduleOptions.min_lr:
            remedy = "leave schedule.min_lr (MIN_LR) out, or set schedule.kind to cosine or linear"
            raise wrong(self, "schedule", "min_lr kind", "a constant schedule has no final learning rate", remedy)
