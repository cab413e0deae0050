"""Components of a run on one rank: opened in a fixed order, closed in reverse order."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lt_trainer.checkpointing.async_saver import CheckpointSaver
from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager
from lt_trainer.checkpointing.mirror import RunMirror
from lt_trainer.config.recipe import ResolvedRecipe, to_dict
from lt_trainer.engine import Engine
from lt_trainer.observability.monitor import NodeMonitor
from lt_trainer.observability.run_logger import NullLogger, Rank0Logger
from lt_trainer.observability.setup import create_node_monitor, open_run_sinks
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.resilience.watchdog import Watchdog
from lt_trainer.run_directory.rank_log import RankLog
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.run_setup import RunSetup, compute_cost

Logger = Rank0Logger | NullLogger


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Open components of a run, in the order of opening; the stack of `open` closes them in reverse."""

    stop: StopSignals
    """Received stop signals; the previous handlers are restored at the end, unless the caller installed these."""
    engine: Engine
    """Devices and process groups. On rank 0, the run directory is locked before and unlocked after."""
    watchdog: Watchdog
    """Heartbeat thread. Opened before it: the rank's log file, which receives the error that ends the run."""
    logger: Logger
    """Logger of metrics and events, paused. Opened before it: the node monitor; on rank 0, the sinks."""
    mirror: RunMirror
    """Mirror in S3, not started; no-op without checkpoint.mirror_url. An error that ends the run waits for uploads."""
    checkpoints: CheckpointManager
    """Checkpoints in the run directory; nothing to close."""
    saver: CheckpointSaver
    """Saves; an error that ends the run waits for the one in flight."""

    @classmethod
    def open(cls, stack: ExitStack, setup: RunSetup, resolved: ResolvedRecipe, stop: StopSignals | None) -> RunContext:
        """Open the components on a stack.

        Args:
            stack: closes what was opened, also when a later component fails to open.
            setup: checked setup.
            resolved: recipe with origins, for the run directory.
            stop: installed signal handlers; None installs them until the stack is closed.
        """
        is_rank0 = setup.world.rank == 0
        if stop is None:
            stop = stack.enter_context(StopSignals())
        stop.announce = is_rank0
        setup.set_environment()  # before the run directory records it
        run_dir = stack.enter_context(RunDir.open(setup.folder, resolved=resolved)) if is_rank0 else None
        engine = stack.enter_context(closing(setup.open_engine()))
        log = stack.enter_context(RankLog(setup.folder, setup.world.rank))
        attempt = engine.control.broadcast(secrets.token_hex(8))
        watchdog = stack.enter_context(_create_watchdog(setup, engine, log, attempt))
        monitor = stack.enter_context(create_node_monitor(setup.recipe, world=setup.world, engine=engine, log=log))
        logger = stack.enter_context(_open_logger(setup, run_dir, engine, log, monitor))
        mirror = stack.enter_context(_create_mirror(setup, run_dir, engine, logger, stop, watchdog))
        checkpoints = setup.checkpoint_manager(setup.folder / "checkpoints", mirror.protected)
        saver = stack.enter_context(_create_saver(checkpoints, engine, logger, mirror, watchdog))
        return cls(
            stop=stop,
            engine=engine,
            watchdog=watchdog,
            logger=logger,
            mirror=mirror,
            checkpoints=checkpoints,
            saver=saver,
        )


def _create_watchdog(setup: RunSetup, engine: Engine, log: RankLog, attempt: str) -> Watchdog:
    return Watchdog(
        setup.folder,
        rank=setup.world.rank,
        world_size=setup.world.size,
        attempt=attempt,
        timeout_s=setup.recipe.fault_tolerance.hang_timeout_s,
        log=log,
        dump_debug_info=partial(engine.dump_debug_info, setup.folder / "flight" / attempt),
    )


@contextmanager
def _open_logger(
    setup: RunSetup, run_dir: RunDir | None, engine: Engine, log: RankLog, monitor: NodeMonitor | None
) -> Iterator[Logger]:
    if run_dir is None:
        yield NullLogger()
        return
    sinks, failures = open_run_sinks(setup.recipe, run_dir)
    cost = compute_cost(setup.recipe, setup.model, engine)
    with Rank0Logger(run_dir, log, engine.device, cost, sinks=sinks, monitor=monitor) as logger:
        logger.pause()  # restoring and downloading are not training time
        _log_start(logger, setup, engine, run_dir)
        logger.log_sink_failures(failures)
        yield logger


def _log_start(logger: Rank0Logger, setup: RunSetup, engine: Engine, run_dir: RunDir) -> None:
    device, topology = engine.device, engine.topology
    logger.log_event(
        "start",
        pid=os.getpid(),
        world=topology.world_size,
        device=device.name,
        peak_flops=device.peak_flops,
        peak_source=device.peak_source,
        resolved=dict(device.resolved),
    )
    logger.log_message(
        f"{setup.recipe.run.engine} engine on {device.count} x {device.name}, {topology.dp_size} data-parallel "
        f"rank(s); run directory {run_dir.path}"
    )
    logger.log_message(
        "mfu: 6 FLOPs per parameter and token without the input embedding, plus 12 x layers x width x seq_len for "
        f"attention; peak {device.peak_flops:.4g} FLOP/s per device ({device.peak_source})"
    )
    for note in device.notes:
        logger.log_message(note)
    recomputed = engine.recomputed_flops_per_token
    extra = "unknown recomputed FLOPs" if math.isnan(recomputed) else f"{recomputed:.4g} recomputed FLOPs per token"
    logger.log_message(f"hfu: mfu plus {extra} (activation checkpointing)")
    for name, (before, now) in sorted(run_dir.changes.items()):
        logger.log_message(f"recipe changed since the last start: {name} was {before!r}, is {now!r}")


def _create_mirror(
    setup: RunSetup, run_dir: RunDir | None, engine: Engine, logger: Logger, stop: StopSignals, watchdog: Watchdog
) -> RunMirror:
    return RunMirror(
        setup.recipe,
        values=to_dict(setup.recipe),
        run_dir=run_dir,
        engine=engine,
        logger=logger,
        stop=stop,
        heartbeat=watchdog.heartbeat,
    )


def _create_saver(
    checkpoints: CheckpointManager, engine: Engine, logger: Logger, mirror: RunMirror, watchdog: Watchdog
) -> AbstractContextManager[CheckpointSaver]:
    def on_saved(step: int, path: Path) -> None:
        logger.log_checkpoint(step, path)
        mirror.notify(path)

    return CheckpointSaver(
        checkpoints, engine, on_saved=on_saved, heartbeat=watchdog.heartbeat, on_step=mirror.log_progress
    )
