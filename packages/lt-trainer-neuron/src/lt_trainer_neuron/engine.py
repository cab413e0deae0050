"""The Trainium engine behind `lt_trainer.engine.Engine`: the order of a step, and the state by names, over a backend.

A backend holds tensors under neuronx-distributed's (NxD's) keys, cut over tensor-parallel ranks and stages, and of the
optimizer's state the rows that ZeRO-1 leaves to a rank. Here those are told apart as boxes of model tensors
(`held.py`): so initial weights, checkpoints and pretrained models go in and out by Hugging Face's names, and a
checkpoint of any mesh, or of another engine, goes on in any other.

Cost: nothing beside the backend's; the boxes are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lt_ckpt import Checkpoint, Shard, TensorSpec
from lt_model import LlamaConfig, parameters
from lt_model.init import init_slice
from lt_trainer.engine import Snapshot, StepBatch, StepMetrics
from lt_trainer.pretrained import Pretrained
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer.torch import (
    DTYPE_CODES,
    Part,
    as_shard,
    fill_from,
    fill_from_pretrained,
    host_memory,
    peers,
)
from lt_trainer_neuron.backend import MASTERS, Backend, Rows
from lt_trainer_neuron.checkpoint import nxd_snapshot, nxd_state_bytes
from lt_trainer_neuron.grid import cut_of
from lt_trainer_neuron.held import Held, held_by, rows_of
from lt_trainer_neuron.options import NeuronOptions


@dataclass(frozen=True)
class Pending:
    """A step that the device may still be working on: the loss and the gradient norm, over all ranks."""

    loss: Tensor
    grad_norm: Tensor


class NeuronEngine:
    """See the module's text.

    Args:
        recipe: the run's.
        config: the model.
        backend: opened for both, its tensors unfilled.
    """

    def __init__(self, recipe: Recipe, config: LlamaConfig, backend: Backend) -> None:
        self.backend = backend
        self._recipe, self._config = recipe, config
        self.topology = backend.grid.topology
        self.control = backend.control
        self.device = backend.device
        self.stopwatch = backend.stopwatch
        self.recomputed_flops_per_token = backend.recomputed_flops_per_token
        self._table = {parameter.name: parameter for parameter in parameters(config)}
        self._held = held_by(config, cut_of(recipe), backend.grid)
        self._zero1 = engine_options(recipe, "neuron", NeuronOptions).zero1
        with torch.no_grad():
            for name, part in self._parts(MASTERS).items():
                local, shape = part.local, tuple(part.local.shape)
                drawn = init_slice(
                    self._table[name], recipe.run.seed, offset=part.offset, shape=shape, dtype=local.dtype
                )
                local.copy_(drawn)
        with peers():
            backend.slots_changed()

    def step(self, batch: StepBatch, lr: float) -> Pending:
        """Forward and backward of all micro-batches, clip, update; returns without waiting for the device.

        Raises:
            PeerError: another rank is gone.
        """
        with peers():
            self.stopwatch.lap("forward_backward")
            loss = self.backend.accumulate(batch)
            self.stopwatch.lap("optimizer")
            pending = Pending(*self.backend.update(loss, lr))
            self.backend.mark()
            return pending

    def read(self, pendings: Sequence[Pending]) -> list[StepMetrics]:
        """The numbers of the steps behind `pendings`; the only place where the host waits for the device."""
        with peers():
            losses = self.backend.read([pending.loss for pending in pendings])
            norms = self.backend.read([pending.grad_norm for pending in pendings])
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in zip(losses, norms, strict=True)]

    def evaluate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Sum of the loss in nats and of valid tokens, over every rank's batches."""
        with peers():
            losses: list[Tensor] = []
            tokens = 0
            for batch in batches:
                losses.append(self.backend.evaluate(batch))
                tokens += batch.valid_tokens
                self.backend.mark()
            loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
            # Every stage reads the same rows: one of them tells how many tokens they have.
            counted = torch.tensor(float(tokens if self.backend.grid.last_stage else 0), dtype=torch.float64)
            totals = self.backend.summed(torch.stack((loss, counted.to(loss))))
            self.backend.mark()
            loss_sum, tokens = self.backend.read(list(totals.unbind()))
        return loss_sum, int(tokens)

    def boundary(self, step: int) -> list[Path]:
        """Nothing looks closely at single steps of this engine."""
        return []

    def last_words(self, folder: Path) -> str:
        """None: these collectives keep no record."""
        return ""

    def memory_bytes(self) -> int:
        """Peak memory of this rank's device, or on a CPU of the process."""
        return self.backend.memory_bytes()

    def state_bytes(self) -> int:
        """Bytes of what this rank gives to a checkpoint."""
        return nxd_state_bytes(self._recipe, self.backend)

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Bytes on the host."""
        return host_memory(n_bytes, torch.device("cpu"))

    def state(self) -> Snapshot:
        """This rank's tensors as files of NxD, and the optimizer's step count; see `checkpoint.py`."""
        return nxd_snapshot(self._recipe, self._config, self.backend)

    def boxes(self) -> Iterator[Shard]:
        """The same state by the names of the model: all ranks together give each element of it once."""
        for group, parts in self._groups().items():
            for name, part in parts.items():
                shard = as_shard(group, name, part)
                if shard is not None:
                    yield shard

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over weights, moments and step count, from whatever mesh they were saved on."""
        groups = self._groups()
        # A rank need not hold a part of every tensor, but the checkpoint must have all of them.
        dtypes = {group: _dtype_of(slots) for group, slots in self.backend.slots.items()}
        checkpoint.require(
            {
                group: {name: TensorSpec(DTYPE_CODES[dtype], row.shape) for name, row in self._table.items()}
                for group, dtype in dtypes.items()
            }
        )
        fill_from(checkpoint, groups)
        self.backend.steps = int(checkpoint.manifest.small["optimizer_step"])
        with peers():
            self.backend.slots_changed()

    def load_weights(self, pretrained: Pretrained) -> None:
        """Take over a model's weights, cast to the masters' dtype; moments and step count stay as new."""
        fill_from_pretrained(pretrained, self._parts(MASTERS))
        with peers():
            self.backend.slots_changed()

    def close(self) -> None:
        """Leave the process groups."""
        self.backend.close()

    def _groups(self) -> dict[str, dict[str, Part]]:
        return {group: self._parts(group) for group in self.backend.slots}

    def _parts(self, group: str) -> dict[str, Part]:
        """What this rank has of each model tensor in one group of the state, where it has a row of it."""
        found: dict[str, Part] = {}
        for key, rows in self.backend.slots[group].items():
            for box in self._held[key]:
                held = rows_of(box, rows.first, rows.local.shape[0])
                if held is not None:
                    assert held.name not in found, f"{held.name} is held twice"
                    found[held.name] = self._part(held, rows)
        return found

    def _part(self, held: Held, rows: Rows) -> Part:
        grid = self.backend.grid
        replicas, replica = (1, 0) if self._zero1 else (grid.dp, grid.dp_rank)
        return Part(
            local=rows.local[held.row : held.row + held.shape[0]].detach(),
            shape=self._table[held.name].shape,
            offset=held.offset,
            copies=len(held.holders) * replicas,
            copy=held.copy_of(grid) * replicas + replica,
        )


def _dtype_of(slots: Mapping[str, Rows]) -> torch.dtype:
    """The dtype of a group of the state, which is one for all its tensors."""
    (dtype,) = {rows.local.dtype for rows in slots.values()}
    return dtype
