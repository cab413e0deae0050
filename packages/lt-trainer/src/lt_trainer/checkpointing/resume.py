"""Restores a run from its newest valid checkpoint, at the start and on rollbacks.

Each time, an event `data` records which rows the following steps read: the position, the recipe's sections `data` and
`batch`, and the fingerprints of the stores. So `lt train inspect` can find the documents of any step later.

A store that was appended to is read as the checkpoint has read it (`lt_trainer.data.generations`).

Rank 0 verifies a checkpoint before the others read it. Where a rank finds damage all the same while it reads its part,
all ranks take the next older valid checkpoint, which overwrites what they have read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.lt_format import hf_model_files
from lt_data import DataError
from lt_trainer.config.recipe import to_dict
from lt_trainer.data.batches import open_batches
from lt_trainer.data.generations import changed_generations, reopen_data, resume_state
from lt_trainer.errors import RecipeError, RestoreError
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_trainer.training.run import Run


def restore_or_start(run: Run) -> None:
    """Restore the newest valid checkpoint, or start from initial weights; open the batches there.

    Downloads the newest checkpoint of the mirror if it is newer.

    Raises:
        RecipeError: there are checkpoints, but checkpoint.resume is false; or they have another model, other data, or
            more steps.
        MirrorError: the mirror is another run's, or is required but unavailable.
        StopRequested: a stop signal was received during the download.
    """
    newest, log = run.checkpoints.find_latest(), run.log
    downloaded = run.mirror.download_latest(newest)
    if downloaded is not None:  # verified during the download
        newest = Checkpoint.open(downloaded)
    if newest is None:
        _open_batches(run, None)
        _log_data_event(run)
        if run.recipe.model.init_from:
            _load_pretrained(run)
        return
    if not run.recipe.checkpoint.resume:
        raise RecipeError(
            f"run.dir = {format_value(run.recipe.run.dir)} already has checkpoints (newest: {newest.path.name})",
            values={"checkpoint.resume": run.recipe.checkpoint.resume},
            remedy="set run.dir to a new folder for a new run, or remove checkpoint.resume to resume",
        )

    def open_data(saved: Mapping[str, Any]) -> None:
        try:
            run.data = reopen_data(run.recipe, run.data, saved)
            _open_batches(run, saved)
        except DataError as exc:
            raise RecipeError(
                f"the run there cannot continue with this recipe's data: {exc}",
                values={"run.dir": run.recipe.run.dir},
                remedy="or set run.dir to a new folder for a new run",
            ) from exc

    if newest.step > run.recipe.schedule.max_steps:
        raise RecipeError(
            f"the run in run.dir has done {newest.step} steps already",
            values={"schedule.max_steps": run.recipe.schedule.max_steps, "run.dir": run.recipe.run.dir},
            remedy=f"set schedule.max_steps to {newest.step} or more, or run.dir to a new folder",
        )
    checkpoint = _restore(run, newest, open_data)
    run.checkpoints.hf_files = dict(checkpoint.hf_files())
    run.has_trained = int(checkpoint.manifest.scalars["optimizer_step"]) > 0
    log.log_event("resume", step=checkpoint.step, path=str(checkpoint.path))
    log.log_message(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    for field, path in run.recipe.data.store_paths().items():
        if (reads := run.data.paths[field]) != path:
            words = "as before, although the store has a newer generation; name that in the recipe to take it"
            log.log_message(f"{field}: reads {reads}, {words}")
    for field, (before, now) in changed_generations(run.recipe, run.data, checkpoint.manifest.data).items():
        log.log_message(f"{field}: from step {checkpoint.step + 1} on {now}, before {before}")
    saved = checkpoint.manifest
    rows = run.recipe.batch.micro_batch_size * run.engine.topology.dp_size
    rows_before = saved.recipe["batch"]["micro_batch_size"] * saved.layout["dp_size"]
    if run.model.has_experts and rows != rows_before:
        log.log_message(f"experts are balanced over the {rows} rows of a pass on all ranks, before over {rows_before}")


def rollback(run: Run) -> bool:
    """Restore the newest checkpoint; the batches return to its step, after the rows already read.

    Returns:
        Whether there is a checkpoint.

    Raises:
        RestoreError: a rank cannot read its part, and there is no older checkpoint.
    """
    newest, batches = run.checkpoints.find_latest(), run.batches
    if newest is None:
        return False
    from_step = batches.state.step

    checkpoint = _restore(run, newest, lambda saved: batches.rollback(resume_state(run.recipe, run.data, saved)))
    first, last = batches.state.skipped[-1]
    run.log.log_event("rollback", step=checkpoint.step, from_step=from_step, rows=[first, last])
    run.log.log_message(
        f"rollback from step {from_step} to {checkpoint.path.name}; skipping the rows at positions {first} to "
        f"{last - 1}"
    )
    return True


def _restore(run: Run, newest: Checkpoint, open_at: Callable[[Mapping[str, Any]], None]) -> Checkpoint:
    """Restore a checkpoint or, where a rank cannot read its part, an older one; return the one restored.

    Args:
        run: Open run.
        newest: Checkpoint to try first.
        open_at: Opens the batches at a data state; raises before tensors are read.

    Raises:
        RestoreError: no older checkpoint can be read either.
    """
    checkpoint, unreadable = newest, list[Path]()
    while True:
        open_at(run.checkpoints.data_state(checkpoint.manifest, str(checkpoint.path)))
        try:
            run.engine.restore(checkpoint)
        except RestoreError as exc:
            run.log.log_message(f"checkpoint {checkpoint.path} is not used: {exc}")
            unreadable.append(checkpoint.path)
            older = run.checkpoints.find_latest(unreadable)
            if older is None:
                raise
            checkpoint = older
        else:
            _log_data_event(run)
            return checkpoint


def _open_batches(run: Run, saved: Mapping[str, Any] | None) -> None:
    run.checkpoints.stores = dict(run.data.fingerprints)
    run.close_batches()
    run.opened_batches = open_batches(run.recipe, run.data, run.engine.topology, run.engine.control, saved)


def _load_pretrained(run: Run) -> None:
    from lt_trainer.checkpointing.pretrained import open_pretrained  # most runs need none of its formats

    options, engine = run.recipe.model, run.engine
    pretrained = open_pretrained(
        options,
        run.model,
        run.data.tokenizer_files,
        engine.control,
        engine.topology.rank,
        run.watchdog.heartbeat,
        verifies=run.world.local_rank == 0,
    )
    engine.load_weights(pretrained)
    pretrained.check_finite(engine.control)
    source = pretrained.source
    run.checkpoints.hf_files = hf_model_files(source)
    values = {"format": source.format, **source.format_info}
    run.log.log_event("init_from", address=options.init_from, model=values)
    run.log.log_message(pretrained.describe())


def _log_data_event(run: Run) -> None:
    """Log the event that identifies the rows of the following steps."""
    run.log.log_event(
        "data",
        dp_size=run.engine.topology.dp_size,
        stores=run.data.fingerprints,
        **run.batches.state.to_dict(),
        **{name: table for name, table in to_dict(run.recipe).items() if name in ("data", "batch")},
    )
