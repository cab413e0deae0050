"""Checkpoints of a run: how ranks save together, and how a later process finds where to go on.

A save costs two short exchanges on the control group (the folder's name out, "done or failed" back); all bytes are
written by the rank that holds them, and rank 0 commits when every part is there. A rank that fails tells the others,
so that none of them waits for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    Meta,
    TrialReport,
    begin,
    begin_trial,
    commit,
    discard,
    finish_trial,
    latest_valid,
    list_steps,
    prune,
    write_part,
    write_trial,
)
from lt_data import StreamState
from lt_trainer.data import position
from lt_trainer.errors import RecipeError
from lt_trainer.together import together

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.control import Control
    from lt_trainer.engine import Engine, Snapshot
    from lt_trainer.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run directory."""

    root: Path
    recipe: Recipe
    model: LlamaConfig
    tokenizer_files: Mapping[str, bytes]
    recipe_values: Mapping[str, Any]
    sparing: Callable[[], AbstractContextManager[Collection[Path]]] = lambda: nullcontext(())
    """Gives the checkpoints that retention must leave alone for as long as it works."""

    def save(self, engine: Engine, stream: StreamState) -> Path:
        """Save `engine` and the stream's position as step `stream.step`; returns the committed folder on every rank.

        Raises:
            CheckpointError: some rank could not write its part (disk full, folder gone); every rank raises.
        """
        topology, control = engine.topology, engine.control
        tmp = self.begin(engine, stream.step)
        snapshot = engine.state()
        failure = _attempt(lambda: write_part(tmp, rank=topology.rank, shards=snapshot.shards, layout=snapshot.layout))
        if control.all_max(int(failure is not None)):
            if topology.rank == 0:
                self.discard(tmp)
            raise failure or another_failed(tmp)
        meta = self.meta(engine, stream, snapshot)

        def commit_or_discard() -> str:
            try:
                return str(self.commit(tmp, meta, world=topology.world))
            except CheckpointError:
                self.discard(tmp)
                raise

        path = Path(together(control, topology.rank == 0, commit_or_discard))
        if topology.rank == 0:
            self.prune()
        return path

    def begin(self, engine: Engine, step: int) -> Path:
        """Make the folder of a save; the same on every rank."""
        topology, control = engine.topology, engine.control
        return Path(
            together(control, topology.rank == 0, lambda: str(begin(self.root, step=step, world=topology.world)))
        )

    def meta(self, engine: Engine, stream: StreamState, snapshot: Snapshot) -> Meta:
        """Everything besides the tensors."""
        topology = engine.topology
        return Meta(
            step=stream.step,
            recipe=self.recipe_values,
            model=self.model.to_dict(),
            small=snapshot.small,
            data=stream.to_json(),
            tokenizer_files=self.tokenizer_files,
            layout={"world": topology.world, "dp_size": topology.dp_size, **snapshot.about},
        )

    def commit(self, tmp: Path, meta: Meta, *, world: int, given_up: Callable[[], bool] = lambda: False) -> Path:
        """Make a save a checkpoint (rank 0), when all parts have come."""
        return commit(tmp, world=world, meta=meta, timeout_s=self.recipe.guard.timeout_s, given_up=given_up)

    def prune(self) -> None:
        """Remove the checkpoints that need not be kept (rank 0)."""
        keep = self.recipe.checkpoint
        with self.sparing() as spared:
            prune(self.root, last=keep.keep_last, every=keep.keep_every, protect=spared)

    def discard(self, tmp: Path) -> None:
        """Remove what a save that failed has left (rank 0), where the file system lets it: what failed matters more."""
        with suppress(CheckpointError):
            discard(tmp)

    def rehearse(self, engine: Engine) -> TrialReport:
        """Try the folder with a save of a few bytes, the same report on every rank; nothing of it stays.

        Raises:
            CheckpointError: some rank cannot write there, rank 0 does not see what another wrote, or a checkpoint would
                not fit; every rank raises.
        """
        topology, control, first = engine.topology, engine.control, engine.topology.rank == 0
        tmp = Path(together(control, first, lambda: str(begin_trial(self.root, world=topology.world))))
        failure = _attempt(lambda: write_trial(tmp, rank=topology.rank, need_bytes=engine.state_bytes()))
        if control.all_max(int(failure is not None)):
            if first:
                self.discard(tmp)
            raise failure or another_failed(tmp)
        timeout_s = self.recipe.guard.timeout_s

        def finish() -> str:
            report = finish_trial(tmp, world=topology.world, timeout_s=timeout_s)
            return json.dumps([report.need_bytes, report.free_bytes, report.slow_because])

        need_bytes, free_bytes, slow_because = json.loads(together(control, first, finish))
        return TrialReport(root=self.root, need_bytes=need_bytes, free_bytes=free_bytes, slow_because=slow_because)

    def room_wanted(self, report: TrialReport) -> int:
        """Bytes that are missing for all the checkpoints that the run will keep; 0 when there is room for them."""
        more = checkpoints_held(self.recipe) - len(list_steps(self.root))
        return max(0, more * report.need_bytes - report.free_bytes)

    def find(self, control: Control, rank: int, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies, the same on every rank; damaged newer ones are said and left alone."""

        def newest() -> str:
            found, rejected = latest_valid(self.root)
            for bad in rejected:
                say(f"checkpoint {bad.path} is not used: {bad.reason}")
            return str(found.path) if found else ""

        path = together(control, rank == 0, newest)
        return Checkpoint.open(path) if path else None

    def stream_state(self, checkpoint: Checkpoint) -> StreamState:
        """The data position of `checkpoint`; see `data_state`."""
        return position(self.data_state(checkpoint))

    def data_state(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """The data state of `checkpoint`, after checking that it is a checkpoint of this run's model.

        Raises:
            RecipeError: the checkpoint holds another model.
        """
        saved, here = dict(checkpoint.manifest.model), self.model.to_dict()
        differs = [
            f"{key}: {saved.get(key)!r} there, {here.get(key)!r} here"
            for key in sorted(saved | here)
            if saved.get(key) != here.get(key)
        ]
        if differs:
            raise RecipeError(
                f"{checkpoint.path} is a checkpoint of another model ({'; '.join(differs)}); give run.out a new "
                "folder, "
                "or set the [model] section back to what this run was started with"
            )
        assert checkpoint.manifest.data is not None, "a training checkpoint always holds its data position"
        return checkpoint.manifest.data


def checkpoints_held(recipe: Recipe) -> int:
    """Checkpoints that the run's folder holds at most at one time, the one being written included."""
    keep, last = recipe.checkpoint, recipe.schedule.max_steps
    due = 1 + ((last - 1) // keep.interval if keep.interval else 0)
    kept = (last - 1) // math.lcm(keep.interval, keep.keep_every) if keep.interval and keep.keep_every else 0
    return min(due, keep.keep_last + 1 + kept)


def _attempt(action: Callable[[], None]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as exc:
        return exc
    return None


def another_failed(tmp: Path) -> CheckpointError:
    """The error of a rank whose own part of a save is sound."""
    return CheckpointError(f"{tmp}: another rank could not write its part; its message names the cause")
