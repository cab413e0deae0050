"""Engine interface of the training loop: a few value types and two protocols, without torch.

An `EngineSpec` is found through the entry-point group `lt.engines` and is cheap to import: it has the engine's options
and checks recipes. `open` returns the `Engine`, which owns devices, model and optimizer. The loop passes numpy arrays
in (`StepParts`) and gets floats out (`fetch_metrics`), so a fake engine of thirty lines can test it.

Shapes: M micro-batches per step, B rows per micro-batch, T positions per row.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lt_trainer.control import Control
from lt_trainer.errors import RecipeError
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    import numpy as np

    from lt_ckpt import Checkpoint, OptimizerRecord, Shard
    from lt_ckpt.save import RankFileWriter
    from lt_model import ModelConfig
    from lt_trainer.checkpointing.pretrained import PretrainedWeights
    from lt_trainer.config.sections import Recipe
    from lt_trainer.evaluation.position_scores import PositionScores

ENGINE_ENTRY_POINTS = "lt.engines"

STEP_PARTS: tuple[str, ...] = ("data", "forward_backward", "optimizer", "checkpoint", "validation", "rest")
"""Waiting for batches; forward and backward passes; gradient clipping and optimizer step; checkpoint
save or restore; validation and evaluation; everything else, such as stop synchronization, fetching metrics and logging.
"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Processes of one run, as torchrun describes them to each rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def n_nodes(self) -> int:
        """Nodes of the run, each with `local_size` ranks."""
        return self.size // self.local_size

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them, return one process.

        Raises:
            RecipeError: only some of them are set, or a value is invalid.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [environ[name] for name in names if name in environ]
        if not values:
            return World()
        if len(values) < len(names) or not all(value.isdecimal() for value in values):
            raise RecipeError(
                f"environment variables {', '.join(names)} must be set together, to integers",
                remedy="start the ranks with torchrun, or unset all to train in one process",
            )
        rank, size, local_rank, local_size = map(int, values)
        return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


class StepParts(Protocol):
    """This rank's part of one optimizer step: M micro-batches, which come in parts so that few are held at once."""

    @property
    def valid_tokens(self) -> int:
        """Positions with a label in the *global* batch; the loss is the sum over all ranks divided by it."""
        ...

    @property
    def n_micro_batches(self) -> int:
        """M."""
        ...

    def parts(self) -> Iterator[StepBatch]:
        """Yield the micro-batches in order, each part when it is asked for; may be called again."""
        ...

    @property
    def document_length(self) -> float:
        """Length of a position's document, averaged over the positions of the parts made so far."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Micro-batches as int32 arrays of fixed shape [M, B, T]: a whole step of one part, or a part of a step.

    Labels are already shifted, -100 where there is none; `doc_ids` are the reference for document boundaries.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    doc_ids: np.ndarray
    cu_seqlens: np.ndarray
    """Document boundaries in each micro-batch's flattened rows, int32 [M, S + 1].

    0, ..., B * T, then B * T again up to a length that is the same for all batches of the run with rows of this length
    (S: a bound on the number of documents). Padding is a document of its own; without a document mask each row is one.
    """
    valid_tokens: int
    """Positions with a label in the *global* batch; the loss is the sum over all ranks divided by it."""

    @property
    def n_micro_batches(self) -> int:
        """M."""
        return self.input_ids.shape[0]

    def parts(self) -> Iterator[StepBatch]:
        """Yield these micro-batches, as one part."""
        yield self

    @property
    def document_length(self) -> float:
        """Length of a position's document, averaged over the positions."""
        return self.squared_document_lengths / self.input_ids.size

    @property
    def squared_document_lengths(self) -> int:
        """Sum of the squares of the documents' lengths: that of the length over all positions."""
        bounds = self.cu_seqlens.astype("int64")
        return int(((bounds[:, 1:] - bounds[:, :-1]) ** 2).sum())


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Place of this rank in the run.

    Ranks with the same `dp_rank` (tensor, context and pipeline peers) read the same rows.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device of one rank; its peak is the reference of MFU."""

    name: str
    kind: str
    count: int
    """Devices of the whole run."""
    peak_flops: float
    """Peak FLOP/s of one device at the compute dtype."""
    peak_source: str
    resolved: Mapping[str, str | bool] = field(default_factory=dict)
    """Values that the engine chose for options that leave it the choice ("auto"), by dotted name."""
    notes: Sequence[str] = ()
    """Sentences for the log: why it chose so."""


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Load of the experts in one step, by layer with experts.

    Attributes:
        load: tokens of the busiest expert over the mean of all; 1 = balanced.
        idle: experts without tokens.
        aux_loss: load-balancing loss, before its weight; 1 = balanced.
    """

    load: tuple[float, ...]
    idle: tuple[int, ...]
    aux_loss: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Loss in nats per valid token and gradient norm before clipping of one step; equal on all ranks."""

    loss: float
    grad_norm: float
    experts: ExpertLoad | None = None

    @property
    def is_finite(self) -> bool:
        """True if both are finite; otherwise the step was skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of an engine: this rank's slices of all tensors, and scalars that are equal on all ranks."""

    shards: Iterable[Shard]
    scalars: Mapping[str, int | float | str | bool]
    """With `optimizer_step`, the steps that the optimizer has taken."""
    file_layout: RankFileWriter | None = None
    """Writer of another program's file format, for shards in its layout; None for our own format."""
    layout_metadata: Mapping[str, Any] = field(default_factory=dict)
    """Manifest entries on how the ranks held the tensors; equal on all ranks."""
    optimizer: OptimizerRecord | None = None
    """The optimizer whose slots are among the shards."""


