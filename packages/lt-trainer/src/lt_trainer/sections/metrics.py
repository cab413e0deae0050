"""`[metrics]`: what is reported how often."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What is reported how often."""

    log_interval: int = option(10, "updates between lines of metrics")
    eval_interval: int = option(0, "updates between validation losses; 0 = only at the end; needs data.validation")

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        at_least(self, "metrics", 1, "log_interval")
        at_least(self, "metrics", 0, "eval_interval")
