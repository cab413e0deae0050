"""Tasks and validation sets of `[evaluation]`, scored on the engine while a run pauses.

Tasks are read and encoded before a device is opened. All ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lt_data import Tokenizer
from lt_trainer.config.sections import WHOLE_VALIDATION
from lt_trainer.errors import RecipeError
from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.store_losses import StoreResult, StoreText, evaluate_store
from lt_trainer.evaluation.tasks import EncodedTask, TaskResult, evaluate_task, find_tasks

if TYPE_CHECKING:
    from lt_trainer.config.sections import Recipe
    from lt_trainer.data.training_data import TrainingData
    from lt_trainer.engine import Engine


@dataclass(kw_only=True)
class RunEvaluation:
    """What a run evaluates: tasks, and with evaluation.stores its validation sets by source and length."""

    shape: BatchShape
    """Rows of a batch: those of a micro-batch."""
    tasks: tuple[EncodedTask, ...]
    stores: bool
    _texts: dict[str, StoreText] = field(default_factory=dict)
    """Bytes of text of each validation set, read once."""

    @staticmethod
    def read(recipe: Recipe, data: TrainingData) -> RunEvaluation:
        """Read and encode the tasks of a recipe.

        Raises:
            RecipeError: no such task, or a file that is not a task.
        """
        options, batch = recipe.evaluation, recipe.batch.micro_batch_size
        shape = BatchShape(micro_batch_size=batch, seq_len=recipe.data.seq_len, document_mask=recipe.data.document_mask)
        tasks: tuple[EncodedTask, ...] = ()
        try:
            if options.tasks:
                encoder = PairEncoder(Tokenizer.from_bytes(data.tokenizer_files))
                found = find_tasks(options.tasks, options.tasks_dir, limit=options.limit)
                tasks = tuple(EncodedTask.encode(task, encoder, shape) for task in found)
        except EvaluationError as exc:
            raise RecipeError(str(exc), values={"evaluation.tasks": options.tasks}) from exc
        return RunEvaluation(shape=shape, tasks=tasks, stores=options.stores)

    def __bool__(self) -> bool:
        """Return True if there is anything to evaluate."""
        return bool(self.tasks) or self.stores

    def results(
        self, engine: Engine, data: TrainingData, report: Callable[[str, int, int], None]
    ) -> Iterator[TaskResult | StoreResult]:
        """Yield the result of each task and validation set, equal on all ranks; collective.

        Args:
            engine: Engine of the run.
            data: Data of the run.
            report: Called for each batch with the name of the task and the number of batches done and of all.
        """
        for task in self.tasks:
            yield evaluate_task(engine, task, self.shape, on_batch=partial(report, task.task.name))
        for dataset in data.validation if self.stores else ():
            name = dataset.name or WHOLE_VALIDATION
            if name not in self._texts:
                topology = engine.topology
                self._texts[name] = StoreText(
                    store=dataset.reader.store, rank=topology.rank, world_size=topology.world_size
                )
            text, on_batch = self._texts[name], partial(report, name)
            losses = evaluate_store(engine, dataset.reader, self.shape, name=name, text=text, on_batch=on_batch)
            yield StoreResult(task=name, losses=tuple(losses))