class Stopwatch:
    """Stopwatch of one rank for the parts in `STEP_PARTS`, on the host's clock; starts in "rest".

    A device that runs ahead of the host has another, whose laps are events in the device's queue: host time spent
    waiting while the device is busy is not counted. Cost: a clock reading and an addition per lap.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part, self._since = "rest", clock()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def begin(self, part: str) -> None:
        """Attribute what starts from now on to `part`, one of `STEP_PARTS`; never wait for the device."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def pop_times(self) -> dict[str, float]:
        """Return and reset the seconds by part, up to the newest lap.

        Called only right after `Engine.fetch_metrics`.
        """
        self.begin(self._part)
        times, self._seconds = self._seconds, dict.fromkeys(STEP_PARTS, 0.0)
        return times


class Engine(Protocol):
    """Model, optimizer and devices of one rank.

    An engine begins the stopwatch parts "forward_backward" and "optimizer" in `step`; the loop begins all others.
    """

    topology: Topology
    control: Control
    device: Device
    stopwatch: Stopwatch
    recomputed_flops_per_token: float
    """FLOPs per token of `lt_model.flops_per_token` that are recomputed; nan if unknown."""

    def step(self, batch: StepParts, lr: float) -> Any:
        """Run all micro-batches and the optimizer step; return a handle without waiting for the device.

        The loop does not call it for a batch without labels (`valid_tokens` 0), whose loss would not be finite.

        If the loss or gradient norm of any rank is not finite, all ranks skip the step without a change of weights and
        optimizer state. The device decides this too.

        Raises:
            PeerError: another rank exited (also from `fetch_metrics`, `validate` and all of `control`).
        """
        ...

    def fetch_metrics(self, pendings: Sequence[Any]) -> list[StepMetrics]:
        """Wait for the steps of the handles and return their metrics; collective."""
        ...

    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Return the loss sum in nats and the number of valid tokens over all ranks.

        Collective: all ranks must pass equally many batches.
        """
        ...

    def score(self, batch: StepBatch) -> PositionScores:
        """Return the log-probability of each label in `batch` and whether it is the greedy choice.

        Waits for the device; changes no state that training depends on. Collective: all ranks must make equally many
        calls, with batches of the same shape; `valid_tokens` is not used.
        """
        ...

    def on_step_begin(self, step: int) -> Sequence[Path]:
        """Start and end profiling views of `[metrics]`; called before each step, counted from 1.

        Returns:
            The files completed, such as a profiler's trace.
        """
        ...

    def dump_debug_info(self, folder: Path) -> str:
        """Dump hang diagnostics into `folder`; return a description of what to read there, or "".

        Called by the watchdog's thread while the main thread may hang in any other method.
        """
        ...

    def peak_memory_bytes(self) -> int:
        """Return and reset the peak memory of this rank's device (on a CPU, of the process)."""
        ...

    def state_bytes(self) -> int:
        """Return the size of this rank's slices in `state`, without copying anything."""
        ...

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        """Allocate host memory (uint8) to which the device copies fastest, for snapshots."""
        ...

    def state(self) -> Snapshot:
        """Return the training state as this rank's slices.

        They may be views that the next step changes.
        """
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's tensors (from any sharding) and scalars.

        Strict about names, shapes and dtypes. Ranks read their parts through
        `lt_trainer.resilience.read_on_all_ranks`, so that all learn of damage before they go on.

        Raises:
            RestoreError: on all ranks, a rank cannot read its part; the state is undefined until another restore.
        """
        ...

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        """Load this rank's slices of a pretrained model's weights; the optimizer state stays initial."""
        ...

    def close(self) -> None:
        """Release devices and process groups."""
        ...


class EngineSpec(Protocol):
    """Static description of an engine; importing it does not import torch.

    Optional members: `hyperparameter(name, value)` returns the fields that a hyperparameter name of another training
    script sets, or None; `plan(resolved, device=, devices=, nodes=, mfu=)` implements `lt train plan`
    (`lt_trainer.planning.plan.plan_recipe`).
    """

    name: str
    options: type
    capabilities: frozenset[str]
    """Supported recipe features: "document_mask", "profile", "memory_snapshot"."""

    def check(self, recipe: Recipe, world: World) -> None:
        """Raise RecipeError, with field, value and remedy, if this engine cannot run the recipe on `world`."""
        ...

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Return environment variables to set before the engine's libraries are loaded."""
        ...

    def open(self, recipe: Recipe, model: ModelConfig, world: World) -> Engine:
        """Open the devices; create the model with initial weights and the optimizer."""
        ...


@functools.cache
def engine_entries() -> Mapping[str, EntryPoint]:
    """Return the entry points of the installed engines by name; all installed packages are looked through, once."""
    return {entry.name: entry for entry in entry_points(group=ENGINE_ENTRY_POINTS)}


def engine_names() -> list[str]:
    """Return the names of the installed engines, without importing them."""
    return sorted(engine_entries())


def engine_spec(name: str) -> EngineSpec:
    """Load the spec of an installed engine.

    Raises:
        RecipeError: no installed package provides this engine.
    """
    if name in (entries := engine_entries()):
        return entries[name].load()
    raise RecipeError(
        f"run.engine = {format_value(name)}: engine not installed (installed: {', '.join(engine_names()) or 'none'}); "
        f"pip install lt-trainer-{name}"
    )
