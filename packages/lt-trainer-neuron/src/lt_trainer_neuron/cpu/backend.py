"""CPU compute backend: process groups, one pipeline stage, the pipeline schedule, ZeRO-1.

The compute dtype is `engine.neuron.cpu_dtype`; master weights are fp32, or float64 if that is the compute dtype. Norm
weights are never narrower than fp32. Nothing is recomputed in the backward pass: selective checkpointing only changes
memory.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_model import LlamaConfig
from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, StepBatch, Stopwatch, World
from lt_trainer.torch import GlooControl, micro_batches_to_device, translate_dist_errors, weight_decay_names
from lt_trainer_neuron.compute_backend import RowSlice
from lt_trainer_neuron.cpu.pipeline import PipelineSchedule
from lt_trainer_neuron.cpu.process_groups import ProcessGroups, init_process_group
from lt_trainer_neuron.cpu.stage import CpuPipelineStage, MicroBatch
from lt_trainer_neuron.cpu.zero1 import Zero1Optimizer
from lt_trainer_neuron.grid import Grid, build_nxd_options
from lt_trainer_neuron.options import NeuronOptions
from lt_trainer_neuron.tensor_slices import build_tensor_slices, replicated_kv_heads

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class CpuBackend:
    """`ComputeBackend` over gloo on the CPU.

    Raises:
        PeerError: a rank did not join the process group (raised by the constructor).
    """

    recomputed_flops_per_token = 0.0

    def __init__(self, recipe: Recipe, config: LlamaConfig, world: World) -> None:
        options = engine_options(recipe, "neuron", NeuronOptions)
        nxd_options, timeout_s = build_nxd_options(recipe), recipe.fault_tolerance.collective_timeout_s
        sequence_parallel, dtype = recipe.parallel.sequence_parallel, DTYPES[options.cpu_dtype]
        self.grid = Grid.from_options(recipe.parallel, world.rank, world.size)
        with translate_dist_errors():
            init_process_group(world, timeout_s)
            self._groups = ProcessGroups.make(self.grid, replicated_kv_heads(nxd_options, config.n_kv_heads), timeout_s)
        self.control: Control = GlooControl(timeout_s) if world.size > 1 else Control()
        self._stage = CpuPipelineStage(
            config, nxd_options, self.grid, self._groups.tp, sequence_parallel=sequence_parallel, dtype=dtype
        )
        self._pipeline = PipelineSchedule(self._stage, self._groups.pp, dtype)
        self._optimizer = Zero1Optimizer(
            config,
            self._stage.weights,
            build_tensor_slices(config, nxd_options, self.grid),
            weight_decay_names(config, include_embeddings=recipe.optimizer.decay_embeddings),
            recipe.optimizer,
            grid=self.grid,
            groups=self._groups,
            zero1=options.zero1,
            sequence_parallel=sequence_parallel,
            count_replicas=options.nxd_grad_norm,
        )
        self._z_loss, self._document_mask = recipe.optimizer.z_loss, recipe.data.document_mask
        peak, source = _measure_peak_flops(dtype)
        self.device = Device(name="cpu", kind="cpu", count=world.size, peak_flops=peak, peak_source=source)
        self.stopwatch: Stopwatch = Stopwatch()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Layer tensors by NxD's key."""
        return self._stage.weights

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, RowSlice]]:
        """Master weights and slots."""
        return self._optimizer.state_groups

    @property
    def step_count(self) -> int:
        """Number of optimizer steps that were not skipped."""
        return int(self._optimizer.step_count)

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._optimizer.step_count.fill_(value)

    def sync_model_params(self) -> None:
        """Round the master weights into the layers' weights."""
        self._optimizer.sync_model_params()

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run forward and backward of all micro-batches; see `ComputeBackend.forward_backward`."""
        # Tensor division by zero valid tokens yields inf, as on other devices, and the step is skipped.
        valid = torch.tensor(float(batch.valid_tokens), dtype=torch.float64)
        scale = float(1 / valid)
        return (
            self._pipeline.forward_backward(
                self._micro_batches(batch), scale, self._z_loss, self._optimizer.accumulate_gradients
            )
            / valid
        )

    def optimizer_step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Reduce gradients, clip and step; see `ComputeBackend.optimizer_step`."""
        return self._optimizer.step(loss * float(self.grid.tp_rank == 0), lr)

    def validate(self, batch: StepBatch) -> Tensor:
        """Return the summed loss of this rank's rows."""
        return self._pipeline.validate(self._micro_batches(batch))

    def score(self, batch: StepBatch) -> Tensor | None:
        """Return the scores of this rank's labels; see `ComputeBackend.score`."""
        return self._pipeline.score(self._micro_batches(batch))

    def mark_step(self) -> None:
        """Do nothing: execution is eager."""

    def fetch_scalars(self, values: Sequence[Tensor]) -> list[float]:
        """Return scalars as floats."""
        return [float(value) for value in values]

    def fetch_array(self, values: Tensor) -> np.ndarray:
        """Return a tensor as a float64 array."""
        return values.to(torch.float64).numpy()

    def memory_bytes(self) -> int:
        """Return the peak resident memory of this process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def close(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()

    def _micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        arrays = (batch.input_ids, batch.position_ids, batch.labels, batch.doc_ids)
        return [
            MicroBatch(
                input_ids=ids, position_ids=positions, labels=labels, doc_ids=documents if self._document_mask else None
            )
            for ids, positions, labels, documents in zip(
                *(micro_batches_to_device(array, CPU) for array in arrays), strict=True
            )
        ]


def _measure_peak_flops(dtype: torch.dtype, seconds: float = 0.05) -> tuple[float, str]:
    """Return the measured matmul FLOP/s of this process and a description of the measurement."""
    size, best = 512, float("inf")
    a = torch.ones(size, size, dtype=dtype)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    threads = torch.get_num_threads()
    return 2 * size**3 / best, f"measured, best {size}^3 matrix product in {str(dtype)[6:]}, {threads} threads"
