"""One run from a resolved recipe to an exit code: check everything, take the devices, resume, train, leave.

Whatever can be refused is refused before anything is loaded or written, in the order cheap to dear: recipe against the
world, data against the recipe, run directory, then engine and checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from lt_trainer.data import TrainingData, open_data, open_stream, step_batch, validation_batches
from lt_trainer.engine import Engine, EngineSpec, StepBatch, World, engine_spec
from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.journal import RunJournal, SilentJournal
from lt_trainer.loop import Batches, Loop, Outcome
from lt_trainer.recipe import Resolved, llama_config
from lt_trainer.rundir import RunDir
from lt_trainer.saving import Checkpoints
from lt_trainer.stop import StopSignals

EXIT_DONE = 0
EXIT_REQUEUE = 75


def run(resolved: Resolved, *, environ: Mapping[str, str] | None = None, stop_at_step: int = 0, shadow_steps: int = 0) -> int:
    """Train as the recipe says, in this process as one rank of the world that the environment describes.

    Args:
        resolved: the recipe with its origins.
        environ: the environment to read the world from; by default this process's.
        stop_at_step: stop after that step the way SIGTERM does; 0 for never.
        shadow_steps: steps to run after a stop's save, noted in the run directory's shadow.jsonl to prove a resume exact.

    Returns:
        0 when all steps are done, 75 when it stopped early and saved.

    Raises:
        TrainerError: and the errors of lt-data, lt-model and lt-ckpt, each with an `exit_code`.
    """
    environ = os.environ if environ is None else environ
    recipe, world = resolved.recipe, World.from_env(environ)
    spec = engine_spec(recipe.run.engine)
    spec.check(recipe, world)
    data = open_data(recipe, tokenizer_given=resolved.origins.get("data.tokenizer") != "default")
    model = llama_config(recipe, data.vocab_size)
    os.environ.update(spec.env(recipe))
    with StopSignals() as stop:
        if world.rank != 0:
            return _train(resolved, spec, world, data, model, stop, None, stop_at_step, shadow_steps)
        with RunDir.open(recipe.run.out, resolved=resolved) as run_dir:
            return _train(resolved, spec, world, data, model, stop, run_dir, stop_at_step, shadow_steps)
