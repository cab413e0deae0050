"""One run from a resolved recipe to an exit code: check everything, take the devices, resume, train, leave.

Whatever can be refused is refused before anything is loaded or written, in the order cheap to dear: recipe against the
world, data against the recipe, run directory, then engine and checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lt_data import Stream, StreamState
from lt_trainer.data import TrainingData, open_data, open_stream, step_batch, validation_batches
from lt_trainer.engine import Engine, EngineSpec, StepBatch, World, engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.journal import RankLog, RunJournal, SilentJournal, Work
from lt_trainer.loop import Loop, Outcome
from lt_trainer.recipe import Recipe, Resolved, llama_config, to_dict
from lt_trainer.rundir import RunDir
from lt_trainer.saving import Checkpoints
from lt_trainer.stop import StopSignals

if TYPE_CHECKING:
    from lt_model import LlamaConfig

EXIT_DONE = 0
EXIT_REQUEUE = 75
FLOPS_CONVENTION = "full"
"""6 FLOPs per parameter and token plus attention counted in full, as torchtitan and NeMo count."""


def run(
    resolved: Resolved, *, environ: Mapping[str, str] | None = None, stop_at_step: int = 0, shadow_steps: int = 0
) -> int:
    """Train as the recipe says, in this process as one rank of the world that the environment describes.

    Args:
        resolved: the recipe with its origins.
        environ: the environment to read the world from; by default this process's.
        stop_at_step: stop after that step the way SIGTERM does; 0 for never.
        shadow_steps: steps to run after a stop's save, noted in the run directory's shadow.jsonl to prove a resume
        exact.

    Returns:
        0 when all steps are done, 75 when it stopped early and saved.

    Raises:
        TrainerError: and the errors of lt-data, lt-model and lt-ckpt, each with an `exit_code`.
    """
    recipe, world = resolved.recipe, World.from_env(os.environ if environ is None else environ)
    spec = engine_spec(recipe.run.engine)
    try:
        spec.check(recipe, world)
        _require_capabilities(recipe, spec)
        data = open_data(recipe)
    except RecipeError as exc:
        raise exc.located(resolved.origins) from exc
    model = llama_config(recipe, data.vocab_size)
    os.environ.update(spec.env(recipe))
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        run_dir = stack.enter_context(RunDir.open(recipe.run.out, resolved=resolved)) if world.rank == 0 else None
        engine = spec.open(recipe, model, world)
        stack.callback(engine.close)
        log = stack.enter_context(RankLog(Path(recipe.run.out), world.rank))
        journal = SilentJournal()
        if run_dir is not None:
            journal = stack.enter_context(RunJournal(run_dir, log, engine.device, work(recipe, model, engine)))
            _announce(journal, recipe, engine, run_dir)
        checkpoints = Checkpoints(
            root=Path(recipe.run.out) / "checkpoints",
            recipe=recipe,
            model=model,
            tokenizer_files=data.tokenizer_files,
            recipe_values=to_dict(recipe),
        )
        stream = open_stream(recipe, data, engine.topology, _resume(recipe, engine, checkpoints, journal))
        outcome = Loop(
            recipe=recipe,
            engine=engine,
            batches=StreamBatches(stream, recipe.batch.micro_batch),
            journal=journal,
            stop=stop,
            save=partial(checkpoints.save, engine),
            validation=_validation(data, engine, recipe),
        ).run(stop_at_step=stop_at_step, shadow_steps=shadow_steps)
        return _leave(outcome, journal)


class StreamBatches:
    """A stream's rows as the loop's step batches."""

    def __init__(self, stream: Stream, micro_batch: int) -> None:
        self._stream, self._micro_batch = stream, micro_batch

    @property
    def state(self) -> StreamState:
        """The stream's position."""
        return self._stream.state

    def next_batch(self) -> StepBatch:
        """This rank's rows of the next step."""
        return step_batch(self._stream.next(), self._micro_batch)


def work(recipe: Recipe, model: LlamaConfig, engine: Engine) -> Work:
    """What one update costs, from the recipe's numbers."""
    from lt_model import flops_per_token

    return Work(
        micro_batches=recipe.batch.global_batch // recipe.batch.micro_batch,
        rows=recipe.batch.global_batch,
        seq_len=recipe.data.seq_len,
        flops_per_token=flops_per_token(model, recipe.data.seq_len, FLOPS_CONVENTION),
    )


def _require_capabilities(recipe: Recipe, spec: EngineSpec) -> None:
    if recipe.data.document_mask and "document_mask" not in spec.capabilities:
        raise RecipeError(
            f"the engine {spec.name} cannot keep attention inside documents",
            values={"data.document_mask": recipe.data.document_mask},
            remedy="set data.document_mask to false, or choose another engine with run.engine",
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
    for name, (before, now) in sorted(run_dir.changes.items()):
        journal.say(f"the recipe has changed since this run was last started: {name} was {before!r}, is {now!r}")


def _resume(
    recipe: Recipe, engine: Engine, checkpoints: Checkpoints, journal: RunJournal | SilentJournal
) -> StreamState | None:
    """Restore the newest valid checkpoint into the engine and return its data position; None to start from nothing."""
    said: list[str] = []
    checkpoint = checkpoints.find(engine.control, engine.topology.rank, said.append)
    for text in said:
        journal.say(text)
    if checkpoint is None:
        return None
    if not recipe.checkpoint.resume:
        raise RecipeError(
            f"run.out = {recipe.run.out!r} already holds checkpoints (newest: {checkpoint.path.name})",
            values={"checkpoint.resume": recipe.checkpoint.resume},
            remedy="set run.out to a new folder to start from nothing, or leave checkpoint.resume out to go on",
        )
    state = checkpoints.stream_state(checkpoint)
    engine.restore(checkpoint)
    journal.event("resume", step=checkpoint.step, path=str(checkpoint.path))
    journal.say(f"resuming after step {checkpoint.step} from {checkpoint.path}")
    return state


def _validation(data: TrainingData, engine: Engine, recipe: Recipe):
    if data.validation is None:
        return None
    return partial(validation_batches, data.validation, engine.topology, recipe.batch.micro_batch)


def _leave(outcome: Outcome, journal: RunJournal | SilentJournal) -> int:
    if outcome.stopped_by:
        name = signal.Signals(outcome.stopped_by).name
        journal.event("stop", step=outcome.step, signal=name)
        journal.say(f"stopped by {name} after step {outcome.step}; saved, start again to go on")
        return EXIT_REQUEUE
    journal.event("done", step=outcome.step)
    journal.say(f"all {outcome.step} steps are done")
    return EXIT_DONE
