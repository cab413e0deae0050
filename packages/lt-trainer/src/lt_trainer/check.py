"""`lt train check`: a whole start that leaves nothing behind.

It does what a run does, in the same order and with the same code: recipe, ranks, data, run directory, devices, the
checkpoint folder, one step, one save. The save goes into a scratch folder on the file system of run.out, is verified
and restored, and the step after it must give the same loss twice. Then the scratch folder is removed. What would end a
run ends the check, with the same message and exit code, behind the lines of what was found good.

Cost: the start of the run, two steps more, and one checkpoint written and read.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lt_ckpt import Checkpoint, CheckpointError, list_steps, verify
from lt_data import Mixture
from lt_model import parameters
from lt_trainer.batches import Batches, open_batches
from lt_trainer.engine import Engine, StepBatch, StepMetrics
from lt_trainer.errors import TrainerError
from lt_trainer.journal import GIB
from lt_trainer.mirroring import describe
from lt_trainer.recipe import Resolved, to_dict
from lt_trainer.run import Plan
from lt_trainer.rundir import RunDir
from lt_trainer.saver import Saver
from lt_trainer.saving import Checkpoints, checkpoints_held
from lt_trainer.schedule import lr as learning_rate
from lt_trainer.synthetic import SyntheticRows
from lt_trainer.together import together

SCRATCH = ".lt-run.check-"


class CheckError(TrainerError):
    """Something that a run would not notice by itself."""


@dataclass
class Table:
    """Lines of what was checked, printed one by one on rank 0."""

    show: bool
    print: Callable[[str], None] = print
    lines: list[str] = field(default_factory=list)

    @contextmanager
    def row(self, name: str) -> Iterator[list[str]]:
        """A line; what the block appends to the list stands in it. An error marks the line and goes on."""
        words: list[str] = []
        mark = "FAILED"
        try:
            yield words
            mark = "ok"
        finally:
            self.lines.append(f"{mark:<7} {name:<14} {'; '.join(words)}".rstrip())
            if self.show:
                self.print(self.lines[-1])


def check(resolved: Resolved, *, environ: Mapping[str, str] | None = None) -> list[str]:
    """Try the start of a run, as one rank of the world that the environment describes.

    Returns:
        The lines of the table, which rank 0 also prints.

    Raises:
        TrainerError: whatever the run would have raised, and the errors of the packages below.
    """
    environ = os.environ if environ is None else environ
    table = Table(show=environ.get("RANK", "0") == "0")
    with table.row("recipe and data") as words:
        plan = Plan.make(resolved, environ)
        given = sum(resolved.given(name) for name in resolved.origins)
        words += [f"{given} values given, the rest defaults", f"engine {plan.recipe.run.engine}"]
    recipe, world, out = plan.recipe, plan.world, Path(plan.recipe.run.out)
    with table.row("ranks") as words:
        words += [f"{world.size} on {world.n_nodes} node(s)", f"{recipe.accumulation(world.size)} micro-batches a step"]
    _describe_data(plan, table)
    with table.row("model") as words:
        count = sum(math.prod(parameter.shape) for parameter in parameters(plan.model))
        words.append(f"{count} parameters, {plan.model.n_layers} layers of width {plan.model.hidden_size}")
    with table.row("run directory") as words:
        words.append(RunDir.look(out))
        newest = list_steps(out / "checkpoints")
        if newest:
            words.append(f"newest checkpoint {newest[0][1].name}")
    with ExitStack() as stack:
        with table.row("engine") as words:
            start = time.monotonic()
            engine = plan.open_engine()
            stack.callback(engine.close)
            words += [f"{engine.device.count} x {engine.device.name}", f"open in {time.monotonic() - start:.1f} s"]
        if recipe.checkpoint.mirror:
            with table.row("mirror") as words:
                found = together(engine.control, world.rank == 0, lambda: "; ".join(describe(recipe, to_dict(recipe))))
                words.append(found)
        folder = Path(engine.control.broadcast(str(_make_scratch(out)) if world.rank == 0 else ""))
        if world.rank == 0:
            stack.callback(shutil.rmtree, folder)
        checkpoints = plan.checkpoints(folder)
        with table.row("folder") as words:
            report = checkpoints.rehearse(engine)
            words += [
                f"every rank writes where {out} is",
                f"{_size(report.free_bytes)} free, a checkpoint takes {_size(report.need_bytes)} and at most "
                f"{checkpoints_held(recipe)} are held",
            ]
            missing = plan.checkpoints(out / "checkpoints").room_wanted(report)
            if missing:
                words.append(f"warning: {_size(missing)} more are needed to hold them all")
        _reserve(plan, engine, checkpoints, table)
        _step_and_save(plan, engine, checkpoints, table)
    with table.row("left behind") as words:
        words.append("nothing")
    return table.lines


def _describe_data(plan: Plan, table: Table) -> None:
    recipe, rows = plan.recipe, plan.data.train
    ramp, steps = recipe.batch.grows(recipe.data.seq_len), recipe.schedule.max_steps
    wanted = steps * recipe.batch.global_batch if ramp is None else ramp.rows_before(steps)
    with table.row("data") as words:
        if rows is None or isinstance(rows, SyntheticRows):
            words.append(f"rows of {recipe.data.loader}" if recipe.data.loader else "rows of random ids")
            words += [f"vocabulary {plan.data.vocab_size}", f"the run reads {wanted} rows"]
        elif isinstance(rows, Mixture):
            words.append(f"a mixture of {len(rows.names)} sources, vocabulary {plan.data.vocab_size}")
            words.append(f"the run reads {wanted} rows of {rows.seq_len} ({recipe.data.pack})")
            words += [f"{name}: {epochs:.2f} epochs" for name, epochs in rows.epochs(wanted).items()]
        else:
            store = rows.store
            words += [
                f"{store.n_documents} documents, {store.n_tokens} tokens, vocabulary {plan.data.vocab_size}",
                f"{rows.n_rows} rows of {rows.seq_len} ({recipe.data.pack})",
                f"the run reads {wanted} rows, {wanted / rows.n_rows:.2f} epochs",
            ]
    for one in plan.data.validation:
        with table.row(f"validation {one.name}".rstrip()) as words:
            words.append(f"{one.reader.n_rows} rows of {one.reader.seq_len}, {one.text_bytes} bytes of text")


def _reserve(plan: Plan, engine: Engine, checkpoints: Checkpoints, table: Table) -> None:
    if plan.recipe.checkpoint.background:
        with table.row("background") as words:
            Saver(checkpoints, engine, saved=lambda step, path: None, go_on=lambda: None).reserve()
            words.append(f"{_size(engine.state_bytes())} of memory on the host for a rank's copy of its state")


def _step_and_save(plan: Plan, engine: Engine, checkpoints: Checkpoints, table: Table) -> None:
    with closing(open_batches(plan.recipe, plan.data, engine.topology, engine.control)) as batches:
        _try(plan, engine, checkpoints, table, batches)


def _try(plan: Plan, engine: Engine, checkpoints: Checkpoints, table: Table, batches: Batches) -> None:
    recipe = plan.recipe

    def step(batch: StepBatch, number: int) -> tuple[StepMetrics, float]:
        start = time.monotonic()
        rate = learning_rate(number, recipe.schedule, recipe.optimizer.lr)
        (numbers,) = engine.read([engine.step(batch, rate)])
        return numbers, time.monotonic() - start

    with table.row("one step") as words:
        numbers, seconds = step(batches.next_batch(), 0)
        uniform = math.log(plan.data.vocab_size)
        words += [
            f"loss {numbers.loss:.4f} (a model that knows nothing: {uniform:.4f})",
            f"grad_norm {numbers.grad_norm:.4g}",
            f"{seconds:.1f} s, the first one",
            f"peak memory {_size(engine.memory_bytes())}",
        ]
        if not numbers.finite:
            raise CheckError(
                f"the first step has loss {numbers.loss} and grad_norm {numbers.grad_norm}; "
                "compute in another dtype, or look at the data"
            )
    position = batches.saved()
    with table.row("one save") as words:
        start = time.monotonic()
        path = checkpoints.save(engine, position)
        seconds = time.monotonic() - start
        words += [f"{seconds:.1f} s", f"guard.grace_s is {recipe.guard.grace_s:g} s"]
        if seconds > recipe.guard.grace_s:
            words.append(
                "warning: a stop would be killed before it has saved; raise guard.grace_s, and the time that "
                "your scheduler leaves between its signal and SIGKILL"
            )
    with table.row("read back") as words:
        following = batches.next_batch()
        expected, seconds = step(following, 1)
        words.append(f"a step takes {seconds:.2f} s")
        if plan.world.rank == 0:
            report = verify(path)
            if not report.loadable:
                raise CheckpointError(
                    f"{path}: {'; '.join(report.problems)}; the file system does not keep what it takes"
                )
        checkpoint = Checkpoint.open(path)
        engine.restore(checkpoint)
        if recipe.data.kind != "loader":  # one without a state could not be opened there, and need not be
            state = checkpoints.data_state(checkpoint)
            with closing(open_batches(recipe, plan.data, engine.topology, engine.control, state)) as opened:
                following = opened.next_batch()
        again, _ = step(following, 1)
        words.append(f"loss of the next step {expected.loss!r}, after a restore {again.loss!r}")
        if not math.isclose(again.loss, expected.loss, rel_tol=1e-3):
            raise CheckError(f"the step after a restore has loss {again.loss}, without it {expected.loss}")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.2f} MiB"


def _make_scratch(out: Path) -> Path:
    """A folder on the file system of `out`, which need not be there yet."""
    home = out
    while not home.is_dir() and home != home.parent:
        home = home.parent
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=home))
    except OSError as exc:
        raise TrainerError(
            f"run.out = {str(out)!r}: cannot write in {home}: {exc.strerror}; choose one that you can write"
        ) from exc
