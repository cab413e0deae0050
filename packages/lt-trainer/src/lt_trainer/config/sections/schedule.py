"""`[schedule]`: learning rate over the steps (see `lt_trainer.config.lr_schedule`)."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rate over the steps; the formulas are in `lt_trainer.config.lr_schedule`."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "decay of the learning rate after the warmup; wsd: only in the last decay_steps steps"
    )
    max_steps: int = option(10000, "steps of the run", hyperparameter="MAX_STEPS")
    warmup_steps: int = option(500, "steps until the peak learning rate", hyperparameter="WARMUP_STEPS")
    min_lr: float = option(4e-4, "learning rate of the last step (cosine, linear, wsd)", hyperparameter="MIN_LR")
    decay_steps: int = option(0, "steps of the wsd decay to min_lr; 0 = a tenth of max_steps")
    decay_shape: Literal["1-sqrt", "linear"] = option("1-sqrt", "shape of the wsd decay: fast at first, or linear")

    def __post_init__(self) -> None:
        check_types(self, "schedule")
        require_at_least(self, "schedule", 1, "max_steps")
        require_at_least(self, "schedule", 0, "warmup_steps", "min_lr", "decay_steps")
        if self.warmup_steps > self.max_steps:
            remedy = f"set schedule.warmup_steps (WARMUP_STEPS) to at most {self.max_steps}"
            raise field_error(self, "schedule", "warmup_steps max_steps", "the warmup is longer than the run", remedy)
        if self.kind == "constant" and self.min_lr != ScheduleOptions.min_lr:
            remedy = "remove schedule.min_lr (MIN_LR), or set schedule.kind to cosine or linear"
            raise field_error(self, "schedule", "min_lr kind", "a constant schedule has no final learning rate", remedy)
        for name in ("decay_steps", "decay_shape"):
            if self.kind != "wsd" and getattr(self, name) != getattr(ScheduleOptions, name):
                remedy = f"remove schedule.{name}, or set schedule.kind to wsd"
                raise field_error(self, "schedule", f"{name} kind", "only the wsd schedule has it", remedy)
        if self.warmup_steps + self.decay_steps > self.max_steps:
            problem = "warmup and decay are longer than the run"
            remedy = f"set schedule.decay_steps to at most {self.max_steps - self.warmup_steps}"
            raise field_error(self, "schedule", "decay_steps warmup_steps max_steps", problem, remedy)

    @property
    def effective_decay_steps(self) -> int:
        """Steps over which the learning rate decays; 0 for a constant schedule."""
        if self.kind == "constant":
            return 0
        after_warmup = self.max_steps - self.warmup_steps
        if self.kind == "wsd":
            return self.decay_steps or min(after_warmup, -(-self.max_steps // 10))
        return after_warmup
