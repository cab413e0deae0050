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
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, Shard, TensorSpec
from lt_model import LlamaConfig, param_specs, stage_layers
from lt_trainer.checkpointing import PretrainedWeights
from lt_trainer.config import Recipe
from lt_trainer.control import Control, SoloControl
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, World
from lt_trainer.optimizers import ParamSlice, lr_scale, optimizer_spec
from lt_trainer.optimizers.driver import check_optimizer, optimizer_record, slot_shard
from lt_trainer.resilience import read_on_all_ranks
from lt_trainer.torch import (
    DTYPE_CODES,
    GlooControl,
    LocalShard,
    PendingStep,
    allocate_host_memory,
    init_parameters,
    load_pretrained_tensors,
    load_tensors,
    to_checkpoint_shard,
    translate_dist_errors,
    weight_decay_names,
)
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.checks import check_bf16_weights, check_fp8_device, check_offload
from lt_trainer_gpu.compilation import (
    CompileConditions,
    find_missing_compiler,
    fp8_note,
    resolve_compile,
    select_attention,
)
from lt_trainer_gpu.devices import (
    compute_capability,
    compute_dtype,
    device_name,
    init_process_group,
    peak_memory_bytes,
    select_device,
    total_device,
)
from lt_trainer_gpu.fsdp_sync import FsdpSync
from lt_trainer_gpu.gradients import all_reduce_loss_and_norm, clip_coefficient, squared_norm
from lt_trainer_gpu.matrix_exchange import matrix_exchange
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.micro_batches import DeviceMicroBatch, ModelRunner, PassRunner, micro_batches
from lt_trainer_gpu.model import build_stage, stage_params
from lt_trainer_gpu.optimizer import GpuOptimizer
from lt_trainer_gpu.optimizer_offload import OffloadedOptimizer
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.parallelize import parallelize
from lt_trainer_gpu.parameter_shards import parameter_shard
from lt_trainer_gpu.peak_flops import peak_flops
from lt_trainer_gpu.recompute_flops import recomputed_flops_per_token
from lt_trainer_gpu.step_profiler import StepProfiler
from lt_trainer_gpu.timing import create_stopwatch
from lt_trainer_gpu.weights import MixedPrecisionWeights, ModelWeights, Weights

if TYPE_CHECKING:
    from lt_trainer_gpu.pipeline import TiedGradient

