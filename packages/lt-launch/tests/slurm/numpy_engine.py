"""An engine of lt-trainer in numpy, which starts in a fraction of a second: for training that is cut short many times.

One matrix E is embedding and head of a model of next tokens, logits = E[ids] E^T, trained by momentum. Every rank takes
the gradient of its own rows; the sum is made in the order of the ranks, so a run is the same to the bit each time. The
ranks meet at MASTER_ADDR:MASTER_PORT, each saves its rows of the weights and of the momentum. A step takes STEP_S, as
it would on a device.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import Checkpoint, Shard
from lt_model import ModelConfig
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.config.section import Section
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, Stopwatch, Topology, World
from lt_trainer.errors import PeerError
from lt_trainer.evaluation.position_scores import PositionScores

STEP_S = 0.05
MOMENTUM = 0.9


class Star:
    """All ranks over sockets to rank 0."""

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world, self.links = world, list[socket.socket]()
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if world.rank == 0:
            with socket.create_server(("", address[1]), backlog=world.size) as server:
                server.settimeout(timeout_s)
                met = [self._met(server.accept()[0]) for _ in range(world.size - 1)]
            self.links = [link for _, link in sorted(met, key=lambda one: one[0])]
        else:
            self.links = [_connected(address, timeout_s)]
            self.links[0].sendall(struct.pack("!q", world.rank))
        for link in self.links:
            link.settimeout(timeout_s)

    def _met(self, link: socket.socket) -> tuple[int, socket.socket]:
        return struct.unpack("!q", _received(link, 8))[0], link

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank brought, by rank."""
        try:
            if self.world.rank == 0:
                all_ = [mine, *(_message(link) for link in self.links)]
                for link in self.links:
                    link.sendall(b"".join(struct.pack("!q", len(one)) + one for one in all_))
                return all_
            self.links[0].sendall(struct.pack("!q", len(mine)) + mine)
            return [_message(self.links[0]) for _ in range(self.world.size)]
        except OSError as exc:
            raise PeerError(f"lost contact with another rank: {exc}") from exc


def _connected(address: tuple[str, int], timeout_s: float) -> socket.socket:
    for _ in range(round(timeout_s / 0.05)):
        with suppress(ConnectionError):
            return socket.create_connection(address, timeout_s)
        time.sleep(0.05)
    raise PeerError(f"rank 0 does not listen at {address}")


def _message(link: socket.socket) -> bytes:
    return _received(link, struct.unpack("!q", _received(link, 8))[0])


def _received(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = link.recv(size - len(found))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return bytes(found)


class StarControl(Control):
    """What the loop's ranks say to each other."""

    def __init__(self, star: Star) -> None:
        self.star = star

    def all_gather(self, value: Any) -> list[Any]:
        return [json.loads(one) for one in self.star.gather(json.dumps(value).encode())]

    def all_reduce_max(self, value: int) -> int:
        return max(self.all_gather(value))

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


class NumpyEngine:
    """One rank."""

    def __init__(self, recipe: Recipe, model: ModelConfig, world: World) -> None:
        self.topology = Topology(rank=world.rank, world_size=world.size, dp_rank=world.rank, dp_size=world.size)
        self.star = Star(world, recipe.fault_tolerance.hang_timeout_s)
        self.control = StarControl(self.star)
        self.device = Device(name="numpy", kind="cpu", count=world.size, peak_flops=1e9, peak_source="made up")
        self.stopwatch = Stopwatch()
        self.recomputed_flops_per_token = 0.0
        shape = model.vocab_size, model.hidden_size
        self.state_of = {"weights": np.sin(np.arange(shape[0] * shape[1], dtype=np.float64)).reshape(shape) / 8}
        self.state_of["momentum"] = np.zeros(shape)
        self.steps = 0

    def step(self, batch: StepBatch, lr: float) -> tuple[float, float]:
        self.stopwatch.begin("forward_backward")
        loss, gradient = self._backward(batch)
        parts = [np.frombuffer(one) for one in self.star.gather(np.array([loss, *gradient.ravel()]).tobytes())]
        loss, gradient = sum(float(part[0]) for part in parts), sum(part[1:] for part in parts)
        assert isinstance(gradient, np.ndarray)
        self.stopwatch.begin("optimizer")
        weights, momentum = self.state_of["weights"], self.state_of["momentum"]
        momentum[:] = MOMENTUM * momentum + gradient.reshape(weights.shape)
        weights[:] = weights - 100 * lr * momentum
        self.steps += 1
        time.sleep(STEP_S)
        return loss, float(np.sqrt((gradient**2).sum()))

    def _backward(self, batch: StepBatch) -> tuple[float, np.ndarray]:
        """This rank's part of the loss and of its gradient."""
        weights = self.state_of["weights"]
        ids, labels = batch.input_ids.ravel(), batch.labels.ravel()
        ids, labels = ids[labels >= 0], labels[labels >= 0]
        logits = weights[ids] @ weights.T
        logits -= logits.max(axis=1, keepdims=True)
        each = np.exp(logits)
        each /= each.sum(axis=1, keepdims=True)
        rows = np.arange(len(ids))
        loss = -float(np.log(each[rows, labels]).sum()) / batch.valid_tokens
        each[rows, labels] -= 1
        each /= batch.valid_tokens
        gradient = each.T @ weights[ids]
        np.add.at(gradient, ids, each @ weights)
        return loss, gradient

    def fetch_metrics(self, pendings: Sequence[tuple[float, float]]) -> list[StepMetrics]:
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in pendings]

    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        raise NotImplementedError

    def score(self, batch: StepBatch) -> PositionScores:
        raise NotImplementedError

    def on_step_begin(self, step: int) -> list[Path]:
        return []

    def dump_debug_info(self, folder: Path) -> str:
        return ""

    def peak_memory_bytes(self) -> int:
        return self.state_bytes()

    def state_bytes(self) -> int:
        return sum(array[self._rows(len(array))].nbytes for array in self.state_of.values())

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def _rows(self, count: int) -> slice:
        rank, world = self.topology.rank, self.topology.world_size
        return slice(count * rank // world, count * (rank + 1) // world)

    def state(self) -> Snapshot:
        shards = []
        for name, array in self.state_of.items():
            rows = self._rows(len(array))
            mine = array[rows]
            shards.append(
                Shard(
                    group=name,
                    name="embedding",
                    dtype="F64",
                    global_shape=array.shape,
                    offset=(rows.start, 0),
                    shape=mine.shape,
                    data=mine.reshape(-1).view(np.uint8),
                )
            )
        return Snapshot(shards=shards, scalars={"optimizer_step": self.steps})

    def restore(self, checkpoint: Checkpoint) -> None:
        for name, array in self.state_of.items():
            array[:] = checkpoint.read(name, "embedding").view(np.float64).reshape(array.shape)
        self.steps = int(checkpoint.manifest.scalars["optimizer_step"])

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for link in self.star.links:
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

    def open(self, recipe: Recipe, model: ModelConfig, world: World) -> NumpyEngine:
        return NumpyEngine(recipe, model, world)


SPEC = NumpySpec()
"""What the entry point names."""
