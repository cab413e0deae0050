"""One run from a resolved recipe to an exit code: check everything, take the devices, resume, train, leave.

Whatever can be refused is refused before anything is loaded or written, in the order cheap to dear: recipe against the
world, data against the recipe, run directory, then engine, the checkpoint folder, and the checkpoint.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.data import TrainingData, open_data, validation_batches
from lt_trainer.engine import Engine, EngineSpec, World, engine_spec
from lt_trainer.errors import PeerError, RecipeError
from lt_trainer.journal import GIB, RankLog, RunJournal, SilentJournal, Work
from lt_trainer.loop import Loop, Outcome, Validation
from lt_trainer.mirroring import Mirroring, Stopped
from lt_trainer.observing import node_monitor, require_observable, run_sinks
from lt_trainer.recipe import Recipe, Resolved, llama_config, to_dict
from lt_trainer.resume import Position
from lt_trainer.rundir import RunDir
from lt_trainer.saver import Saver
from lt_trainer.saving import Checkpoints
from lt_trainer.stop import StopSignals
from lt_trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from lt_model import LlamaConfig

EXIT_DONE = 0
EXIT_REQUEUE = 75
FLOPS_CONVENTION = "full"
"""6 FLOPs per parameter and token plus attention counted in full, as torchtitan and NeMo count."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of which everything is known that can be without a device, and nothing was found wrong."""

    recipe: Recipe
    world: World
    spec: EngineSpec
    data: TrainingData
    model: LlamaConfig

    @classmethod
    def make(cls, resolved: Resolved, environ: Mapping[str, str]) -> Plan:
        """Check a recipe against the ranks, the engine and the data.

        Raises:
            RecipeError: something does not fit, with field, value, source and remedy; DataError from lt-data.
        """
        recipe, world = resolved.recipe, World.from_env(environ)
        spec = engine_spec(recipe.run.engine)
        try:
            spec.check(recipe, world)
            _require_capabilities(recipe, spec)
            _require_boto3(recipe)
            require_observable(recipe, spec, world)
            data = open_data(recipe)
            model = llama_config(recipe, data.vocab_size)
        except RecipeError as exc:
            raise exc.located(resolved.origins) from exc
        return cls(recipe=recipe, world=world, spec=spec, data=data, model=model)

    def open_engine(self) -> Engine:
        """Take the devices; the environment that the engine's libraries want is set before they load."""
        os.environ.update(self.spec.env(self.recipe))
        return self.spec.open(self.recipe, self.model, self.world)

    def checkpoints(
        self, root: Path, sparing: Callable[[], AbstractContextManager[Collection[Path]]] = lambda: nullcontext(())
    ) -> Checkpoints:
        """Checkpoints of this run in the folder `root`; `sparing` gives those that retention leaves alone."""
        return Checkpoints(
            root=root,
            recipe=self.recipe,
            model=self.model,
            tokenizer_files=self.data.tokenizer_files,
            recipe_values=to_dict(self.recipe),
            sparing=sparing,
        )


def run(
    resolved: Resolved,
    *,
    environ: Mapping[str, str] | None = None,
    stop: StopSignals | None = None,
    stop_at_step: int = 0,
    shadow_steps: int = 0,
) -> int:
    """Train as the recipe says, in this process as one rank of the world that the environment describes.

    Args:
        resolved: the recipe with its origins.
        environ: the environment to read the world from; by default this process's.
        stop: stop signals that the caller has taken; by default they are taken for the time of the run.
        stop_at_step: stop after that step the way SIGTERM does; 0 for never.
        shadow_steps: steps to run after a stop's save, noted in the run directory's shadow.jsonl to prove a resume
            exact.

    Returns:
        0 when all steps are done, 75 when it stopped early and saved; with a mirror that has not got the last
        checkpoint 75 as well, or 64 when a person has to mend something before it can.

    Raises:
        TrainerError: and the errors of lt-data, lt-model and lt-ckpt, each with an `exit_code`.
    """
    plan = Plan.make(resolved, os.environ if environ is None else environ)
    recipe, rank, out = plan.recipe, plan.world.rank, Path(plan.recipe.run.out)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals()) if stop is None else stop
        stop.told = rank == 0
        run_dir = stack.enter_context(RunDir.open(out, resolved=resolved)) if rank == 0 else None
        engine = plan.open_engine()
        stack.callback(engine.close)
        log = stack.enter_context(RankLog(out, rank))
        attempt = engine.control.broadcast(secrets.token_hex(8))
        watch = stack.enter_context(
            Watchdog(
                out,
                rank=rank,
                world=plan.world.size,
                attempt=attempt,
                timeout_s=recipe.guard.timeout_s,
                log=log,
                last_words=partial(engine.last_words, out / "flight" / attempt),
            )
        )
        monitor = stack.enter_context(node_monitor(recipe, world=plan.world, attempt=attempt, engine=engine, log=log))
        journal = SilentJournal()
        if run_dir is not None:
            costs = work(recipe, plan.model, engine)
            sinks, lost = run_sinks(recipe, run_dir)
            journal = stack.enter_context(RunJournal(run_dir, log, engine.device, costs, sinks=sinks, monitor=monitor))
            journal.pause()  # until the first step: what is restored or fetched before it is no training
            _announce(journal, recipe, engine, run_dir)
            journal.sinks_lost(lost)
        mirroring = stack.enter_context(
            Mirroring(
                recipe,
                values=to_dict(recipe),
                run_dir=run_dir,
                engine=engine,
                journal=journal,
                stop=stop,
                go_on=watch.go_on,
            )
        )
        checkpoints = plan.checkpoints(out / "checkpoints", mirroring.sparing)

        def saved(step: int, path: Path) -> None:
            journal.saved(step, path)
            mirroring.notify(path)

        saver = stack.enter_context(Saver(checkpoints, engine, saved=saved, go_on=watch.go_on, at_step=mirroring.tell))
        try:
            _rehearse(checkpoints, engine, journal)
            saver.reserve()
            position = Position(
                recipe=recipe,
                data=plan.data,
                engine=engine,
                checkpoints=checkpoints,
                journal=journal,
                mirroring=mirroring,
                model=plan.model,
                go_on=watch.go_on,
            )
            engine.stopwatch.lap("checkpoint")
            batches = position.first()
            engine.stopwatch.lap("rest")
            stack.callback(batches.close)
            mirroring.start()
            journal.proceed()
            outcome = Loop(
                recipe=recipe,
                engine=engine,
                batches=batches,
                journal=journal,
                stop=stop,
                watch=watch,
                saves=saver,
                go_back=position.go_back,
                validation=_validation(plan.data, engine, recipe),
            ).run(stop_at_step=stop_at_step, shadow_steps=shadow_steps)
            unsent = mirroring.finish()
        except Stopped as exc:
            outcome, unsent = Outcome(step=0, stopped_by=exc.number), 0
        except PeerError as exc:
            raise PeerError(
                f"{exc}; {watch.explain()}; nothing that was saved is lost: start the run again to go on from its "
                "newest checkpoint"
            ) from exc
        return _leave(outcome, journal) or unsent


