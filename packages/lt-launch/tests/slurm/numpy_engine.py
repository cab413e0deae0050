"""An engine of lt-trainer in numpy, which starts in a fraction of a second: for training that is cut short many times.

The weights depend on every row that any rank has seen, and a run is the same to the bit each time. The ranks meet at
MASTER_ADDR:MASTER_PORT, each saves its rows of the weights. A step takes STEP_S, as it would on a device.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import Checkpoint, Shard
from lt_trainer.config.section import Section
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, Stopwatch, Topology, World
from lt_trainer.errors import PeerError

STEP_S = 0.03
WIDTH = 16


class StarControl(Control):
    """What the ranks say to each other, over connections to rank 0."""

    def __init__(self, world: World) -> None:
        self.is_first = world.rank == 0
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if not self.is_first:
            self.links = [_connected(address)]
            self.links[0].send_bytes(str(world.rank).encode())
            return
        with Listener(("", address[1]), backlog=world.size) as listener:
            met = {int(link.recv_bytes()): link for link in (listener.accept() for _ in range(world.size - 1))}
        self.links: list[Connection] = [met[rank] for rank in sorted(met)]

    def all_gather(self, value: Any) -> list[Any]:
        mine = json.dumps(value).encode()  # as text, numbers are the same to the bit
        try:
            if not self.is_first:
                self.links[0].send_bytes(mine)
                return json.loads(self.links[0].recv_bytes())
            values = [value, *(json.loads(link.recv_bytes()) for link in self.links)]
            for link in self.links:
                link.send_bytes(json.dumps(values).encode())
            return values
        except (OSError, EOFError) as exc:
            raise PeerError(f"lost contact with another rank: {exc!r}") from exc

    def all_reduce_max(self, value: int) -> int:
        return max(self.all_gather(value))

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


def _connected(address: tuple[str, int]) -> Connection:
    for _ in range(1200):
        with suppress(ConnectionError):
            return Client(address)
        time.sleep(0.05)
    raise PeerError(f"rank 0 does not listen at {address}")


class NumpyEngine:
    """One rank."""

    def __init__(self, world: World) -> None:
        self.topology = Topology(rank=world.rank, world_size=world.size, dp_rank=world.rank, dp_size=world.size)
        self.control = StarControl(world)
        self.device = Device(name="numpy", kind="cpu", count=world.size, peak_flops=1e9, peak_source="made up")
        self.stopwatch = Stopwatch()
        self.recomputed_flops_per_token = 0.0
        self.weights = np.arange(WIDTH, dtype=np.float64)
        self.rows = slice(WIDTH * world.rank // world.size, WIDTH * (world.rank + 1) // world.size)
        self.steps = 0

    def step(self, batch: StepBatch, lr: float) -> tuple[float, float]:
        self.stopwatch.begin("forward_backward")
        mine = np.bincount(batch.input_ids.ravel() % WIDTH, minlength=WIDTH) / batch.valid_tokens
        gradient = np.sum(self.control.all_gather(mine.tolist()), axis=0)
        self.stopwatch.begin("optimizer")
        self.weights[:] = self.weights - lr * gradient + 1e-3 * np.sin(self.weights)
        self.steps += 1
        time.sleep(STEP_S)
        return float(np.abs(self.weights).sum()), float(np.sqrt((gradient**2).sum()))

    def fetch_metrics(self, pendings: Sequence[tuple[float, float]]) -> list[StepMetrics]:
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in pendings]

    def on_step_begin(self, step: int) -> list[Path]:
        return []

    def dump_debug_info(self, folder: Path) -> str:
        return ""

    def peak_memory_bytes(self) -> int:
        return self.state_bytes()

    def state_bytes(self) -> int:
        return self.weights[self.rows].nbytes

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def state(self) -> Snapshot:
        mine = self.weights[self.rows]
        place = {"dtype": "F64", "global_shape": (WIDTH,), "offset": (self.rows.start,), "shape": mine.shape}
        shard = Shard(group="weights", name="w", data=mine.view(np.uint8), **place)
        return Snapshot(shards=[shard], scalars={"optimizer_step": self.steps})

    def restore(self, checkpoint: Checkpoint) -> None:
        self.weights[:] = checkpoint.read("weights", "w").view(np.float64)
        self.steps = int(checkpoint.manifest.scalars["optimizer_step"])

    def close(self) -> None:
        for link in self.control.links:
            link.close()


class NumpyOptions(Section):
    """None."""


class NumpySpec:
    name = "numpy"
    options = NumpyOptions
    capabilities = frozenset({"document_mask"})

    def check(self, recipe: Recipe, world: World) -> None:
        recipe.accumulation_steps(world.size)

    def env(self, recipe: Recipe) -> dict[str, str]:
        return {}

    def open(self, recipe: Recipe, model: Any, world: World) -> NumpyEngine:
        return NumpyEngine(world)


SPEC = NumpySpec()
"""What the entry point names."""
