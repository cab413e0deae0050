"""What a training engine is, seen from the loop: a handful of values and two protocols, without torch.

An `EngineSpec` is found through the entry-point group `lt.engines` and is cheap to import: it knows the engine's
options and checks a recipe. `open` makes the `Engine`, which owns devices, model and optimizer. The loop only ever
sees numpy arrays going in (`StepBatch`) and floats coming out (`read`), so a fake engine of thirty lines can test all
of it.

Shapes: M micro-batches per step, B rows per micro-batch, T positions per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lt_trainer.control import Control
from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    import numpy as np

    from lt_ckpt import Checkpoint, Shard
    from lt_ckpt.save import PartFiles
    from lt_model import LlamaConfig
    from lt_trainer.pretrained import Pretrained
    from lt_trainer.sections import Recipe

ENGINES = "lt.engines"


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of one run, as torchrun describes them to each of its ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def n_nodes(self) -> int:
        """Nodes of the run, taking every node to hold `local_size` ranks."""
        return self.size // self.local_size

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them the world is one process.

        Raises:
            RecipeError: some but not all of them are set, or one is not a number.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in environ]
        if len(missing) == len(names):
            return World()
        if missing:
            raise RecipeError(
                f"the environment sets some of {', '.join(names)} but not {', '.join(missing)}; "
                "start the ranks with torchrun, or unset them all to train in one process"
            )
        try:
            rank, size, local_rank, local_size = (int(environ[name]) for name in names)
        except ValueError as exc:
            raise RecipeError(f"the environment's {', '.join(names)} must be whole numbers: {exc}") from exc
        if not (0 <= rank < size and 0 <= local_rank < local_size and size % local_size == 0):
            raise RecipeError(
                f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} do not fit "
                "together"
            )
        return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This rank's part of one optimizer step: int32 arrays of fixed shape [M, B, T].

    Labels are shifted already and -100 where there is none; `doc_ids` is the truth about documents.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    doc_ids: np.ndarray
    valid_tokens: int
    """Positions with a label in the *global* batch: the loss is the sum over all ranks divided by this."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this rank stands. Ranks that share a `dp_rank` (tensor, context, pipeline peers) read the same rows."""

    rank: int
    world: int
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes on, with the peak that MFU is measured against and where that number comes from."""

    name: str
    kind: str
    count: int
    """Devices of the whole run."""
    peak_flops: float
    """Peak of one device in FLOP/s at the compute dtype."""
    peak_source: str


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The numbers of one step, equal on every rank: loss in nats per valid token, gradient norm before clipping."""

    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether both are; a step in which one is not was skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of an engine: this rank's slices of every tensor, and small typed values that all ranks share."""

    shards: Iterable[Shard]
    small: Mapping[str, int | float | str | bool]
    layout: PartFiles | None = None
    """What makes files of the shards where they are to be another program's; the shards are then as it wants them."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest should say of how the ranks held the tensors; equal on all ranks."""


class Stopwatch(Protocol):
    """Where this rank's time goes, in laps of the parts that `timing.PARTS` names.

    `timing.HostStopwatch` is one. On a device that runs ahead of the host, laps are marks in the device's queue, and a
    part is the time between two marks there: what the host waits for while the device is busy costs nothing.
    """

    def lap(self, part: str) -> None:
        """What is begun from here on belongs to `part`; never waits for the device."""
        ...

    def times(self) -> Mapping[str, float]:
        """Seconds by part since this was last asked, up to the newest lap; asked only right after `Engine.read`."""
        ...


class Engine(Protocol):
    """A model, its optimizer and its devices, ready to step.

    An engine laps its stopwatch in `step`: "forward_backward", then "optimizer". The loop does all the other parts.
    """

    topology: Topology
    control: Control
    device: Device
    stopwatch: Stopwatch
    recomputed_flops_per_token: float
    """Of `lt_model.flops_per_token`, how many are done a second time per token; nan where that is not known."""

    def step(self, batch: StepBatch, lr: float) -> Any:
        """Run all micro-batches of a step and update the weights; returns a handle without waiting for the device.

        Where the loss or the gradient norm is not finite, on any rank, the step is skipped on all of them: weights and
        optimizer stay as they were. That too is decided on the device.

        Raises:
            PeerError: another rank is gone (also from `read`, `evaluate` and everything in `control`).
        """
        ...

    def read(self, pendings: Sequence[Any]) -> list[StepMetrics]:
        """Wait for the steps behind the handles; called by every rank for the same steps."""
        ...

    def evaluate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Sum of the loss in nats and number of valid tokens over all ranks; every rank brings as many batches."""
        ...

    def boundary(self, step: int) -> Sequence[Path]:
        """Step number `step`, counted from 1, comes next: where views that `[metrics]` asks for begin and end.

        Returns the files that were finished, such as a profiler's trace.
        """
        ...

    def last_words(self, folder: Path) -> str:
        """Write into `folder` what shows why a run hangs; returns what to read there, "" where there is nothing.

        Called by the watchdog's thread while the main thread may hang in any of the other methods.
        """
        ...

    def memory_bytes(self) -> int:
        """Peak memory of this rank's device (on a CPU: of the process) since it was last asked, in bytes."""
        ...

    def state_bytes(self) -> int:
        """Bytes of this rank's slices in `state`, known without copying anything."""
        ...

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Bytes (uint8) on the host, of the kind that the devices copy into fastest, for copies of the state."""
        ...

    def state(self) -> Snapshot:
        """Everything that a later process needs to go on, as this rank's slices.

        The slices may be views that the next step changes.
        """
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's tensors (sharded in any way) and small state; strict about names, shapes, dtypes."""
        ...

    def load_weights(self, pretrained: Pretrained) -> None:
        """Take over a model's weights, this rank's slices of them; the optimizer stays as new."""
        ...

    def close(self) -> None:
        """Release devices and process groups."""
        ...


class EngineSpec(Protocol):
    """What is known about an engine before it is opened. Importing one imports no torch.

    A spec may offer more: `hyperparameter(name, value)`, the fields that a name of the scripts which it replaces sets,
    or None; and `plan(resolved, device=, devices=, nodes=, mfu=)`, its answer to `lt train plan` (`planning.answer`).
    """

    name: str
    options: type
    capabilities: frozenset[str]
    """Of what a recipe may ask for, what the engine can do: "document_mask", "profile", "memory_snapshot"."""

    def check(self, recipe: Recipe, world: World) -> None:
        """Refuse a recipe that this engine cannot run on `world`, naming field, value and remedy (RecipeError)."""
        ...

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Environment variables that a rank must have before the engine's libraries load."""
        ...

    def open(self, recipe: Recipe, model: LlamaConfig, world: World) -> Engine:
        """Take devices, build the model with its initial weights and the optimizer."""
        ...


def engine_names() -> list[str]:
    """Names of the installed engines, without importing any."""
    return sorted({entry.name for entry in entry_points(group=ENGINES)})


def engine_spec(name: str) -> EngineSpec:
    """Load the spec of an installed engine.

    Raises:
        RecipeError: no installed package offers an engine of that name.
    """
    for entry in entry_points(group=ENGINES):
        if entry.name == name:
            return entry.load()
    raise RecipeError(
        f"run.engine = {name!r}: no installed package offers that engine (installed: "
        f"{', '.join(engine_names()) or 'none'}); "
        f"pip install lt-trainer-{name}"
    )
