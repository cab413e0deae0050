"""One run on one rank: `open_run` opens its parts in a fixed order and closes them in reverse order.

Checks run from cheap to expensive and before anything is loaded or written: recipe against ranks and engine, data
against recipe, then run directory, devices, and room for checkpoints. On rank 0, the run directory is locked before
the devices are opened and unlocked after they are closed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lt_ckpt.discovery import find_latest_valid
from lt_ckpt.hf.tokenizer_classes import describe_other_ids
from lt_data import RowReader
from lt_trainer.checkpointing.checkpoints import Checkpoints
from lt_trainer.checkpointing.mirror import RunMirror
from lt_trainer.config.plausibility import recipe_warnings
from lt_trainer.config.recipe import ResolvedRecipe, complete, model_config, to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.data.batches import Batches
from lt_trainer.data.training_data import STORES, TrainingData, open_data
from lt_trainer.engine import Engine, EngineSpec, World, engine_spec
from lt_trainer.errors import PeerError, RecipeError
from lt_trainer.evaluation.during_training import RunEvaluation
from lt_trainer.observability.monitor import NodeMonitor, load_nvml
from lt_trainer.observability.run_logger import ComputeCost, RunLogger, check_metrics_options
from lt_trainer.observability.sinks import open_sinks
from lt_trainer.resilience.stop_signals import StopSignals, is_main_thread
from lt_trainer.resilience.watchdog import Watchdog
from lt_trainer.run_directory.jsonl import RankLog
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_model import ModelConfig


@dataclass
class Inputs:
    """What a run needs before a device is opened, checked: engine spec, data, model, evaluation."""

    spec: EngineSpec
    data: TrainingData
    model: ModelConfig
    evaluation: RunEvaluation

    def open_engine(self, recipe: Recipe, world: World) -> Engine:
        """Open the devices, after setting the environment variables that the engine's libraries read."""
        os.environ.update(self.spec.env(recipe))
        return self.spec.open(recipe, self.model, world)


def read_inputs(resolved: ResolvedRecipe, world: World) -> Inputs:
    """Check a recipe against the ranks, the engine and the data.

    Raises:
        RecipeError: a field does not fit; names field, value and remedy.
        DataError: a store cannot be read.
    """
    recipe = resolved.recipe
    with _origins(resolved):
        spec = engine_spec(recipe.run.engine)
        spec.check(recipe, world)
        if recipe.data.document_mask and "document_mask" not in spec.capabilities:
            raise RecipeError(
                f"the {spec.name} engine does not support document masks",
                values={"data.document_mask": recipe.data.document_mask},
                remedy="set data.document_mask to false, or choose another engine with run.engine",
            )
        if recipe.checkpoint.mirror_url and find_spec("boto3") is None:
            raise RecipeError(
                "a mirror needs boto3, which is not installed",
                values={"checkpoint.mirror_url": recipe.checkpoint.mirror_url},
                remedy="pip install 'lt-trainer[s3]', or remove checkpoint.mirror_url",
            )
        check_metrics_options(recipe, spec, world)
        checkpoints, newest = Path(recipe.run.dir) / "checkpoints", None
        if checkpoints.is_dir():  # the stores as the newest checkpoint has read them
            newest, _ = find_latest_valid(checkpoints, verify=False)
        data = open_data(recipe, read={} if newest is None else dict((newest.manifest.data or {}).get(STORES, {})))
        return Inputs(spec, data, model_config(recipe, data.vocab_size), RunEvaluation.read(recipe))


@dataclass
class Run:
    """Open parts of a run, in the order of opening."""

    recipe: Recipe
    world: World
    model: ModelConfig
    data: TrainingData
    """From a restored checkpoint on, with the generations of the stores that it has read."""
    evaluation: RunEvaluation
    stop: StopSignals
    """Received stop signals; the previous handlers are restored at the end, unless the caller installed these."""
    engine: Engine
    """Devices and process groups."""
    watchdog: Watchdog
    log: RunLogger
    """Metrics and events; writes nothing on ranks other than 0."""
    mirror: RunMirror
    """Mirror in S3; no-op without checkpoint.mirror_url. An error that ends the run waits for uploads."""
    checkpoints: Checkpoints
    """An error that ends the run waits for the save in flight."""
    run_dir: RunDir | None
    """None on ranks other than 0."""
    has_trained: bool = False
    """Whether the optimizer has taken a step before the restored checkpoint."""
    opened_batches: Batches | None = None
    """Opened by `checkpointing.resume`."""

    @property
    def batches(self) -> Batches:
        """Step batches of this rank, at the run's position."""
        assert self.opened_batches is not None, "the run has been restored or started"
        return self.opened_batches

    def close_batches(self) -> None:
        """Close the step batches, if they are open."""
        if self.opened_batches is not None:
            self.opened_batches.close()


