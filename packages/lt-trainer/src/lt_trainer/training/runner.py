"""One run from a resolved recipe to an exit code: check, open, resume, train, close.

Checks run from cheap to expensive and before anything is loaded or written: recipe against ranks and engine, data
against recipe (`run_setup`), then run directory and engine (`run_context`), then the checkpoint folder and the
checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial

from lt_trainer.checkpointing.mirror import StopRequested
from lt_trainer.checkpointing.resume import RunRestorer
from lt_trainer.config.recipe import ResolvedRecipe, complete
from lt_trainer.config.sections import WHOLE_VALIDATION
from lt_trainer.constants import EXIT_DONE, EXIT_REQUEUE, GIB
from lt_trainer.data.training_data import ValidationSet, validation_batches
from lt_trainer.engine import Engine
from lt_trainer.errors import PeerError
from lt_trainer.evaluation.scorer import BatchShape
from lt_trainer.evaluation.store_losses import StoreResult, StoreText, evaluate_store
from lt_trainer.evaluation.tasks import EncodedTask, TaskResult, evaluate_task
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.training.loop import EvaluationTask, LoopResult, TrainingLoop, ValidationTask
from lt_trainer.training.run_context import Logger, RunContext
from lt_trainer.training.run_setup import RunSetup, evaluation_shape


def run(
    resolved: ResolvedRecipe,
    *,
    environ: Mapping[str, str] | None = None,
    stop: StopSignals | None = None,
    stop_after_step: int = 0,
    verify_resume_steps: int = 0,
) -> int:
    """Train in this process, as one rank of the world that the environment describes.

    Args:
        resolved: recipe with origins.
        environ: environment variables that describe the world; default `os.environ`.
        stop: installed signal handlers; None installs them for the duration of the run.
        stop_after_step: stop after this step as on SIGTERM; 0 for never.
        verify_resume_steps: steps to run beyond the save of such a stop; they are logged to resume_check.jsonl and
            saved nowhere, to verify that a resume is exact.

    Returns:
        0 if all steps are done; 75 if stopped and saved. With a mirror that misses the last checkpoint also 75, or 64
        if the upload needs user action.

    Raises:
        TrainerError: see its subclasses; also the errors of lt-data, lt-model and lt-ckpt. Each has an `exit_code`.
    """
    resolved = complete(resolved)
    setup = RunSetup.create(resolved, os.environ if environ is None else environ)
    with ExitStack() as stack:
        context = RunContext.open(stack, setup, resolved, stop)
        try:
            loop = _create_loop(stack, setup, context)
            result = loop.run(stop_after_step=stop_after_step, verify_resume_steps=verify_resume_steps)
            mirror_code = context.mirror.finish()
        except StopRequested as exc:
            result, mirror_code = LoopResult(step=0, stop_signal=exc.number), EXIT_DONE
        except PeerError as exc:
            raise PeerError(
                f"{exc}; {context.watchdog.diagnose()}; saved checkpoints are intact: rerun to resume from the newest"
            ) from exc
        return _log_end(result, context.logger) or mirror_code


def _create_loop(stack: ExitStack, setup: RunSetup, context: RunContext) -> TrainingLoop:
    """Return the loop at the restored position; the stack closes its batches."""
    recipe, engine, logger = setup.recipe, context.engine, context.logger
    _preflight_checkpoints(context)
    context.saver.reserve_memory()
    restorer = RunRestorer(
        recipe=recipe,
        data=setup.data,
        engine=engine,
        checkpoint_manager=context.checkpoints,
        logger=logger,
        mirror=context.mirror,
        model=setup.model,
        heartbeat=context.watchdog.heartbeat,
    )
    engine.stopwatch.begin("checkpoint")
    batches = restorer.restore_or_start()
    engine.stopwatch.begin("rest")
    stack.enter_context(closing(batches))
    context.mirror.start()
    logger.unpause()
    return TrainingLoop(
        recipe=recipe,
        engine=engine,
        batches=batches,
        logger=logger,
        stop=context.stop,
        watchdog=context.watchdog,
        checkpointer=context.saver,
        rollback=restorer.rollback,
        validation=[
            ValidationTask(
                name=dataset.name,
                text_bytes=dataset.text_bytes,
                batches=partial(
                    validation_batches,
                    dataset.reader,
                    engine.topology,
                    recipe.batch.micro_batch_size,
                    dataset.rows,
                ),
            )
            for dataset in restorer.data.validation
        ],
        evaluation=[
            EvaluationTask(name=task.task.name, evaluate=partial(_evaluate, engine, task, evaluation_shape(recipe)))
            for task in setup.tasks
        ]
        + [
            EvaluationTask(
                name=dataset.name or WHOLE_VALIDATION,
                evaluate=partial(_evaluate_store, engine, dataset, evaluation_shape(recipe), _text_of(engine, dataset)),
            )
            for dataset in (restorer.data.validation if recipe.evaluation.stores else ())
        ],
    )


def _evaluate(engine: Engine, task: EncodedTask, shape: BatchShape, on_batch: Callable[[int, int], None]) -> TaskResult:
    return evaluate_task(engine, task, shape, on_batch=on_batch)


def _text_of(engine: Engine, dataset: ValidationSet) -> StoreText:
    topology = engine.topology
    return StoreText(store=dataset.reader.store, rank=topology.rank, world_size=topology.world_size)


def _evaluate_store(
    engine: Engine,
    dataset: ValidationSet,
    shape: BatchShape,
    text: StoreText,
    on_batch: Callable[[int, int], None],
) -> StoreResult:
    name = dataset.name or WHOLE_VALIDATION
    losses = evaluate_store(engine, dataset.reader, shape, name=name, text=text, on_batch=on_batch)
    return StoreResult(task=name, losses=tuple(losses))


def _preflight_checkpoints(context: RunContext) -> None:
    report = context.checkpoints.preflight(context.engine)
    if report.buffered_io_reason:
        context.logger.log_message(
            f"checkpoints are written through the page cache, which may be slower: {report.buffered_io_reason}"
        )
    if missing := context.checkpoints.missing_bytes(report):
        context.logger.log_message(
            f"warning: the checkpoints that this run keeps need {missing / GIB:.1f} GiB more than is free in "
            f"{context.checkpoints.root} ({report.required_bytes / GIB:.1f} GiB each); free space, lower "
            "checkpoint.keep_last, or raise checkpoint.keep_every"
        )


def _log_end(result: LoopResult, logger: Logger) -> int:
    if result.stop_signal:
        name = signal.Signals(result.stop_signal).name
        logger.log_event("stop", step=result.step, signal=name)
        logger.log_message(f"stopped by {name} after step {result.step}; rerun to resume")
        return EXIT_REQUEUE
    logger.log_event("completed", step=result.step)
    logger.log_message(f"training completed at step {result.step}")
    return EXIT_DONE
