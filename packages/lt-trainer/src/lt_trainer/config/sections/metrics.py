"""`[metrics]`: logging, validation and profiling."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Logging, validation and profiling."""

    log_interval: int = option(10, "steps between metrics records")
    validation_interval: int = option(
        0, "steps between validations; 0 = only at the end; needs data.validation", former_name="eval_interval"
    )
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = option(
        (), "metrics sinks besides metrics.jsonl; each needs the lt-trainer extra of that name"
    )
    monitor_interval_s: float = option(
        10.0, "interval of the node monitor (CPU, memory, disk, GPUs); 0 = off", unit="s"
    )
    profile_steps: int = option(0, "steps traced by the torch profiler; 0 = none")
    profile_start_step: int = option(11, "first traced step, counted from 1")
    profile_ranks: tuple[int, ...] = option((0,), "ranks to profile")
    memory_snapshot_step: int = option(0, "step after which every rank writes a CUDA memory snapshot; 0 = never")
    memory_snapshot_on_oom: bool = option(False, "write a CUDA memory snapshot when CUDA runs out of memory")

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        require_at_least(self, "metrics", 1, "log_interval", "profile_start_step")
        require_at_least(
            self, "metrics", 0, "validation_interval", "monitor_interval_s", "profile_steps", "memory_snapshot_step"
        )
        if len(set(self.sinks)) < len(self.sinks):
            raise field_error(self, "metrics", "sinks", "duplicate sink", "list each sink once")
        ranks = set(self.profile_ranks)
        if len(ranks) < len(self.profile_ranks) or min(ranks, default=-1) < 0:
            raise field_error(self, "metrics", "profile_ranks", "must be distinct ranks", "the default is [0]")
        for name in ("profile_start_step", "profile_ranks"):
            if not self.profile_steps and getattr(self, name) != getattr(MetricsOptions, name):
                problem, remedy = (
                    "has no effect without metrics.profile_steps",
                    "set metrics.profile_steps, or remove it",
                )
                raise field_error(self, "metrics", f"{name} profile_steps", problem, remedy)
