"""`[evaluation]`: tasks and validation sets that are evaluated during a run."""

from dataclasses import dataclass

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least

WHOLE_VALIDATION = "validation"
"""Name of the results of data.validation, whose set has no name."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Tasks and stores that are evaluated during a run, on the weights as the engine holds them."""

    tasks: tuple[str, ...] = option(
        (),
        "files NAME.jsonl in evaluation.tasks_dir, or generated tasks: lt_copy, lt_count, lt_pattern, lt_recall",
    )
    tasks_dir: str = option("", "folder of task files")
    stores: bool = option(False, "evaluate the validation sets by source file and document length")
    interval: int = option(0, "steps between evaluations; 0 = only at the end")
    limit: int = option(0, "items of each task, the first ones; 0 = all")

    def __post_init__(self) -> None:
        check_types(self, "evaluation")
        require_at_least(self, "evaluation", 0, "interval", "limit")
        if len(set(self.tasks)) < len(self.tasks):
            raise field_error(self, "evaluation", "tasks", "duplicate task", "list each task once")
        for name in ("tasks_dir", "interval", "limit"):
            is_used = bool(self.tasks) or (name == "interval" and self.stores)
            if not is_used and getattr(self, name) != getattr(EvaluationOptions, name):
                problem = "has no effect without evaluation.tasks"
                raise field_error(self, "evaluation", name, problem, "set evaluation.tasks, or remove it")