@contextmanager
def open_run(
    resolved: ResolvedRecipe, world: World, *, stop: StopSignals | None = None, inputs: Inputs | None = None
) -> Iterator[Run]:
    """Check and open a run; close what was opened, also when a later part fails to open.

    Args:
        resolved: Recipe with origins.
        world: Ranks of the run.
        stop: Installed signal handlers; None installs them until the run is closed, if this is the main thread.
        inputs: Result of `read_inputs`; None reads them.

    Raises:
        TrainerError: see its subclasses; also the errors of lt-data, lt-model and lt-ckpt. Each has an `exit_code`.
    """
    resolved = complete(resolved)
    recipe, folder, is_rank0 = resolved.recipe, Path(resolved.recipe.run.dir), world.rank == 0
    with _origins(resolved), ExitStack() as stack:
        enter = stack.enter_context
        inputs = inputs or read_inputs(resolved, world)
        handles_signals = stop is not None or is_main_thread()
        stop = stop or enter(StopSignals())
        stop.announce = is_rank0
        os.environ.update(inputs.spec.env(recipe))  # before the run directory records it
        run_dir = enter(RunDir.open(folder, resolved=resolved)) if is_rank0 else None
        engine = enter(closing(inputs.spec.open(recipe, inputs.model, world)))
        rank_log = enter(RankLog(folder, world.rank))
        attempt = engine.control.broadcast(secrets.token_hex(8))
        watchdog = enter(
            Watchdog(
                folder,
                rank=world.rank,
                world_size=world.size,
                attempt=attempt,
                timeout_s=recipe.fault_tolerance.hang_timeout_s,
                log=rank_log,
                dump_debug_info=partial(engine.dump_debug_info, folder / "flight" / attempt),
            )
        )
        monitor = enter(_node_monitor(recipe, world, engine, rank_log))
        cost = ComputeCost.of_recipe(recipe, inputs.model, engine.recomputed_flops_per_token)
        sinks, failures = None, {}
        if run_dir is not None and recipe.metrics.sinks:
            sinks, failures = open_sinks(recipe.metrics.sinks, folder, to_dict(recipe))
        last_step = recipe.schedule.max_steps
        log = enter(
            RunLogger(run_dir, rank_log, engine.device, cost, last_step=last_step, sinks=sinks, monitor=monitor)
        )
        if run_dir is not None:
            _log_start(log, recipe, engine, run_dir)
            reader = inputs.data.train
            for warning in recipe_warnings(recipe, reader.store.n_tokens if isinstance(reader, RowReader) else 0):
                log.log_message(warning)
            _warn_of_tokenizer(log, inputs)
            if not handles_signals:
                log.log_message("note: not in the main thread: stop signals do not save and end this run")
            log.log_sink_failures(failures)
        mirror = enter(RunMirror(recipe, run_dir, engine, log, stop, watchdog.heartbeat))
        tokenizer_files, heartbeat = inputs.data.tokenizer_files, watchdog.heartbeat
        checkpoints = enter(
            Checkpoints(folder / "checkpoints", recipe, inputs.model, tokenizer_files, engine, log, mirror, heartbeat)
        )
        run = Run(
            recipe,
            world,
            inputs.model,
            inputs.data,
            inputs.evaluation,
            stop,
            engine,
            watchdog,
            log,
            mirror,
            checkpoints,
            run_dir,
        )
        stack.callback(run.close_batches)
        try:
            checkpoints.check_room()
            checkpoints.reserve_memory()
            yield run
        except PeerError as exc:
            raise PeerError(
                f"{exc}; {watchdog.diagnose()}; saved checkpoints are intact: rerun to resume from the newest"
            ) from exc


def _node_monitor(
    recipe: Recipe, world: World, engine: Engine, log: RankLog
) -> AbstractContextManager[NodeMonitor | None]:
    """Return the monitor of this node on local rank 0, if enabled in the recipe; collective."""
    if not recipe.metrics.monitor_interval_s:
        return nullcontext()
    pids = dict(enumerate(engine.control.all_gather(os.getpid())))
    if world.local_rank != 0:
        return nullcontext()
    return NodeMonitor(
        Path(recipe.run.dir),
        world=world,
        pids={rank: pids[rank] for rank in range(world.rank, world.rank + world.local_size)},
        interval_s=recipe.metrics.monitor_interval_s,
        log=log.write,
        nvml=load_nvml if engine.device.kind == "cuda" else None,
    )


def _warn_of_tokenizer(log: RunLogger, inputs: Inputs) -> None:
    """Say before the first step that `transformers` will read other ids."""
    problem = describe_other_ids(inputs.data.tokenizer_files, inputs.model.family)
    if problem:
        log.log_message(
            f"warning: {problem}, train a model of another type, or prepare the data with a tokenizer that has this "
            "rule (lt data train-tokenizer --split-rule)"
        )


@contextmanager
def _origins(resolved: ResolvedRecipe) -> Iterator[None]:
    """Add the sources of its fields to an error of the recipe."""
    try:
        yield
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc


def _log_start(log: RunLogger, recipe: Recipe, engine: Engine, run_dir: RunDir) -> None:
    device, topology = engine.device, engine.topology
    peak = {"peak_flops": device.peak_flops, "peak_source": device.peak_source}
    values = {
        "pid": os.getpid(),
        "world": topology.world_size,
        "device": device.name,
        "device_kind": device.kind,
        **peak,
    }
    log.log_event("start", **values, resolved=dict(device.resolved))
    log.log_message(
        f"{recipe.run.engine} engine on {device.count} x {device.name}, {topology.dp_size} data-parallel rank(s); "
        f"run directory {run_dir.path}"
    )
    log.log_message(
        "mfu: 6 FLOPs per parameter and token without the input embedding, plus 12 x layers x width x seq_len for "
        f"attention; hfu: mfu plus {engine.recomputed_flops_per_token:.4g} recomputed FLOPs per token; peak "
        f"{device.peak_flops:.4g} FLOP/s per device ({device.peak_source})"
    )
    for note in device.notes:
        log.log_message(note)
    for name, (before, now) in sorted(run_dir.changes.items()):
        log.log_message(
            f"recipe changed since the last start: {name} was {format_value(before)}, is {format_value(now)}"
        )
