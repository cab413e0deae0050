"""`lt train check`: a whole start of a run, one step, one save and restore; it leaves nothing behind.

A run is opened as in training, in a scratch folder beside run.dir, without sinks; its mirror is only looked at. It
starts from the newest checkpoint of the run on this machine, if there is one. After one step and a save, the next step
must have the same loss once more after a restore. An error that would end a run ends the check, with the same message
and exit code.

Cost: the start of the run, three steps, and one checkpoint written and read.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lt_trainer.checkpointing.mirror import check_mirror
from lt_trainer.checkpointing.resume import restore_or_start
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.recipe import ResolvedRecipe, complete
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import GIB
from lt_trainer.data.batches import describe_held_rows
from lt_trainer.engine import StepMetrics, StepParts, World
from lt_trainer.errors import TrainerError
from lt_trainer.resilience.rank_sync import run_on_rank0
from lt_trainer.resilience.stop_signals import StopSignals, install_handlers, restore_handlers
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.run import Run, open_run, read_inputs

SCRATCH_SUFFIX = ".lt-check"
MAX_STEPS_WITHOUT_LABELS = 20
"""Steps that may follow one another without a label, each of which changes nothing."""


class CheckError(TrainerError):
    """Error that a run itself would not notice."""


def check_run(resolved: ResolvedRecipe, world: World) -> None:
    """Test the start of a run, as one rank of the world.

    Raises:
        TrainerError: any error of a run's start; also those of lt-data, lt-model and lt-ckpt.
    """
    resolved = complete(resolved)
    recipe, out = resolved.recipe, Path(resolved.recipe.run.dir)
    inputs = read_inputs(resolved, world)  # those of the run itself, with its sinks and mirror
    home = next(folder for folder in out.absolute().parents if folder.exists())
    scratch = home / f".{out.name}{SCRATCH_SUFFIX}"
    changes = {"run": {"dir": str(scratch)}, "metrics": {"sinks": ()}, "checkpoint": {"mirror_url": ""}}
    tables = {name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()}
    elsewhere = replace(resolved, recipe=recipe.model_copy(update=tables))
    with ExitStack() as stack:
        # Ctrl-C deletes the folder; so do the other stop signals.
        stack.callback(restore_handlers, install_handlers(signal.default_int_handler))
        if world.rank == 0:
            RunDir.check(out)
            shutil.rmtree(scratch, ignore_errors=True)  # of a check that was killed
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        run = stack.enter_context(open_run(elsewhere, world, stop=StopSignals(), inputs=inputs))
        if recipe.checkpoint.mirror_url:
            found = run_on_rank0(run.engine.control, world.rank == 0, lambda: check_mirror(recipe))
            run.log.log_message(f"check: mirror: {found}")
        run.checkpoints.root = out / "checkpoints"
        restore_or_start(run)
        run.checkpoints.root = scratch / "checkpoints"
        if run.batches.state.step < recipe.schedule.max_steps:
            _check_steps(run)
        else:
            run.log.log_message(f"check: all {recipe.schedule.max_steps} steps are done, a run would end at once")


def _check_steps(run: Run) -> None:
    recipe, engine, say = run.recipe, run.engine, run.log.log_message

    def step(batch: StepParts, number: int) -> StepMetrics:
        rate = learning_rate(number, recipe.schedule, recipe.optimizer.lr)
        (metrics,) = engine.fetch_metrics([engine.step(batch, rate)])
        return metrics

    say(f"check: {describe_held_rows(recipe, engine.topology.dp_size)}")
    batch = _next_batch_with_labels(run)
    first = run.batches.state.step - 1
    began = time.monotonic()
    metrics = step(batch, first)
    say(
        f"check: step {first + 1} in {time.monotonic() - began:.1f} s: loss {metrics.loss:.4f} (uniform prediction: "
        f"{math.log(run.model.vocab_size):.4f}), grad_norm {metrics.grad_norm:.4g}, peak memory "
        f"{engine.peak_memory_bytes() / GIB:.2f} GiB"
    )
    _check_finite(recipe, first + 1, metrics)
    began = time.monotonic()
    run.checkpoints.save(run.batches.checkpoint_state(), wait=True)
    seconds, grace_s = time.monotonic() - began, recipe.fault_tolerance.grace_period_s
    say(f"check: saved a checkpoint in {seconds:.1f} s")
    if seconds > grace_s:
        say(
            "warning: a stop would be killed before its save is complete; raise fault_tolerance.grace_period_s = "
            f"{grace_s:g}, and the time between your scheduler's signal and SIGKILL"
        )
    following = _next_batch_with_labels(run)
    second = run.batches.state.step - 1
    expected = step(following, second)
    _check_finite(recipe, second + 1, expected)
    saved = run.checkpoints.find_latest()
    if saved is None:
        raise CheckError(f"{run.checkpoints.root}: the file system does not keep written data")
    engine.restore(saved)
    restored = step(following, second)
    if not math.isclose(restored.loss, expected.loss, rel_tol=1e-3):
        raise CheckError(f"the step after a restore has loss {restored.loss}, without it {expected.loss}")
    say(f"check: restored; the next step has loss {restored.loss!r}, without it {expected.loss!r}")
    say("check: nothing was left behind")


def _check_finite(recipe: Recipe, number: int, metrics: StepMetrics) -> None:
    """Refuse a step, numbered from 1, without a finite loss and gradient norm."""
    if not metrics.is_finite:
        raise CheckError(
            f"step {number} has loss {metrics.loss} and grad_norm {metrics.grad_norm} (optimizer.lr = "
            f"{recipe.optimizer.lr}): lower optimizer.lr or lengthen schedule.warmup_steps, compute in another dtype, "
            "or inspect the data"
        )


def _next_batch_with_labels(run: Run) -> StepParts:
    """Return the next batch that a run would train on."""
    for _ in range(MAX_STEPS_WITHOUT_LABELS):
        batch = run.batches.next_batch()
        if batch.valid_tokens:
            return batch
        run.log.log_message(f"check: step {run.batches.state.step} has no labels, so a run trains nothing in it")
    last = run.batches.state.step
    first = last - MAX_STEPS_WITHOUT_LABELS + 1
    raise CheckError(f"steps {first} to {last} have no labels, so nothing would be trained; inspect the data")
