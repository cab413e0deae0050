"""Trainium compute backend: process groups, one pipeline stage, its schedule and the training step.

With `engine.neuron.backend = "nxd"` groups and layers are NxD's; with "xla" one rank trains on plain torch-xla; with
"cpu" groups and layers go over gloo (`gloo`), in `cpu_dtype` with masters, norms and loss in fp32 or wider. Stages
use our own schedule over NxD's transfers (`pipeline`): NxD's pipeline model class would trace the layers again. In
NxD's CPU mode (NXD_CPU_MODE=1) tensors are on the host and NxD's collectives use gloo, for tests.

Dtypes in torch, with `→` followed by the dtype on the device if it differs:

| precision             | weights     | master weights, slots, gradients | norms, softmax, loss | variable          |
|-----------------------|-------------|----------------------------------|----------------------|-------------------|
| `bf16_sr`             | fp32 → bf16 | fp32 → bf16                      | fp32 → bf16          | XLA_USE_BF16      |
| `downcast`            | fp32 → bf16 | fp64 → fp32                      | fp64 → fp32          | XLA_DOWNCAST_BF16 |
| `fp32_master_weights` | bf16        | fp32                             | fp32                 | none              |

Cost: nothing beyond that of its parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_ckpt.llama_tensors import EMBED, HEAD
from lt_ckpt.nxd.layout import nxd_layout, rank_rules
from lt_ckpt.nxd.zero1 import shard_rows
from lt_model import ModelConfig, param_specs
from lt_model.costs import attention_flops_per_token
from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, StepBatch, StepParts, Stopwatch, World
from lt_trainer.errors import RecipeError
from lt_trainer.torch import GlooControl, translate_dist_errors, weight_decay_names
from lt_trainer_neuron.grid import Grid, build_nxd_options
from lt_trainer_neuron.nxd.attention import eager_attention, flash_attention
from lt_trainer_neuron.nxd.collectives import Collectives, NxdCollectives, NxdPipelineP2P, PipelineP2P
from lt_trainer_neuron.nxd.decoder import NxdPipelineStage
from lt_trainer_neuron.nxd.device import TensorDevice, XlaDevice
from lt_trainer_neuron.nxd.gloo import GlooCollectives, GlooLayerFactory, GlooPipelineP2P
from lt_trainer_neuron.nxd.gloo_groups import ProcessGroups, init_process_group
from lt_trainer_neuron.nxd.layers import LayerFactory, NxdLayerFactory
from lt_trainer_neuron.nxd.pipeline import PipelineSchedule
from lt_trainer_neuron.nxd.process_groups import check_grid, init_process_groups
from lt_trainer_neuron.nxd.stage_loss import StageWithLoss, load_micro_batches
from lt_trainer_neuron.nxd.train_step import DtypePolicy, LocalWeight, TrainStep
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.row_slice import MASTER_WEIGHTS, RowSlice
from lt_trainer_neuron.tensor_slices import TensorSlice, build_tensor_slices, replicated_kv_heads

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import NxdOptions


DTYPE_POLICIES: Mapping[str, DtypePolicy] = {
    "bf16_sr": DtypePolicy(compute_dtype=torch.float32, master_dtype=torch.float32, upcast_dtype=torch.float32),
    "downcast": DtypePolicy(compute_dtype=torch.float32, master_dtype=torch.float64, upcast_dtype=torch.float64),
    "fp32_master_weights": DtypePolicy(
        compute_dtype=torch.bfloat16, master_dtype=torch.float32, upcast_dtype=torch.float32
    ),
}
"""Dtypes in torch by `engine.neuron.precision`; see the table in the module docstring."""

PEAK_FLOPS = 95e12
"""Dense bf16 FLOP/s of a NeuronCore-v2: 190 TFLOP/s per Trainium chip of two cores, as published by AWS."""


class NxdBackend:
    """One rank's part of the model on its device, over NxD, plain torch-xla or gloo.

    The engine defines the order of a step and maps model tensors to their positions in rank tensors; per step it calls,
    on every rank, `forward_backward`, `optimizer_step` and `mark_step` of `tensor_device`, none of which waits for the
    device; its `fetch_scalars` does. A new backend has its layers built and its tensors unfilled; the engine then fills
    `optimizer_state` (initial weights, checkpoint or pretrained model) and calls `sync_model_params`. Tensors are
    identified by NxD's keys. Numbers that change from step to step (lr, valid tokens, the step count) enter a lazy
    device's graph as tensors: as Python numbers, each new value would be a new graph.

    Args:
        recipe: checked recipe of the run.
        config: model configuration.
        world: the ranks.
        dtype_policy: dtypes that override the recipe's `engine.neuron.precision`.

    Raises:
        RecipeError: the recipe uses a feature this backend does not support.
    """

    def __init__(
        self, recipe: Recipe, config: ModelConfig, world: World, *, dtype_policy: DtypePolicy | None = None
    ) -> None:
        options = engine_options(recipe, "neuron", NeuronOptions)
        self._dtype_policy = dtype_policy = dtype_policy or _default_policy(options)
        self.grid = Grid.from_options(recipe.parallel, world.rank, world.size)
        device, collectives, p2p, layers = _open_runtime(recipe, config, options, self.grid, dtype_policy)
        self.tensor_device, self._collectives, nxd_options = device, collectives, build_nxd_options(recipe)
        timeout_s = recipe.fault_tolerance.collective_timeout_s
        self.control: Control = GlooControl(timeout_s) if world.size > 1 else Control()
        self._config, self._nxd_options = config, nxd_options
        indices = map(_layer_index, _nxd_keys(config, nxd_options, self.grid))
        eager = eager_attention(dtype_policy.upcast_dtype, config.attention_softcap)
        stage = NxdPipelineStage(
            config,
            nxd_options,
            layers,
            flash_attention() if options.flash_attention else eager,
            layer_indices=sorted({index for index in indices if index is not None}),
            is_first=self.grid.is_first_stage,
            is_last=self.grid.is_last_stage,
            recompute=device.recompute_in_backward if options.selective_checkpointing else None,
        )
        stage = materialize_stage(stage, device.torch_device)
        if config.tie_word_embeddings and self.grid.pp == 1:
            stage.lm_head.weight = stage.model.embed_tokens.weight
        self.stage = stage
        """Layers with NxD's keys as parameter names; NxD's own loader accepts it as a model."""
        self._parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._train_step = TrainStep(
            self._local_weights(recipe, options, layers),
            recipe.optimizer,
            dtype_policy=dtype_policy,
            device=device,
            collectives=collectives,
            grid=self.grid,
            zero1=options.zero1,
            single_graph=options.graph_scope == "step",
            tied_embedding=_tied_embedding(config, self.grid),
        )
        with_loss = StageWithLoss(
            stage,
            collectives,
            vocab_start_index=config.vocab_size // self.grid.tp * self.grid.tp_rank,
            z_loss=recipe.optimizer.z_loss,
            upcast_dtype=dtype_policy.upcast_dtype,
            document_mask=recipe.data.document_mask,
        )
        self._schedule = PipelineSchedule(
            with_loss, p2p, device=device, grid=self.grid, dtype=dtype_policy.compute_dtype
        )
        self.device = _describe_device(device, world)
        self.stopwatch: Stopwatch = Stopwatch()
        recomputes_attention = options.selective_checkpointing and not options.flash_attention
        attention = attention_flops_per_token(config, recipe.data.seq_len) / 3  # its forward pass
        self.recomputed_flops_per_token = attention if recomputes_attention else 0.0

    def _local_weights(self, recipe: Recipe, options: NeuronOptions, layers: LayerFactory) -> dict[str, LocalWeight]:
        """Return the rank's distinct weights with the metadata that `TrainStep` needs."""
        slices_by_key = build_tensor_slices(self._config, self._nxd_options, self.grid)
        decays = weight_decay_names(self._config, include_embeddings=recipe.optimizer.decay_embeddings)
        specs = {spec.name: spec for spec in param_specs(self._config)}

        def is_sharded(key: str) -> bool:
            return specs[slices_by_key[key][0].name].tp_dim is not None

        return {
            key: LocalWeight(
                parameter=self._parameters[key],
                specs=tuple(specs[tensor_slice.name] for tensor_slice in slices),
                decay=slices[0].name in decays,
                norm_row_ranges=tuple(
                    _iter_norm_row_ranges(
                        slices,
                        self.grid,
                        count_replicas=options.nxd_grad_norm and key not in (EMBED, HEAD) and is_sharded(key),
                    )
                ),
                # Norms of single heads see this rank's heads only, what is added to the stream its positions.
                reduce_grad_over_tp=not is_sharded(key)
                and (layers.sequence_parallel or specs[slices[0].name].kind in ("q_norm", "k_norm")),
            )
            for key, slices in slices_by_key.items()
            if not (key == HEAD and self._config.tie_word_embeddings and self.grid.pp == 1)
        }

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """NxD's key → this rank's full layer tensor, in the order of the rank's file.

        In the compute dtype, norms in fp32 or wider.

        A tied head has its own key: with one stage it is the same tensor as the embedding, else a replica on the last
        stage.
        """
        return {key: self._parameters[key] for key in _nxd_keys(self._config, self._nxd_options, self.grid)}

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, RowSlice]]:
        """State group → NxD's key → the rows that this rank updates, as new views: a step may move device tensors.

        Groups are `MASTER_WEIGHTS` and the optimizer's slots. With ZeRO-1 the rows are those of
        `lt_ckpt.nxd.zero1.shard_rows`, without it all rows. A head that is the embedding's tensor has no entry.
        """
        groups = {MASTER_WEIGHTS: self._train_step.master_weights, **self._train_step.optimizer.slots}
        return {
            group: {key: self._row_slice(key, tensor) for key, tensor in tensors.items()}
            for group, tensors in groups.items()
        }

    def _row_slice(self, key: str, tensor: Tensor) -> RowSlice:
        if not self._train_step.is_sharded:
            return RowSlice(stored=tensor, n_rows=tensor.shape[0])
        first, n_rows, _ = shard_rows(self._parameters[key].shape[0], self.grid.dp, self.grid.dp_rank)
        return RowSlice(stored=tensor, n_rows=n_rows, start_row=first)

    @property
    def step_count(self) -> int:
        """Number of optimizer steps that were not skipped; waits for the device."""
        return int(self.tensor_device.fetch_scalars([self._train_step.optimizer.step_count])[0])

    @step_count.setter
    def step_count(self, value: int) -> None:
        step = self._train_step.optimizer.step_count
        step.copy_(self.tensor_device.scalar_tensor(value, step.dtype))
        self.tensor_device.mark_step()  # a graph of its own, the same wherever the number is set

    def sync_model_params(self) -> None:
        """Copy the master weights, gathered and cast, into the layers' weights."""
        self._train_step.sync_model_params()

    def forward_backward(self, batch: StepParts) -> Tensor:
        """Run forward and backward of all micro-batches; accumulate gradients of (sum of the loss) / valid_tokens.

        Returns:
            Summed cross-entropy in nats of this rank's rows, divided by batch.valid_tokens: a scalar on the device.
            Equal on all tensor-parallel ranks; 0 on every stage but the last.
        """
        micro_batches = load_micro_batches(batch, self.tensor_device)
        return self._train_step.forward_backward(
            self._schedule, micro_batches, batch.n_micro_batches, batch.valid_tokens
        )

    def optimizer_step(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Reduce and clip gradients, update the weights, zero the gradients.

        If the loss or the norm is not finite, weights, moments and step count stay unchanged; this is decided on the
        device.

        Returns:
            Loss of the global batch and its gradient norm before clipping, scalars, equal on every rank.
        """
        return self._train_step.optimizer_step(loss, lr)

    def validate(self, batch: StepBatch) -> Tensor:
        """Return the summed loss in nats, without gradients or z-loss; 0 on every stage but the last."""
        return self._schedule.validate(list(load_micro_batches(batch, self.tensor_device)))

    def score(self, batch: StepBatch) -> Tensor | None:
        """Return log-probability and greedy flag (1 or 0) of each label, [2, M, B * T]; None but on the last stage.

        0 where there is no label.
        """
        return self._schedule.score(list(load_micro_batches(batch, self.tensor_device)))

    def close(self) -> None:
        """Destroy the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


def materialize_stage(stage: NxdPipelineStage, device: torch.device) -> NxdPipelineStage:
    """Return the stage with zeroed memory on the device.

    Keeps NxD's parameter attributes, which `to_empty` would drop.
    """
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fresh = nn.Parameter(torch.zeros_like(parameter, device=device))
            vars(fresh).update(vars(parameter))
            setattr(module, name, fresh)
    return stage


def _default_policy(options: NeuronOptions) -> DtypePolicy:
    """Return the dtypes of the recipe; on the host masters, norms and loss are fp32 or wider."""
    if options.backend != "cpu":
        return DTYPE_POLICIES[options.precision]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[options.cpu_dtype]
    wide = torch.promote_types(dtype, torch.float32)
    return DtypePolicy(compute_dtype=dtype, master_dtype=wide, upcast_dtype=wide)


def _open_runtime(
    recipe: Recipe, config: ModelConfig, options: NeuronOptions, grid: Grid, dtype_policy: DtypePolicy
) -> tuple[TensorDevice, Collectives, PipelineP2P | None, LayerFactory]:
    """Return device, collectives, stage transfers (None with one stage) and layer factory."""
    dtypes = dtype_policy.compute_dtype, dtype_policy.upcast_dtype
    if options.backend == "cpu":
        timeout_s = recipe.fault_tolerance.collective_timeout_s
        with translate_dist_errors():
            init_process_group(World(rank=grid.rank, size=grid.world_size), timeout_s)
            kv_head_ranks = replicated_kv_heads(build_nxd_options(recipe), config.n_kv_heads)
            groups = ProcessGroups.make(grid, kv_head_ranks, timeout_s)
        on_gloo = GlooLayerFactory(*dtypes, groups, sequence_parallel=recipe.parallel.sequence_parallel)
        stages = GlooPipelineP2P(groups.pp) if grid.pp > 1 else None
        return TensorDevice(), GlooCollectives(groups), stages, on_gloo
    if options.backend == "xla":
        if grid.world_size > 1:
            raise RecipeError(
                "plain torch-xla supports one rank",
                values={f"{SECTION}.backend": options.backend, "ranks": grid.world_size},
                remedy="set engine.neuron.backend to nxd, or start one rank",
            )
        return XlaDevice(), Collectives(), None, LayerFactory(*dtypes)
    on_host = int(os.environ.get("NXD_CPU_MODE", "0")) > 0
    init_process_groups(recipe, on_host=on_host)
    check_grid(grid)
    layers = NxdLayerFactory(*dtypes, sequence_parallel=recipe.parallel.sequence_parallel)
    p2p = NxdPipelineP2P() if grid.pp > 1 else None
    return (TensorDevice() if on_host else XlaDevice()), NxdCollectives(), p2p, layers


def _tied_embedding(config: ModelConfig, grid: Grid) -> tuple[str, tuple[int, int]] | None:
    """Return key and shape of an embedding tied across two stages, or None."""
    if not config.tie_word_embeddings or grid.pp == 1:
        return None
    return HEAD if grid.is_last_stage else EMBED, (config.vocab_size // grid.tp, config.hidden_size)


def _describe_device(device: TensorDevice, world: World) -> Device:
    neuron = device.kind == "neuron"
    return Device(
        name="NeuronCore-v2" if neuron else device.name,
        kind=device.kind,
        count=world.size,
        peak_flops=PEAK_FLOPS if neuron else 0.0,
        peak_source="AWS's datasheet: 190 TFLOP/s bf16 a chip of two cores" if neuron else "not known",
    )


def _nxd_keys(config: ModelConfig, nxd_options: NxdOptions, grid: Grid) -> list[str]:
    """Return NxD's keys of this rank's file, in file order."""
    nxd_layout(config, nxd_options)  # raises if the model cannot be sharded with these options
    return [prefix + rule.key for prefix, rule in rank_rules(config, nxd_options, grid.pp_rank)]


def _layer_index(key: str) -> int | None:
    """Return the layer index of a key; None if it belongs to no layer."""
    parts = key.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _iter_norm_row_ranges(
    tensor_slices: Sequence[TensorSlice], grid: Grid, *, count_replicas: bool
) -> Iterator[tuple[int, int]]:
    """Yield the row ranges of a tensor that this rank counts in the norm.

    Args:
        tensor_slices: slices of model tensors in the tensor.
        grid: this rank's coordinates.
        count_replicas: count each replica, as NxD does those of a key/value head.
    """
    for tensor_slice in tensor_slices:
        if count_replicas or tensor_slice.replica_index(grid) == 0:
            yield tensor_slice.start_row, tensor_slice.start_row + tensor_slice.shape[0]
