"""Tasks and validation sets of `[evaluation]`, scored on the engine while a run pauses.

Tasks and their data are read before a device is opened. All ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lt_data import Tokenizer
from lt_trainer.config.sections import WHOLE_VALIDATION
from lt_trainer.errors import RecipeError
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, TaskResult
from lt_trainer.evaluation.store_losses import evaluate_store

if TYPE_CHECKING:
    from lt_trainer.config.sections import EvaluationOptions, Recipe
    from lt_trainer.data.training_data import TrainingData
    from lt_trainer.engine import Engine


@dataclass(kw_only=True)
class RunEvaluation:
    """What a run evaluates: tasks, and with evaluation.stores its validation sets by source and length."""

    shape: BatchShape
    """Rows of a batch: those of a micro-batch."""
    tasks: Mapping[str, Any]
    """Loaded tasks of lm-evaluation-harness; empty without evaluation.tasks."""
    options: EvaluationOptions

    def __bool__(self) -> bool:
        """Return True if there is anything to evaluate."""
        return bool(self.tasks) or self.options.stores

    @staticmethod
    def read(recipe: Recipe) -> RunEvaluation:
        """Read the tasks of a recipe.

        Raises:
            RecipeError: no such task, one that asks for generated text, or lm-evaluation-harness is not installed.
        """
        options, batch, tasks = recipe.evaluation, recipe.batch.micro_batch_size, {}
        shape = BatchShape(micro_batch_size=batch, seq_len=recipe.data.seq_len, document_mask=recipe.data.document_mask)
        if options.tasks:
            try:
                from lt_trainer.evaluation.harness import load_tasks

                tasks = load_tasks(options.tasks, include_path=options.include_path)
            except EvaluationError as exc:
                raise RecipeError(str(exc), values={"evaluation.tasks": options.tasks}) from exc
        return RunEvaluation(shape=shape, tasks=tasks, options=options)

    def results(
        self, engine: Engine, data: TrainingData, report: Callable[[str, int, int], None]
    ) -> Iterator[TaskResult]:
        """Yield the result of each task and validation set, equal on all ranks; collective.

        Args:
            engine: Engine of the run.
            data: Data of the run.
            report: Called for each batch with what is evaluated and the number of batches done and of all.
        """
        if self.tasks:
            from lt_trainer.evaluation.harness import HarnessModel, run_tasks

            tokenizer = Tokenizer.from_bytes(data.tokenizer_files)
            model = HarnessModel(engine, tokenizer, self.shape, on_batch=partial(report, "tasks"))
            yield from run_tasks(model, self.tasks, limit=self.options.limit)
        for dataset in data.validation if self.options.stores else ():
            name = dataset.name or WHOLE_VALIDATION
            items = evaluate_store(engine, dataset.reader, self.shape, name=name, on_batch=partial(report, name))
            metrics = {metric: items[0][metric] for metric in ("loss", "perplexity", "bits_per_byte")}
            yield TaskResult(task=name, n_items=items[0]["documents"], metrics=metrics, items=items)
