"""`lt train check`: preflight of a run, a whole start that leaves nothing behind.

It does what a run does, in the same order and with the same code: recipe, ranks, data, run directory, devices, sinks,
checkpoint folder, the start (the newest checkpoint, model.init_from or initial weights), one step, one save. The save
goes into a scratch folder on the file system of the checkpoints, is verified and restored, and the next step must have
the same loss twice. Then the scratch folder is deleted. An error that would end a run ends the preflight, with the same
message and exit code. Only a checkpoint that is newer in the mirror is not downloaded.

Cost: the start of the run, two more steps, and one checkpoint written and read.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lt_ckpt import Checkpoint, CheckpointError, list_steps, verify
from lt_data import Mixture
from lt_data.display.terminal import escape_controls
from lt_model import param_specs
from lt_trainer.checkpointing.async_saver import CheckpointSaver
from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager, max_checkpoints_on_disk
from lt_trainer.checkpointing.mirror import check_mirror
from lt_trainer.checkpointing.resume import RunRestorer
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.recipe import ResolvedRecipe, complete, to_dict
from lt_trainer.constants import GIB, MIB
from lt_trainer.data.batches import Batches, open_batches
from lt_trainer.data.synthetic import SyntheticRows
from lt_trainer.engine import Engine, StepBatch, StepMetrics
from lt_trainer.errors import TrainerError
from lt_trainer.resilience.rank_sync import run_on_rank0
from lt_trainer.resilience.stop_signals import install_handlers, restore_handlers
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.run_setup import RunSetup

SCRATCH_PREFIX = ".lt-run.preflight-"


class PreflightError(TrainerError):
    """Error that a run itself would not notice."""


@dataclass
class PreflightTable:
    """Rows of the results, printed one by one on rank 0."""

    is_rank0: bool
    print: Callable[[str], None] = print
    lines: list[str] = field(default_factory=list)

    @contextmanager
    def row(self, name: str) -> Iterator[list[str]]:
        """Add a row with the texts that the block appends to the list; an error marks it as failed."""
        words: list[str] = []
        status = "FAILED"
        try:
            yield words
            status = "ok"
        finally:
            self.lines.append(escape_controls(f"{status:<7} {name:<14} {'; '.join(words)}".rstrip(), keep=""))
            if self.is_rank0:
                self.print(self.lines[-1])


def run_preflight(resolved: ResolvedRecipe, *, environ: Mapping[str, str] | None = None) -> list[str]:
    """Test the start of a run, as one rank of the world that the environment describes.

    Returns:
        Rows of the table, which rank 0 also prints.

    Raises:
        TrainerError: any error of a run's start; also those of lt-data, lt-model and lt-ckpt.
    """
    environ = os.environ if environ is None else environ
    table = PreflightTable(is_rank0=environ.get("RANK", "0") == "0")
    with table.row("recipe and data") as words:
        resolved = complete(resolved)
        setup = RunSetup.create(resolved, environ)
        given = sum(resolved.is_given(name) for name in resolved.origins)
        words += [f"{given} values set, the rest defaults", f"engine {setup.recipe.run.engine}"]
    recipe, world, out = setup.recipe, setup.world, Path(setup.recipe.run.dir)
    with table.row("ranks") as words:
        words += [
            f"{world.size} on {world.n_nodes} node(s)",
            f"{recipe.accumulation_steps(world.size)} micro-batches per step",
        ]
    _describe_data(setup, table)
    with table.row("model") as words:
        count = sum(math.prod(parameter.shape) for parameter in param_specs(setup.model))
        words.append(f"{count} parameters, {setup.model.n_layers} layers of width {setup.model.hidden_size}")
    with table.row("run directory") as words:
        words.append(RunDir.describe(out))
        newest = list_steps(out / "checkpoints")
        if newest:
            words.append(f"newest checkpoint {newest[0][1].name}")
    with ExitStack() as stack:
        with table.row("engine") as words:
            start = time.monotonic()
            engine = setup.open_engine()
            stack.callback(engine.close)
            words += [f"{engine.device.count} x {engine.device.name}", f"open in {time.monotonic() - start:.1f} s"]
        _check_services(setup, engine, table)
        folder = Path(run_on_rank0(engine.control, world.rank == 0, lambda: str(_make_scratch(out / "checkpoints"))))
        if world.rank == 0:
            stack.callback(shutil.rmtree, folder)
            # Ctrl-C deletes the folder; so do the other stop signals.
            stack.callback(restore_handlers, install_handlers(signal.default_int_handler))
        checkpoints = setup.checkpoint_manager(folder)
        with table.row("folder") as words:
            report = checkpoints.preflight(engine)
            words += [
                f"every rank can write in the folder of {out}",
                f"{_format_size(report.free_bytes)} free, a checkpoint needs {_format_size(report.required_bytes)}, at "
                f"most {max_checkpoints_on_disk(recipe)} are kept",
            ]
            missing = setup.checkpoint_manager(out / "checkpoints").missing_bytes(report)
            if missing:
                words.append(f"warning: {_format_size(missing)} too little free space to keep them all")
        _reserve(setup, engine, checkpoints, table)
        _step_and_save(setup, engine, checkpoints, table)
    with table.row("left behind") as words:
        words.append("nothing")
    return table.lines


@dataclass(frozen=True, kw_only=True)
class _RowLogger:
    """Logger that adds messages to a row of the table."""

    words: list[str]

    def log_message(self, text: str) -> None:
        self.words.append(text)

    def log_event(self, kind: str, **values: object) -> None:
        """Do nothing: a preflight has no events."""


def _check_services(setup: RunSetup, engine: Engine, table: PreflightTable) -> None:
    """Check the mirror on rank 0."""
    recipe, is_rank0 = setup.recipe, setup.world.rank == 0

    def check_bucket() -> str:
        return check_mirror(recipe, to_dict(recipe))

    if recipe.checkpoint.mirror_url:
        with table.row("mirror") as words:
            words.append(run_on_rank0(engine.control, is_rank0, check_bucket))


def _describe_data(setup: RunSetup, table: PreflightTable) -> None:
    recipe, rows = setup.recipe, setup.data.train
    ramp, steps = recipe.batch.batch_ramp(recipe.data.seq_len), recipe.schedule.max_steps
    n_rows = steps * recipe.batch.global_batch_size if ramp is None else ramp.rows_before(steps)
    with table.row("data") as words:
        if rows is None or isinstance(rows, SyntheticRows):
            words.append(f"rows of {recipe.data.loader}" if recipe.data.loader else "synthetic rows")
            words += [f"vocabulary {setup.data.vocab_size}", f"the run reads {n_rows} rows"]
        elif isinstance(rows, Mixture):
            words.append(f"a mixture of {len(rows.names)} sources, vocabulary {setup.data.vocab_size}")
            words.append(f"the run reads {n_rows} rows of {rows.seq_len} ({recipe.data.packing})")
            words += [f"{name}: {epochs:.2f} epochs" for name, epochs in rows.epochs(n_rows).items()]
        else:
            store = rows.store
            words += [
                f"{store.n_documents} documents, {store.n_tokens} tokens, vocabulary {setup.data.vocab_size}",
                f"{rows.n_rows} rows of {rows.seq_len} ({recipe.data.packing})",
                f"the run reads {n_rows} rows, {n_rows / rows.n_rows:.2f} epochs",
            ]
    for dataset in setup.data.validation:
        with table.row(f"validation {dataset.name}".rstrip()) as words:
            reader = dataset.reader
            words.append(f"{reader.n_rows} rows of {reader.seq_len}, {dataset.text_bytes} bytes of text")


def _reserve(setup: RunSetup, engine: Engine, checkpoints: CheckpointManager, table: PreflightTable) -> None:
    if setup.recipe.checkpoint.async_save:
        with table.row("async save") as words:
            CheckpointSaver(
                checkpoints, engine, on_saved=lambda step, path: None, heartbeat=lambda: None
            ).reserve_memory()
            words.append(f"{_format_size(engine.state_bytes())} of host memory for the copy of a rank's state")


def _step_and_save(setup: RunSetup, engine: Engine, checkpoints: CheckpointManager, table: PreflightTable) -> None:
    with table.row("start") as words:
        restorer = RunRestorer(
            recipe=setup.recipe,
            data=setup.data,
            engine=engine,
            checkpoint_manager=setup.checkpoint_manager(setup.folder / "checkpoints"),
            logger=_RowLogger(words=words),
            mirror=None,
            model=setup.model,
            heartbeat=lambda: None,
        )
        batches = restorer.restore_or_start()
        if not words:
            words.append(f"initial weights of run.seed = {setup.recipe.run.seed}")
    with closing(batches):
        if batches.state.step >= setup.recipe.schedule.max_steps:
            with table.row("one step") as words:
                words.append(f"none: all {setup.recipe.schedule.max_steps} steps are done, a run would end at once")
            return
        _step_save_restore(setup, engine, checkpoints, table, batches)


def _step_save_restore(
    setup: RunSetup, engine: Engine, checkpoints: CheckpointManager, table: PreflightTable, batches: Batches
) -> None:
    recipe = setup.recipe

    def step(batch: StepBatch, number: int) -> tuple[StepMetrics, float]:
        start = time.monotonic()
        rate = learning_rate(number, recipe.schedule, recipe.optimizer.lr)
        (metrics,) = engine.fetch_metrics([engine.step(batch, rate)])
        return metrics, time.monotonic() - start

    with table.row("one step") as words:
        first = batches.state.step
        metrics, seconds = step(batches.next_batch(), first)
        uniform = math.log(setup.data.vocab_size)
        words += [
            f"loss {metrics.loss:.4f} (uniform prediction: {uniform:.4f})",
            f"grad_norm {metrics.grad_norm:.4g}",
            f"{seconds:.1f} s for the first",
            f"peak memory {_format_size(engine.peak_memory_bytes())}",
        ]
        if not metrics.is_finite:
            raise PreflightError(
                f"the first step has loss {metrics.loss} and grad_norm {metrics.grad_norm}; compute in another dtype, "
                "or inspect the data"
            )
    position = batches.checkpoint_state()
    with table.row("one save") as words:
        start = time.monotonic()
        path = checkpoints.save(engine, position)
        seconds = time.monotonic() - start
        words += [f"{seconds:.1f} s", f"fault_tolerance.grace_period_s is {recipe.fault_tolerance.grace_period_s:g} s"]
        if seconds > recipe.fault_tolerance.grace_period_s:
            words.append(
                "warning: a stop would be killed before its save is complete; raise fault_tolerance.grace_period_s, "
                "and the time between your scheduler's signal and SIGKILL"
            )
    with table.row("read back") as words:
        following = batches.next_batch()
        expected, seconds = step(following, first + 1)
        words.append(f"a step takes {seconds:.2f} s")
        if setup.world.rank == 0:
            report = verify(path)
            if not report.is_loadable:
                raise CheckpointError(
                    f"{path}: {'; '.join(report.problems)}; the file system does not keep written data"
                )
        checkpoint = Checkpoint.open(path)
        engine.restore(checkpoint)
        if recipe.data.source_kind != "loader":  # a loader without a state cannot be opened there
            state = checkpoints.data_state(checkpoint)
            with closing(open_batches(recipe, setup.data, engine.topology, engine.control, state)) as opened:
                following = opened.next_batch()
        restored, _ = step(following, first + 1)
        words.append(f"loss of the next step {expected.loss!r}, after a restore {restored.loss!r}")
        if not math.isclose(restored.loss, expected.loss, rel_tol=1e-3):
            raise PreflightError(f"the step after a restore has loss {restored.loss}, without it {expected.loss}")


def _format_size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def _make_scratch(out: Path) -> Path:
    """Create a scratch folder on the file system of `out`, which may not exist yet."""
    home = out
    while not home.is_dir() and home != home.parent:
        home = home.parent
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=home))
    except OSError as exc:
        raise TrainerError(
            f"run.dir = {str(out)!r}: cannot write in {home}: {exc.strerror}; choose a writable folder"
        ) from exc
