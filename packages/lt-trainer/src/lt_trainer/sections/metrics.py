"""`[metrics]`: what is reported how often, where it goes, and what is looked at more closely."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What is reported how often, where it goes, and what is looked at more closely."""

    log_interval: int = option(10, "updates between lines of metrics")
    eval_interval: int = option(0, "updates between validation losses; 0 = only at the end; needs data.validation")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = option(
        (), "where records go besides metrics.jsonl; each needs the extra of lt-trainer that has its name"
    )
    monitor_interval_s: float = option(
        10.0, "time between samples of CPU, memory, disk and GPUs of each node; 0 = none", unit="s"
    )
    profile_steps: int = option(0, "updates of which torch's profiler writes a trace; 0 = none")
    profile_start_step: int = option(11, "the first of them, counted from 1")
    profile_ranks: tuple[int, ...] = option((0,), "the ranks that are profiled")
    memory_snapshot_step: int = option(0, "after this update every rank writes a history of its CUDA memory; 0 = never")
    memory_snapshot_on_oom: bool = option(
        False, "a rank whose CUDA memory is exhausted writes the history of it before it ends"
    )

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        at_least(self, "metrics", 1, "log_interval", "profile_start_step")
        at_least(self, "metrics", 0, "eval_interval", "monitor_interval_s", "profile_steps", "memory_snapshot_step")
        if len(set(self.sinks)) < len(self.sinks):
            raise wrong(self, "metrics", "sinks", "a sink is named twice", "name it once")
        ranks = set(self.profile_ranks)
        if len(ranks) < len(self.profile_ranks) or min(ranks, default=-1) < 0:
            raise wrong(self, "metrics", "profile_ranks", "must name ranks, each once", "the default is [0]")
        for name in ("profile_start_step", "profile_ranks"):
            if not self.profile_steps and getattr(self, name) != getattr(MetricsOptions, name):
                problem, remedy = "nothing is profiled", "set metrics.profile_steps, or leave the other out"
                raise wrong(self, "metrics", f"{name} profile_steps", problem, remedy)
