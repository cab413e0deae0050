"""The cpu backend put together: groups, one stage, the pipeline, ZeRO-1.

Compute dtype is `engine.neuron.cpu_dtype`; masters are fp32, or float64 where that is computed in. Weights of norms are
never narrower than fp32. Nothing is recomputed in the backward pass: selective checkpointing changes memory alone.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lt_model import LlamaConfig
from lt_trainer.control import Control, SoloControl
from lt_trainer.engine import Device, StepBatch, Stopwatch, World
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer.timing import HostStopwatch
from lt_trainer.torch import GlooControl, decayed, peers, to_device
from lt_trainer_neuron.backend import Rows
from lt_trainer_neuron.cpu.collectives import total
from lt_trainer_neuron.cpu.groups import Groups, join
from lt_trainer_neuron.cpu.pipeline import Pipeline
from lt_trainer_neuron.cpu.stage import Micro, Stage
from lt_trainer_neuron.cpu.zero import ZeroAdamW
from lt_trainer_neuron.grid import Grid, cut_of
from lt_trainer_neuron.held import held_by, replicated_heads
from lt_trainer_neuron.options import NeuronOptions

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class CpuBackend:
    """See `lt_trainer_neuron.backend.Backend`.

    Raises:
        PeerError: (at birth) a rank did not come.
    """

    recomputed_flops_per_token = 0.0

    def __init__(self, recipe: Recipe, config: LlamaConfig, world: World) -> None:
        options = engine_options(recipe, "neuron", NeuronOptions)
        cut, timeout_s = cut_of(recipe), recipe.guard.collective_timeout_s
        sequence, dtype = recipe.parallel.sequence_parallel, DTYPES[options.cpu_dtype]
        self.grid = Grid.of(recipe.parallel, world.rank, world.size)
        with peers():
            join(world, timeout_s)
            self._groups = Groups.make(self.grid, replicated_heads(cut, config.n_kv_heads), timeout_s)
        self.control: Control = GlooControl(timeout_s) if world.size > 1 else SoloControl()
        self._stage = Stage(config, cut, self.grid, self._groups.tp, sequence=sequence, dtype=dtype)
        self._pipeline = Pipeline(self._stage, self._groups.pp, dtype)
        self._optimizer = ZeroAdamW(
            self._stage.weights,
            held_by(config, cut, self.grid),
            decayed(config, embeddings=recipe.optimizer.decay_embeddings),
            recipe.optimizer,
            grid=self.grid,
            groups=self._groups,
            shard=options.zero1,
            sequence=sequence,
            count_copies=options.nxd_grad_norm,
        )
        self._z_loss, self._document_mask = recipe.optimizer.z_loss, recipe.data.document_mask
        peak, source = _measured_peak(dtype)
        self.device = Device(name="cpu", kind="cpu", count=world.size, peak_flops=peak, peak_source=source)
        self.stopwatch: Stopwatch = HostStopwatch()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The layers' tensors by NxD's key."""
        return self._stage.weights

    @property
    def slots(self) -> Mapping[str, Mapping[str, Rows]]:
        """Masters and moments."""
        return self._optimizer.groups

    @property
    def steps(self) -> int:
        """Updates that had an effect."""
        return int(self._optimizer.steps)

    @steps.setter
    def steps(self, value: int) -> None:
        self._optimizer.steps.fill_(value)

    def slots_changed(self) -> None:
        """Round the masters into the layers."""
        self._optimizer.masters_changed()

    def accumulate(self, batch: StepBatch) -> Tensor:
        """All passes of the step; see `Backend.accumulate`."""
        # In a tensor the division by no valid tokens is infinite, as on other devices, and the step is skipped.
        valid = torch.tensor(float(batch.valid_tokens), dtype=torch.float64)
        scale = float(1 / valid)
        return self._pipeline.train(self._micros(batch), scale, self._z_loss, self._optimizer.add_gradients) / valid

    def update(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Sum, clip and update; see `Backend.update`."""
        return self._optimizer.step(loss * float(self.grid.tp_rank == 0), lr)

    def evaluate(self, batch: StepBatch) -> Tensor:
        """The summed loss of the rows."""
        return self._pipeline.evaluate(self._micros(batch))

    def summed(self, values: Tensor) -> Tensor:
        """Summed over data-parallel ranks and stages."""
        return total(values * float(self.grid.tp_rank == 0), self._groups.world)

    def mark(self) -> None:
        """Nothing: what is computed is computed at once."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Scalars as numbers."""
        return [float(value) for value in values]

    def memory_bytes(self) -> int:
        """Peak resident size of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def close(self) -> None:
        """Leave the process groups."""
        dist.destroy_process_group()

    def _micros(self, batch: StepBatch) -> list[Micro]:
        arrays = (batch.input_ids, batch.position_ids, batch.labels, batch.doc_ids)
        return [
            Micro(ids=ids, positions=positions, labels=labels, documents=documents if self._document_mask else None)
            for ids, positions, labels, documents in zip(*(to_device(array, CPU) for array in arrays), strict=True)
        ]


def _measured_peak(dtype: torch.dtype, seconds: float = 0.05) -> tuple[float, str]:
    """FLOP/s of a matrix product of this process, and how that number was made."""
    size, best = 512, float("inf")
    a = torch.ones(size, size, dtype=dtype)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    threads = torch.get_num_threads()
    return 2 * size**3 / best, f"measured, best {size}^3 matrix product in {str(dtype)[6:]}, {threads} threads"
