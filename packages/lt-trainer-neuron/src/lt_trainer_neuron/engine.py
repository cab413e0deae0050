"""Trainium engine, the `lt_trainer.engine.Engine` over the Trainium backend: step order and named state.

A backend holds tensors under neuronx-distributed's (NxD's) keys, sharded over tensor-parallel ranks and stages; of the
optimizer state it holds the rows that ZeRO-1 assigns to the rank. The engine addresses them as slices of model tensors
(`tensor_slices.py`): initial weights, checkpoints and pretrained models are read and written by Hugging Face's names,
and a checkpoint of any mesh or engine can be resumed on any other.

Tensors move between host and device whole, and are cut on the host: on a lazy device each slice would be a graph to
compile. Initial weights, a checkpoint and a pretrained model fill them in the same way, so that a run's graphs do not
depend on how it started.

Cost: nothing beyond the backend's; the slices are computed once. With a device, host memory for `READ_BATCH_BYTES` of
tensors (at least one) while they are filled, and for one tensor while it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lt_ckpt import Checkpoint, Shard, TensorSpec
from lt_model import ModelConfig, param_specs
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import Snapshot, StepBatch, StepMetrics, StepParts
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.driver import check_optimizer
from lt_trainer.resilience.rank_sync import read_on_all_ranks
from lt_trainer.torch import (
    DTYPE_CODES,
    READ_BATCH_BYTES,
    LocalShard,
    PendingStep,
    allocate_host_memory,
    init_parameters,
    load_pretrained_tensors,
    load_tensors,
    to_checkpoint_shard,
    translate_dist_errors,
)
from lt_trainer_neuron.checkpoint import nxd_snapshot, nxd_state_bytes
from lt_trainer_neuron.grid import build_nxd_options
from lt_trainer_neuron.nxd.backend import NxdBackend
from lt_trainer_neuron.options import NeuronOptions
from lt_trainer_neuron.row_slice import MASTER_WEIGHTS, RowSlice
from lt_trainer_neuron.tensor_slices import TensorSlice, build_tensor_slices, intersect_rows


class NeuronEngine:
    """Trainium engine of one rank.

    Args:
        recipe: recipe of the run.
        config: model configuration.
        backend: backend opened for both, with unfilled tensors.
    """

    def __init__(self, recipe: Recipe, config: ModelConfig, backend: NxdBackend) -> None:
        self.backend = backend
        self._recipe, self._config = recipe, config
        self.topology = backend.grid.topology
        self.control = backend.control
        self.device = backend.device
        self.stopwatch = backend.stopwatch
        self.recomputed_flops_per_token = backend.recomputed_flops_per_token
        self._param_specs = {parameter.name: parameter for parameter in param_specs(config)}
        self._tensor_slices = build_tensor_slices(config, build_nxd_options(recipe), backend.grid)
        self._zero1 = engine_options(recipe, "neuron", NeuronOptions).zero1
        self._fill([MASTER_WEIGHTS], lambda shards: init_parameters(shards[MASTER_WEIGHTS], config, recipe.run.seed))
        self._sync(step_count=0)

    def step(self, batch: StepParts, lr: float) -> PendingStep:
        """Run one training step; return without waiting for the device.

        Raises:
            PeerError: another rank has exited.
        """
        with translate_dist_errors():
            self.stopwatch.begin("forward_backward")
            loss = self.backend.forward_backward(batch)
            self.stopwatch.begin("optimizer")
            pending = PendingStep(*self.backend.optimizer_step(loss, lr))
            self.backend.tensor_device.mark_step()
            return pending

    def fetch_metrics(self, pendings: Sequence[PendingStep]) -> list[StepMetrics]:
        """Return the metrics of pending steps; the only call in training that waits for the device."""
        with translate_dist_errors():
            losses = self.backend.tensor_device.fetch_scalars([pending.loss for pending in pendings])
            norms = self.backend.tensor_device.fetch_scalars([pending.grad_norm for pending in pendings])
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in zip(losses, norms, strict=True)]

    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Return the summed loss in nats and the number of valid tokens over all ranks' batches.

        Sums are made on the host: with `bf16_sr` a device has 8 bits for a number.
        """
        losses: list[Tensor] = []
        tokens = 0
        with translate_dist_errors():
            for batch in batches:
                losses.append(self.backend.validate(batch))
                tokens += batch.valid_tokens
                self.backend.tensor_device.mark_step()
            loss_sum = math.fsum(self.backend.tensor_device.fetch_scalars(losses))
        # Tensor-parallel ranks and stages read the same rows; the last stage has their loss.
        grid = self.backend.grid
        is_counted = grid.tp_rank == 0 and grid.is_last_stage
        totals = self.control.all_gather([loss_sum, tokens] if is_counted else [0.0, 0])
        return math.fsum(loss for loss, _ in totals), sum(count for _, count in totals)

    def score(self, batch: StepBatch) -> PositionScores:
        """Return the log-probability of each label and whether it is the greedy choice; waits for the device.

        With `bf16_sr` a log-probability has 8 bits.
        """
        with translate_dist_errors():
            scores = self.backend.score(batch)
            self.backend.tensor_device.mark_step()
            if scores is None or self.backend.grid.tp_rank != 0:
                return PositionScores.unreported(batch.labels)
            log_probs, is_greedy = self.backend.tensor_device.fetch_array(scores)
        return PositionScores.at_positions(batch.labels, np.arange(batch.labels.size), log_probs, is_greedy > 0)

    def on_step_begin(self, step: int) -> list[Path]:
        """Return no files: this engine has no per-step profiling."""
        return []

    def dump_debug_info(self, folder: Path) -> str:
        """Return "": no flight recorder is available for these collectives."""
        return ""

    def peak_memory_bytes(self) -> int:
        """Return the peak memory in bytes of this rank's device, or on a CPU of the process."""
        return self.backend.tensor_device.memory_bytes()

    def state_bytes(self) -> int:
        """Return the bytes this rank saves to a checkpoint."""
        return nxd_state_bytes(self._recipe, self.backend)

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        """Return an uninitialized host buffer of `n_bytes` bytes."""
        return allocate_host_memory(n_bytes, torch.device("cpu"))

    def state(self) -> Snapshot:
        """Return a snapshot of this rank's tensors as NxD files, with the optimizer's step count."""
        return nxd_snapshot(self._recipe, self._config, self.backend)

    def iter_model_shards(self) -> Iterator[Shard]:
        """Yield the same state by the model's tensor names.

        All ranks together yield each element once.
        """
        for group, slots in self.backend.optimizer_state.items():
            for key, rows in slots.items():
                for name, part in self._local_shards(key, rows, rows.to_host()).items():
                    shard = to_checkpoint_shard(group, name, part)
                    if shard is not None:
                        yield shard

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer state and step count from a checkpoint of any mesh."""
        check_optimizer(checkpoint, optimizer_spec(self._recipe.optimizer.name))
        # A rank may hold no shard of a tensor, but the checkpoint must have all tensors.
        dtypes = {group: _group_dtype(slots) for group, slots in self.backend.optimizer_state.items()}
        checkpoint.check_specs(
            {
                group: {name: TensorSpec(DTYPE_CODES[dtype], row.shape) for name, row in self._param_specs.items()}
                for group, dtype in dtypes.items()
            }
        )
        groups = list(self.backend.optimizer_state)
        read_on_all_ranks(self.control, lambda: self._fill(groups, lambda shards: load_tensors(checkpoint, shards)))
        self._sync(step_count=int(checkpoint.manifest.scalars["optimizer_step"]))

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        """Load pretrained weights, cast to the master weights' dtype.

        Optimizer state and step count keep their initial values.
        """
        self._fill([MASTER_WEIGHTS], lambda shards: load_pretrained_tensors(pretrained, shards[MASTER_WEIGHTS]))
        self._sync(step_count=0)

    def close(self) -> None:
        """Close the backend and its process groups."""
        self.backend.close()

    def _sync(self, *, step_count: int) -> None:
        """Set the step count and copy the master weights into the layers.

        The graphs are the same at every start.
        """
        self.backend.step_count = step_count
        with translate_dist_errors():
            self.backend.sync_model_params()

    def _fill(self, groups: Sequence[str], read: Callable[[Mapping[str, Mapping[str, LocalShard]]], None]) -> None:
        """Fill this rank's rows of some state groups.

        Args:
            groups: state groups.
            read: fills host memory, by group and the model's tensor names; called for batches of
                `READ_BATCH_BYTES` where the rows are on a device.
        """
        states = {group: self.backend.optimizer_state[group] for group in groups}
        pending: list[tuple[RowSlice, Tensor]] = []
        shards: dict[str, dict[str, LocalShard]] = {group: {} for group in groups}

        def finish_batch() -> None:
            read(shards)
            for rows, buffer in pending:
                rows.store(buffer)
            pending.clear()
            for parts in shards.values():
                parts.clear()

        for group, slots in states.items():
            for key, rows in slots.items():
                buffer = rows.empty_on_host()
                pending.append((rows, buffer))
                parts = self._local_shards(key, rows, buffer)
                assert not parts.keys() & shards[group].keys(), f"rows of {key} are held twice"
                shards[group] |= parts
                if sum(buffer.nbytes for rows, buffer in pending if not rows.is_on_host) >= READ_BATCH_BYTES:
                    finish_batch()
        finish_batch()

    def _local_shards(self, key: str, rows: RowSlice, on_host: Tensor) -> dict[str, LocalShard]:
        """Return this rank's shard of each model tensor that the rows of a key hold, as views of host memory."""
        shards: dict[str, LocalShard] = {}
        for tensor_slice in self._tensor_slices[key]:
            local_slice = intersect_rows(tensor_slice, rows.start_row, rows.n_rows)
            if local_slice is not None:
                assert local_slice.name not in shards, f"{local_slice.name} is held twice"
                shards[local_slice.name] = self._local_shard(local_slice, on_host)
        return shards

    def _local_shard(self, local_slice: TensorSlice, on_host: Tensor) -> LocalShard:
        grid = self.backend.grid
        replicas, replica = (1, 0) if self._zero1 else (grid.dp, grid.dp_rank)
        return LocalShard(
            local=on_host[local_slice.start_row : local_slice.start_row + local_slice.shape[0]],
            shape=self._param_specs[local_slice.name].shape,
            offset=local_slice.offset,
            n_replicas=len(local_slice.replicas) * replicas,
            replica_index=local_slice.replica_index(grid) * replicas + replica,
        )


def _group_dtype(slots: Mapping[str, RowSlice]) -> torch.dtype:
    """Return the dtype of a state group, which all its tensors share."""
    (dtype,) = {rows.dtype for rows in slots.values()}
    return dtype