def _rehearse(checkpoints: Checkpoints, engine: Engine, journal: RunJournal | SilentJournal) -> None:
    report = checkpoints.rehearse(engine)
    if report.slow_because:
        journal.say(f"checkpoints go through the page cache, which may slow them down: {report.slow_because}")
    missing = checkpoints.room_wanted(report)
    if missing:
        journal.say(
            f"warning: the checkpoints that this run will keep need {missing / GIB:.1f} GiB more than are free at "
            f"{checkpoints.root} ({report.need_bytes / GIB:.1f} GiB each); free space, or lower checkpoint.keep_last "
            "or raise checkpoint.keep_every"
        )


def work(recipe: Recipe, model: LlamaConfig, engine: Engine) -> Work:
    """What rows cost, from the recipe's numbers."""
    from lt_model import flops_per_token

    return Work(
        micro_batch=recipe.batch.micro_batch,
        seq_len=recipe.data.seq_len,
        flops_per_token=flops_per_token(model, recipe.data.seq_len, FLOPS_CONVENTION),
        flops_by_length={n: flops_per_token(model, n, FLOPS_CONVENTION) for n in recipe.data.row_lengths[1:]},
        recomputed_flops_per_token=engine.recomputed_flops_per_token,
    )


def _require_capabilities(recipe: Recipe, spec: EngineSpec) -> None:
    if recipe.data.document_mask and "document_mask" not in spec.capabilities:
        raise RecipeError(
            f"the engine {spec.name} cannot keep attention inside documents",
            values={"data.document_mask": recipe.data.document_mask},
            remedy="set data.document_mask to false, or choose another engine with run.engine",
        )


def _require_boto3(recipe: Recipe) -> None:
    if recipe.checkpoint.mirror and find_spec("boto3") is None:
        raise RecipeError(
            "a mirror needs boto3, which is not installed",
            values={"checkpoint.mirror": recipe.checkpoint.mirror},
            remedy="pip install 'lt-trainer[s3]', or leave checkpoint.mirror out",
        )


def _announce(journal: RunJournal, recipe: Recipe, engine: Engine, run_dir: RunDir) -> None:
    device, topology = engine.device, engine.topology
    journal.event(
        "start",
        pid=os.getpid(),
        world=topology.world,
        device=device.name,
        peak_flops=device.peak_flops,
        peak_source=device.peak_source,
    )
    journal.say(
        f"{recipe.run.engine} engine on {device.count} x {device.name}, {topology.dp_size} data-parallel rank(s); "
        f"run directory {run_dir.path}"
    )
    journal.say(
        "mfu: FLOPs counted in full (6 per parameter and token without the input embedding, plus 12 x layers x "
        f"width x seq_len); peak {device.peak_flops:.4g} FLOP/s per device ({device.peak_source})"
    )
    again = engine.recomputed_flops_per_token
    journal.say(
        "hfu: as mfu, "
        + (
            "plus what is computed again, which is not known"
            if math.isnan(again)
            else f"plus {again:.4g} FLOPs per token"
        )
        + " (activation checkpointing)"
    )
    for name, (before, now) in sorted(run_dir.changes.items()):
        journal.say(f"the recipe has changed since this run was last started: {name} was {before!r}, is {now!r}")


def _validation(data: TrainingData, engine: Engine, recipe: Recipe) -> list[Validation]:
    return [
        Validation(
            name=one.name,
            text_bytes=one.text_bytes,
            batches=partial(validation_batches, one.reader, engine.topology, recipe.batch.micro_batch),
        )
        for one in data.validation
    ]


def _leave(outcome: Outcome, journal: RunJournal | SilentJournal) -> int:
    if outcome.stopped_by:
        name = signal.Signals(outcome.stopped_by).name
        journal.event("stop", step=outcome.step, signal=name)
        journal.say(f"stopped by {name} after step {outcome.step}; start again to go on")
        return EXIT_REQUEUE
    journal.event("done", step=outcome.step)
    journal.say(f"all {outcome.step} steps are done")
    return EXIT_DONE
