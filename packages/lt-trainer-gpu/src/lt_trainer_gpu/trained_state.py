"""State of one rank in training: weights and optimizer slots, updated, saved, restored from any mesh.

Each tensor is a slice of one row of the parameter table (`parameter_shards`), so a checkpoint knows its place in the
whole, whatever the mesh. Positions are computed when they are needed and not kept: FSDP may move a parameter's memory
on its first run. A step needs the tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from lt_ckpt import Checkpoint, Shard, TensorSpec
from lt_model import ModelConfig, param_specs
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Snapshot
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.driver import check_optimizer, optimizer_record
from lt_trainer.optimizers.spec import ParamSlice, lr_scale
from lt_trainer.resilience.rank_sync import read_on_all_ranks
from lt_trainer.torch import (
    DTYPE_CODES,
    LocalShard,
    init_parameters,
    load_pretrained_tensors,
    load_tensors,
    to_checkpoint_shard,
    weight_decay_names,
)
from lt_trainer_gpu.computation import Computation
from lt_trainer_gpu.matrix_exchange import matrix_exchange
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage, stage_buffers, stage_params
from lt_trainer_gpu.optimizer import GpuOptimizer
from lt_trainer_gpu.optimizer_offload import OffloadedOptimizer
from lt_trainer_gpu.parameter_shards import parameter_shard
from lt_trainer_gpu.weights import MixedPrecisionWeights, ModelWeights, Weights

StateGroups = dict[str, dict[str, LocalShard]]
"""Slices by group ("weights" and the optimizer's slots) and parameter."""


class TrainedState:
    """Weights, initialized, and the optimizer of one rank's stages.

    Args:
        stages: this rank's stages, parallelized and allocated.
        config: the model.
        recipe: the recipe.
        computation: dtypes and options.
        mesh_layout: degrees of parallelism and this rank's coordinates.

    Attributes:
        weights: master weights and gradients.
        optimizer: the optimizer of this rank's slices.
        norm_param_names: the parameters whose gradients this rank counts in the global norm: each replicated slice is
            counted once.

    Raises:
        RecipeError: the optimizer's slots cannot be sharded by this layout.
    """

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        config: ModelConfig,
        recipe: Recipe,
        computation: Computation,
        mesh_layout: MeshLayout,
    ) -> None:
        self._config, self._mesh_layout = config, mesh_layout
        params = {name: parameter for stage in stages for name, parameter in stage_params(stage).items()}
        self._buffers = {name: buffer for stage in stages for name, buffer in stage_buffers(stage).items()}
        held = params.keys() | self._buffers.keys()
        self._param_specs = {spec.name: spec for spec in param_specs(config) if spec.name in held}
        self.norm_param_names = [
            name
            for name, spec in self._param_specs.items()
            if spec.is_trained and mesh_layout.replica_count_and_index(spec)[1] == 0
        ]
        self.weights: Weights = (
            ModelWeights(params)
            if mesh_layout.uses_fsdp or computation.dtype == computation.master_dtype
            else MixedPrecisionWeights(
                params, computation.master_dtype, keeps_master_weights=not computation.rounds_stochastically
            )
        )
        shards = self.weight_shards()
        init_parameters(shards, config, recipe.run.seed)
        self.weights.sync_model()
        self.optimizer = self._make_optimizer(shards, recipe, computation)

    def _make_optimizer(
        self, shards: Mapping[str, LocalShard], recipe: Recipe, computation: Computation
    ) -> GpuOptimizer:
        options, spec = recipe.optimizer, optimizer_spec(recipe.optimizer.name)
        shards = {name: shard for name, shard in shards.items() if name not in self._buffers}
        decays = weight_decay_names(self._config, include_embeddings=options.decay_embeddings)
        timeout_s = recipe.fault_tolerance.collective_timeout_s
        optimizer_class = OffloadedOptimizer if computation.options.optimizer_offload else GpuOptimizer
        return optimizer_class(
            spec,
            options,
            {
                name: ParamSlice(
                    specs=(self._param_specs[name],),
                    offset=shard.offset,
                    decay=name in decays,
                    lr_scale=lr_scale(self._param_specs[name], options),
                )
                for name, shard in shards.items()
            },
            {name: shard.local for name, shard in shards.items()},
            seed=recipe.run.seed,
            exchange=matrix_exchange(spec, shards, self._param_specs, self._mesh_layout, timeout_s),
        )

    def weight_shards(self) -> dict[str, LocalShard]:
        """Return this rank's slices of the weights."""
        return {
            name: parameter_shard(self._param_specs[name], tensor, self._mesh_layout)
            for name, tensor in {**self.weights.master_weights, **self._buffers}.items()
        }

    def _groups(self) -> StateGroups:
        """Return this rank's slices of weights and slots; slots in host memory are those of the last step."""
        self.optimizer.wait_for_slots()
        weights, slots = self.weight_shards(), self.optimizer.slots
        return {
            "weights": weights,
            **{
                slot.name: {name: replace(weights[name], local=tensor) for name, tensor in slots[slot.name].items()}
                for slot in self.optimizer.spec.all_slots
            },
        }

    def n_bytes(self) -> int:
        """Return the bytes of this rank's share of weights and optimizer state."""
        return sum(part.replica_slice().local.nbytes for group in self._groups().values() for part in group.values())

    def snapshot(self) -> Snapshot:
        """Return this rank's slices of weights and optimizer state, and the optimizer's step count."""

        def shards() -> Iterator[Shard]:
            for group, parts in self._groups().items():
                for name, part in parts.items():
                    shard = to_checkpoint_shard(group, name, part)
                    if shard is not None:
                        yield shard

        return Snapshot(
            shards=shards(),
            scalars={"optimizer_step": int(self.optimizer.step_count)},
            optimizer=optimizer_record(self.optimizer.spec),
        )

    def restore(self, checkpoint: Checkpoint, control: Control) -> None:
        """Load weights, optimizer state and step count, saved on any mesh.

        Raises:
            RecipeError: the checkpoint is of another optimizer.
            RestoreError: on all ranks, a rank cannot read its part.
        """
        check_optimizer(checkpoint, self.optimizer.spec)
        groups = self._groups()
        checkpoint.check_specs(self._tensor_specs())
        read_on_all_ranks(control, lambda: load_tensors(checkpoint, groups))
        self.weights.sync_model()
        self.optimizer.step_count.fill_(int(checkpoint.manifest.scalars["optimizer_step"]))

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        """Load a model's weights, cast to the master dtype; optimizer state is not touched."""
        load_pretrained_tensors(pretrained, self.weight_shards())
        self.weights.sync_model()

    def _tensor_specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Return dtypes and shapes of the state of all ranks; this one may hold no part of a tensor."""
        optimizer, table = self.optimizer, param_specs(self._config)
        weight_dtype: torch.dtype = next(iter(self.weights.master_weights.values())).dtype
        return {
            "weights": {
                spec.name: TensorSpec(DTYPE_CODES[weight_dtype if spec.is_trained else torch.float32], spec.shape)
                for spec in table
            },
            **{
                slot.name: {
                    spec.name: TensorSpec(DTYPE_CODES[optimizer.slot_dtype(slot)], spec.shape)
                    for spec in table
                    if spec.is_trained and slot in optimizer.spec.for_params([spec]).slots
                }
                for slot in optimizer.spec.all_slots
            },
        }