EMBEDDING = "model.embed_tokens.weight"


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
        check_fp8_device(
            options.fp8,
            self._torch_device.type,
            compute_capability(self._torch_device),
            is_rocm=torch.version.hip is not None,
        )
        check_offload(options, self._torch_device.type)
        rounds_stochastically = recipe.optimizer.weights_dtype == "bfloat16"
        if rounds_stochastically:
            check_bf16_weights(str(self._dtype).removeprefix("torch."))
        torch.set_float32_matmul_precision(options.float32_matmul_precision)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        self._mesh_layout = MeshLayout.from_options(
            recipe.parallel, world.rank, world.size, tie_word_embeddings=config.tie_word_embeddings
        )
        self.topology = self._mesh_layout.topology
        with translate_dist_errors():  # a rank that never joins counts as lost
            init_process_group(self._torch_device, world, recipe.fault_tolerance.collective_timeout_s)
        self.control: Control = (
            GlooControl(recipe.fault_tolerance.collective_timeout_s) if world.size > 1 else SoloControl()
        )
        attention = select_attention(options, self._torch_device, self._dtype, document_mask=recipe.data.document_mask)
        # An unsharded model needs no FSDP for its casts: it is built in the compute dtype.
        model_dtype = master if self._mesh_layout.uses_fsdp and not rounds_stochastically else self._dtype
        n_stages = self._mesh_layout.pp * options.pipeline_stages_per_rank
        self._stages = [
            build_stage(
                config,
                layers,
                attention=attention,
                dtype=model_dtype,
                pad_vocab_to_multiple_of=max(1, options.pad_vocab_to_multiple_of),
                loss_chunk_tokens=options.loss_chunk_tokens,
            )
            for layers in stage_layers(config, n_stages)[self._mesh_layout.pp_rank :: self._mesh_layout.pp]
        ]
        with translate_dist_errors():
            parallelize(
                self._stages,
                mesh_layout=self._mesh_layout,
                options=options,
                device_type=self._torch_device.type,
                compute_dtype=self._dtype,
                master_dtype=master,
                timeout_s=recipe.fault_tolerance.collective_timeout_s,
            )
        for stage in self._stages:
            stage.to_empty(device=self._torch_device)
            stage.tie_weights()  # to_empty allocates memory for each module separately
        self._fsdp_syncs = [FsdpSync(stage, options) for stage in self._stages]
        self._open_runner(recipe.fault_tolerance.collective_timeout_s)
        params = {name: parameter for stage in self._stages for name, parameter in stage_params(stage).items()}
        self._weights: Weights = (
            ModelWeights(params)
            if self._mesh_layout.uses_fsdp or model_dtype == master
            else MixedPrecisionWeights(params, master, keeps_master_weights=not rounds_stochastically)
        )
        self._config = config
        self._param_specs = {spec.name: spec for spec in param_specs(config) if spec.name in params}
        # The norm counts each replicated slice once.
        self._norm_param_names = [
            name for name, spec in self._param_specs.items() if self._mesh_layout.replica_count_and_index(spec)[1] == 0
        ]
        parts = self._local_shards()
        init_parameters(parts, config, recipe.run.seed)
        self._weights.sync_model_params()
        decays = weight_decay_names(config, include_embeddings=recipe.optimizer.decay_embeddings)
        optimizer_class = OffloadedOptimizer if options.optimizer_offload else GpuOptimizer
        self._optimizer = optimizer_class(
            optimizer_spec(recipe.optimizer.name),
            recipe.optimizer,
            {
                name: ParamSlice(
                    specs=(self._param_specs[name],),
                    offset=part.offset,
                    decay=name in decays,
                    lr_scale=lr_scale(self._param_specs[name], recipe.optimizer),
                )
                for name, part in parts.items()
            },
            {name: part.local for name, part in parts.items()},
            seed=recipe.run.seed,
            exchange=matrix_exchange(
                optimizer_spec(recipe.optimizer.name),
                parts,
                self._param_specs,
                self._mesh_layout,
                recipe.fault_tolerance.collective_timeout_s,
            ),
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
            resolved={
                "engine.gpu.compile": options.compile is True,
                "engine.gpu.attention": attention,
                "engine.gpu.fp8": options.fp8,
            },
            notes=[note for note in (compile_note, fp8_note(options)) if note],
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
        for stage in self._stages:
            stage.train()
        micros = self._micro_batches(batch)
        self._weights.on_step_begin(n_micro_batches=len(micros))
        loss_sum = self._runner.forward_backward(
            micros, valid_tokens=batch.valid_tokens, z_loss=self._optimizer_options.z_loss
        )
        self.stopwatch.begin("optimizer")
        gradients = self._weights.gradients()
        if self._tied_gradient is not None:
            self._tied_gradient.all_reduce(gradients)
        loss, grad_norm = self._all_reduce_loss_and_norm(loss_sum / batch.valid_tokens, gradients)
        max_norm = self._optimizer_options.grad_clip
        scale = clip_coefficient(grad_norm, max_norm) if max_norm > 0 else None
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        weights = {name: part.local for name, part in self._local_shards().items()}
        self._optimizer.step(weights, gradients, lr, finite, scale)
        self._weights.zero_grad()
        self._weights.sync_model_params()
        return PendingStep(loss, grad_norm)

    def _micro_batches(self, batch: StepBatch) -> list[DeviceMicroBatch]:
        layout = self._mesh_layout
        return micro_batches(
            batch,
            self._torch_device,
            fixed_boundaries=self._options.compile is True,
            cp=layout.cp,
            cp_rank=layout.cp_rank,
        )

    def _open_runner(self, timeout_s: float) -> None:
        """Set the runner of passes, and what adds up a tied weight's gradients over two stages."""
        layout = self._mesh_layout
        self._runner: PassRunner
        self._tied_gradient: TiedGradient | None = None
        if layout.pp == 1:
            self._runner = ModelRunner(self._stages[0], self._fsdp_syncs[0], self._torch_device)
            return
        from lt_trainer_gpu.pipeline import PipelineRunner, TiedGradient

        with translate_dist_errors():
            self._runner = PipelineRunner(
                self._stages,
                self._fsdp_syncs,
                mesh_layout=layout,
                device=self._torch_device,
                compute_dtype=self._dtype,
                timeout_s=timeout_s,
            )
            if layout.has_embedding_twice:
                self._tied_gradient = TiedGradient(EMBEDDING, layout, timeout_s)

    def _all_reduce_loss_and_norm(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss and the global gradient norm, reduced over all ranks and equal on each."""
        squares = squared_norm([gradients[name] for name in self._norm_param_names], self._torch_device)
        loss, squares = all_reduce_loss_and_norm(
            loss * self._is_loss_reporter, squares, world_size=self.topology.world_size
        )
        return loss, squares.sqrt()

    @property
    def _is_loss_reporter(self) -> float:
        """Factor of this rank's loss: 1 on the first of the TP ranks of the last stage, else 0."""
        return float(self._mesh_layout.tp_rank == 0 and self._mesh_layout.pp_rank == self._mesh_layout.pp - 1)

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
        for stage in self._stages:
            stage.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=total_device(self._torch_device))
        with translate_dist_errors():
            for batch in batches:
                totals[0] += self._runner.forward(self._micro_batches(batch)).to(totals.device)
                # Context-parallel ranks compute their own part of a row's loss, and all know its number of tokens.
                totals[1] += batch.valid_tokens * (self._mesh_layout.cp_rank == 0)
            totals *= self._is_loss_reporter
            if self.topology.world_size > 1:
                dist.all_reduce(totals)
            loss_sum, tokens = totals.tolist()
        for fsdp_sync in self._fsdp_syncs:
            fsdp_sync.reshard_params()
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
            RestoreError: on all ranks, a rank cannot read its part.
        """
        check_optimizer(checkpoint, self._optimizer.spec)
        groups = self._state_groups()
        checkpoint.check_specs(self._state_specs())
        read_on_all_ranks(self.control, lambda: load_tensors(checkpoint, groups))
        self._weights.sync_model_params()
        self._optimizer.step_count.fill_(int(checkpoint.manifest.scalars["optimizer_step"]))

    def _state_specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Return dtypes and shapes of the state of all ranks; this one may hold no part of a tensor."""
        optimizer, table = self._optimizer, param_specs(self._config)
        weight_dtype = next(iter(self._weights.master_weights.values())).dtype
        return {
            "weights": {spec.name: TensorSpec(DTYPE_CODES[weight_dtype], spec.shape) for spec in table},
            **{
                slot.name: {
                    spec.name: TensorSpec(DTYPE_CODES[optimizer.slot_dtype(slot, weight_dtype)], slot.shape(spec.shape))
                    for spec in table
                    if slot in optimizer.spec.for_params([spec]).slots
                }
                for slot in optimizer.spec.all_slots
            },
        }

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
        """Return this rank's slices of weights and slots; slots in host memory are those of the last step."""
        self._optimizer.wait_for_slots()
        weights, slots = self._local_shards(), self._optimizer.slots
        return {
            "weights": weights,
            **{
                slot.name: {
                    name: slot_shard(slot, name, weights[name], tensor) for name, tensor in slots[slot.name].items()
                }
                for slot in self._optimizer.spec.all_slots
            },
        }

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()
