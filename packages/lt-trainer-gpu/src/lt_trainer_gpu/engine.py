"""Torch-native engine: one rank's model, optimizer and device behind `lt_trainer.engine.Engine`.

A step runs every micro-batch forward and backward, with the loss divided by the valid tokens of the global batch, so
gradients are exact under accumulation and data parallelism; then one exact global norm, clipping and the update.
`step` never synchronizes with the device; `fetch_metrics` does, once for all pending steps.

A non-finite loss or norm must not reach the weights, and reading it on the host would synchronize. So both are reduced
over all ranks first, and the optimizer receives "finite" as a tensor on the device: where it is false, nothing is
written and the step count is unchanged. All ranks have the same two scalars, so either all skip the step or none does.

Shapes: M micro-batches, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, Shard
from lt_model import LlamaConfig, param_specs
from lt_model.documents import DocumentBoundaries
from lt_model.llama import Llama
from lt_model.loss import LossParts
from lt_trainer.checkpointing import PretrainedWeights
from lt_trainer.config import Recipe
from lt_trainer.control import Control, SoloControl
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, World
from lt_trainer.optimizers import ParamSlice, optimizer_spec
from lt_trainer.optimizers.driver import check_optimizer, optimizer_record, slot_shard
from lt_trainer.torch import (
    GlooControl,
    LocalShard,
    PendingStep,
    allocate_host_memory,
    init_parameters,
    load_pretrained_tensors,
    load_tensors,
    micro_batches_to_device,
    tensor_spec,
    to_checkpoint_shard,
    translate_dist_errors,
    weight_decay_names,
)
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.compilation import CompileConditions, find_missing_compiler, resolve_compile, select_attention
from lt_trainer_gpu.devices import (
    accumulation_dtype,
    compute_dtype,
    device_name,
    init_process_group,
    peak_memory_bytes,
    select_device,
    total_device,
)
from lt_trainer_gpu.fsdp_sync import FsdpSync
from lt_trainer_gpu.gradients import all_reduce_loss_and_norm, clip_coefficient, squared_norm
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.optimizer import GpuOptimizer
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.parallelize import parallelize
from lt_trainer_gpu.parameter_shards import parameter_shard
from lt_trainer_gpu.peak_flops import peak_flops
from lt_trainer_gpu.recompute_flops import recomputed_flops_per_token
from lt_trainer_gpu.step_profiler import StepProfiler
from lt_trainer_gpu.timing import create_stopwatch
from lt_trainer_gpu.weights import MixedPrecisionWeights, ModelWeights, Weights


class GpuEngine:
    """FSDP2/TP engine of one rank."""

    def __init__(self, recipe: Recipe, config: LlamaConfig, world: World) -> None:
        options: GpuOptions = recipe.engine["gpu"]
        self._torch_device = select_device(options, world)
        options, compile_note = resolve_compile(
            options,
            CompileConditions(
                device_type=self._torch_device.type,
                tp=recipe.parallel.tp,
                torch_version=torch.__version__,
                missing_compiler=find_missing_compiler(),
            ),
        )
        self._options, self._optimizer_options = options, recipe.optimizer
        self._dtype = compute_dtype(options, self._torch_device)
        master = torch.float64 if self._dtype == torch.float64 else torch.float32
        torch.set_float32_matmul_precision(options.float32_matmul_precision)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        self._mesh_layout = MeshLayout.from_options(recipe.parallel, world.rank, world.size)
        self.topology = self._mesh_layout.topology
        with translate_dist_errors():  # a rank that never joins counts as lost
            init_process_group(self._torch_device, world, recipe.fault_tolerance.collective_timeout_s)
        self.control: Control = (
            GlooControl(recipe.fault_tolerance.collective_timeout_s) if world.size > 1 else SoloControl()
        )
        attention = select_attention(options, self._torch_device, self._dtype, document_mask=recipe.data.document_mask)
        with torch.device("meta"):
            # An unsharded model needs no FSDP for its casts: it is built in the compute dtype.
            model_dtype = master if self._mesh_layout.uses_fsdp else self._dtype
            model = Llama(
                config, attention=attention, pad_vocab_to_multiple_of=max(1, options.pad_vocab_to_multiple_of)
            ).to(model_dtype)
        with translate_dist_errors():
            model = parallelize(
                model,
                mesh_layout=self._mesh_layout,
                options=options,
                device_type=self._torch_device.type,
                compute_dtype=self._dtype,
                master_dtype=master,
                timeout_s=recipe.fault_tolerance.collective_timeout_s,
            )
        self._model = model.to_empty(device=self._torch_device)
        if config.tie_word_embeddings:  # to_empty allocates memory for each module separately
            self._model.lm_head.weight = self._model.model.embed_tokens.weight
        self._fsdp_sync = FsdpSync(self._model, options)
        self._weights: Weights = (
            ModelWeights(self._model) if model_dtype == master else MixedPrecisionWeights(self._model, master)
        )
        self._param_specs = {parameter.name: parameter for parameter in param_specs(config)}
        # The norm counts each replicated slice once.
        self._norm_param_names = [
            name for name, spec in self._param_specs.items() if self._mesh_layout.replica_count_and_index(spec)[1] == 0
        ]
        parts = self._local_shards()
        init_parameters(parts, config, recipe.run.seed)
        self._weights.sync_model_params()
        decays = weight_decay_names(config, include_embeddings=recipe.optimizer.decay_embeddings)
        self._optimizer = GpuOptimizer(
            optimizer_spec(recipe.optimizer.name),
            recipe.optimizer,
            {
                name: ParamSlice(specs=(self._param_specs[name],), offset=part.offset, decay=name in decays)
                for name, part in parts.items()
            },
            {name: part.local for name, part in parts.items()},
        )
        self._state_groups()  # raises if the optimizer's slots cannot be sharded by this layout
        name = device_name(self._torch_device)
        peak, source = peak_flops(self._torch_device, self._dtype, name)
        self.device = Device(
            name=name,
            kind=self._torch_device.type,
            count=world.size,
            peak_flops=peak,
            peak_source=source,
            resolved={"engine.gpu.compile": options.compile is True, "engine.gpu.attention": attention},
            notes=[compile_note] if compile_note else [],
        )
        self._profiler = StepProfiler(
            recipe.metrics, run_dir=Path(recipe.run.dir), rank=world.rank, device=self._torch_device
        )
        self.stopwatch = create_stopwatch(self._torch_device)
        self.recomputed_flops_per_token = recomputed_flops_per_token(
            config, recipe.data.seq_len, options.activation_checkpointing
        )

    def step(self, batch: StepBatch, lr: float) -> PendingStep:
        """Run one optimizer step: forward/backward of all micro-batches, clip, update; does not sync.

        Raises:
            PeerError: another rank is gone.
        """
        with translate_dist_errors(), self._profiler.memory_snapshot_on_oom():
            return self._step(batch, lr)

    def _step(self, batch: StepBatch, lr: float) -> PendingStep:
        self.stopwatch.begin("forward_backward")
        self._model.train()
        n_micro = batch.input_ids.shape[0]
        loss_sum = torch.zeros((), dtype=accumulation_dtype(self._torch_device), device=self._torch_device)
        for i, parts in enumerate(self._iter_losses(batch, self._optimizer_options.z_loss)):
            self._fsdp_sync.on_backward_begin(is_last=i == n_micro - 1)
            self._weights.on_backward_begin(n_micro_batches=n_micro)
            (parts.total / batch.valid_tokens).backward()
            loss_sum += parts.cross_entropy
        self.stopwatch.begin("optimizer")
        gradients = self._weights.gradients()
        loss, grad_norm = self._all_reduce_loss_and_norm(loss_sum / batch.valid_tokens, gradients)
        max_norm = self._optimizer_options.grad_clip
        scale = clip_coefficient(grad_norm, max_norm) if max_norm > 0 else None
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        weights = {name: part.local for name, part in self._local_shards().items()}
        self._optimizer.step(weights, gradients, lr, finite, scale)
        self._weights.zero_grad()
        self._weights.sync_model_params()
        return PendingStep(loss, grad_norm)

    def _iter_losses(self, batch: StepBatch, z_loss: float) -> Iterable[LossParts]:
        """Yield the summed loss of each micro-batch; the same on all tensor-parallel ranks."""
        arrays = (batch.input_ids, batch.position_ids, batch.labels)
        tensors = zip(*(micro_batches_to_device(array, self._torch_device) for array in arrays), strict=True)
        for cu_seqlens, (ids, positions, labels) in zip(batch.cu_seqlens, tensors, strict=True):
            if not self._options.compile:  # compiled blocks need a fixed length; else drop empty documents
                cu_seqlens = cu_seqlens[: np.searchsorted(cu_seqlens, ids.numel()) + 1]
            boundaries = DocumentBoundaries(torch.from_numpy(cu_seqlens), *ids.shape)
            yield self._model(ids, positions, boundaries, labels, z_loss)

    def _all_reduce_loss_and_norm(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss and the global gradient norm, reduced over all ranks and equal on each."""
        squares = squared_norm([gradients[name] for name in self._norm_param_names], self._torch_device)
        loss, squares = all_reduce_loss_and_norm(
            loss * self._is_loss_reporter, squares, world_size=self.topology.world_size
        )
        return loss, squares.sqrt()

    @property
    def _is_loss_reporter(self) -> float:
        """Factor of this rank's loss: 1 on the first of the TP ranks, which read the same rows, else 0."""
        return float(self._mesh_layout.tp_rank == 0)

    def fetch_metrics(self, pendings: Sequence[PendingStep]) -> list[StepMetrics]:
        """Return the metrics of `pendings`; the only place where the host synchronizes."""
        if not pendings:
            return []
        with translate_dist_errors():
            # One copy: each would wait for the device.
            pairs = torch.stack([x for pending in pendings for x in (pending.loss, pending.grad_norm)]).tolist()
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in zip(pairs[::2], pairs[1::2], strict=True)]

    @torch.no_grad()
    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Return the summed loss (nats) and the number of valid tokens over all ranks' batches."""
        self._model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=total_device(self._torch_device))
        with translate_dist_errors():
            for batch in batches:
                for parts in self._iter_losses(batch, z_loss=0.0):
                    totals[0] += parts.cross_entropy.to(totals.device)
                totals[1] += batch.valid_tokens
            totals *= self._is_loss_reporter
            if self.topology.world_size > 1:
                dist.all_reduce(totals)
            loss_sum, tokens = totals.tolist()
        self._fsdp_sync.reshard_params()
        return loss_sum, int(tokens)

    def on_step_begin(self, step: int) -> list[Path]:
        """Open or close profiler and memory-snapshot windows; return the files written."""
        return self._profiler.on_step_begin(step)

    def dump_debug_info(self, folder: Path) -> str:
        """Dump this rank's last collectives from torch's flight recorder; return a hint on reading them."""
        return flight_recorder.dump(folder, rank=self.topology.rank, on_gpu=self._torch_device.type == "cuda")

    def peak_memory_bytes(self) -> int:
        """Return peak allocated device bytes since the last call; on a CPU, the process's peak RSS."""
        return peak_memory_bytes(self._torch_device)

    def state_bytes(self) -> int:
        """Return the bytes of this rank's share of weights and optimizer state."""
        return sum(
            part.replica_slice().local.nbytes for group in self._state_groups().values() for part in group.values()
        )

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        """Allocate `n_bytes` of host memory, page-locked if the device is a GPU."""
        return allocate_host_memory(n_bytes, self._torch_device)

    def state(self) -> Snapshot:
        """Return this rank's slices of weights and optimizer state, and the optimizer's step count."""

        def shards() -> Iterable[Shard]:
            for group, parts in self._state_groups().items():
                for name, part in parts.items():
                    shard = to_checkpoint_shard(group, name, part)
                    if shard is not None:
                        yield shard

        return Snapshot(
            shards=shards(),
            scalars={"optimizer_step": int(self._optimizer.step_count)},
            optimizer=optimizer_record(self._optimizer.spec),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer state and step count, saved on any mesh.

        Raises:
            RecipeError: the checkpoint is of another optimizer.
        """
        check_optimizer(checkpoint, self._optimizer.spec)
        groups = self._state_groups()
        checkpoint.check_specs(
            {g: {name: tensor_spec(part) for name, part in parts.items()} for g, parts in groups.items()}
        )
        load_tensors(checkpoint, groups)
        self._weights.sync_model_params()
        self._optimizer.step_count.fill_(int(checkpoint.manifest.scalars["optimizer_step"]))

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        """Load a model's weights, cast to the master dtype; optimizer state is not touched."""
        load_pretrained_tensors(pretrained, self._local_shards())
        self._weights.sync_model_params()

    def _local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's weight slices; not cached, as FSDP may move them on its first run."""
        return {
            name: parameter_shard(self._param_specs[name], tensor, self._mesh_layout)
            for name, tensor in self._weights.master_weights.items()
        }

    def _state_groups(self) -> dict[str, dict[str, LocalShard]]:
        weights, slots = self._local_shards(), self._optimizer.slots
        return {
            "weights": weights,
            **{
                slot.name: {
                    name: slot_shard(slot, name, part, slots[slot.name][name]) for name, part in weights.items()
                }
                for slot in self._optimizer.spec.slots
            },
        }

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()
