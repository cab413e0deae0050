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

import math
import resource
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint
from lt_model import ModelConfig
from lt_model.costs import recomputed_flops_per_token
from lt_model.loss import LossParts
from lt_model.scoring import LabelScores
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.engine import Device, ExpertLoad, Snapshot, StepBatch, StepMetrics, StepParts, World
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.torch import GlooControl, PendingStep, allocate_host_memory, local_tensor, translate_dist_errors
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.balancing import move_selection_biases, pop_load
from lt_trainer_gpu.computation import DTYPE_FIELD, Computation, agree_on_cpu_dtype, choose_computation
from lt_trainer_gpu.context_parallel_rows import rank_positions
from lt_trainer_gpu.devices import accumulation_dtype, init_process_group
from lt_trainer_gpu.gradients import clip_coefficient, reduce_loss_and_norm
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.micro_batches import MicroBatches, ModelRunner, PassRunner, StepMicroBatches, micro_batches
from lt_trainer_gpu.parallelize import open_stages
from lt_trainer_gpu.peak_flops import peak_flops
from lt_trainer_gpu.pipeline import PipelineRunner, TiedGradient
from lt_trainer_gpu.step_graphs import StepGraphs
from lt_trainer_gpu.step_profiler import StepProfiler
from lt_trainer_gpu.timing import create_stopwatch
from lt_trainer_gpu.trained_state import TrainedState

EMBEDDING = "model.embed_tokens.weight"


class GpuEngine:
    """Engine of one rank.

    Its parts are made in one order, and each needs those before it: how to compute, the mesh and its ranks, the stages
    (built, parallelized, allocated), their passes, weights with the optimizer, instruments.
    """

    def __init__(self, recipe: Recipe, config: ModelConfig, world: World) -> None:
        timeout_s = recipe.fault_tolerance.collective_timeout_s
        computation = choose_computation(recipe, config, world)
        self._mesh_layout = layout = MeshLayout.from_options(
            recipe.parallel, world.rank, world.size, tie_word_embeddings=config.tie_word_embeddings
        )
        self.topology = layout.topology
        with translate_dist_errors():  # a rank that never joins counts as lost
            init_process_group(computation.device, world, timeout_s)
            self.control: Control = GlooControl(timeout_s) if world.size > 1 else Control()
            computation = agree_on_cpu_dtype(computation, recipe, world, self.control)
            self._graphs = StepGraphs(computation.device, recipe) if computation.options.cuda_graphs else None
            self._stages = open_stages(config, recipe.moe, computation, layout, timeout_s)
            self._runner: PassRunner = (
                PipelineRunner(self._stages, computation, layout, timeout_s)
                if layout.pp > 1
                else ModelRunner(self._stages[0])
            )
            self._tied_gradient = TiedGradient(EMBEDDING, layout, timeout_s) if layout.has_embedding_twice else None
        self._micro_batches = partial(
            micro_batches,
            device=computation.device,
            fixed_boundaries=computation.compile or self._graphs is not None,
            cp=layout.cp,
            cp_rank=layout.cp_rank,
            has_ids=any(stage.is_first for stage in self._stages),
            has_labels=config.has_experts or any(stage.is_last for stage in self._stages),
        )
        self._state = TrainedState(self._stages, config, recipe, computation, layout)
        self._computation, self._optimizer_options = computation, recipe.optimizer
        self._bias_update_rate = recipe.moe.bias_update_rate
        # Summed over ranks: the first of the TP ranks of the last stage reports the loss.
        self._reports_loss = layout.tp_rank == 0 and layout.pp_rank == layout.pp - 1
        self._no_loss = torch.zeros((), dtype=accumulation_dtype(computation.device), device=computation.device)
        self.device = _describe_device(computation, world)
        self._profiler = StepProfiler.open(recipe, rank=world.rank, device=computation.device)
        self.stopwatch = create_stopwatch(computation.device)
        mode = computation.options.activation_checkpointing
        self.recomputed_flops_per_token = (  # with a memory budget the compiler chooses
            math.nan if mode == "memory_budget" else recomputed_flops_per_token(config, recipe.data.seq_len, mode)
        )

    def step(self, batch: StepParts, lr: float) -> PendingStep:
        """Run one optimizer step: forward/backward of all micro-batches, clip, update; does not sync.

        Raises:
            PeerError: another rank is gone.
        """
        try:
            with translate_dist_errors():
                self.stopwatch.begin("forward_backward")
                for stage in self._stages:
                    stage.train()
                micros = StepMicroBatches(batch, self._micro_batches)
                share = 1 / batch.valid_tokens if batch.valid_tokens else math.inf
                if self._graphs is not None:
                    return self._graphs.run(list(micros), share, lr, self._compute)
                return self._compute(micros, torch.full_like(self._no_loss, share), lr)
        except torch.OutOfMemoryError:
            if self._profiler is not None:
                self._profiler.on_out_of_memory()
            raise

    def _compute(self, micros: MicroBatches, share: Tensor, lr: Tensor | float) -> PendingStep:
        """Compute a step; `share` is one over its valid tokens. With CUDA graphs this is what a graph repeats."""
        weights, options = self._state.weights, self._optimizer_options
        weights.is_accumulating = len(micros) > 1
        master_dtype = self._computation.master_dtype
        losses = self._runner.forward_backward(micros, share=share.to(master_dtype), z_loss=options.z_loss)
        if self._graphs is None:  # a graph has no parts
            self.stopwatch.begin("optimizer")
        gradients = weights.gradients()
        if self._tied_gradient is not None:
            self._tied_gradient.all_reduce(gradients)
        losses = losses if self._reports_loss else [self._no_loss]
        loss, grad_norm = reduce_loss_and_norm(
            (losses[0] if len(losses) == 1 else torch.stack(losses).sum(dtype=share.dtype)) * share,
            [gradients[name] for name in self._state.norm_param_names],
            world_size=self.topology.world_size,
        )
        scale = clip_coefficient(grad_norm, options.grad_clip) if options.grad_clip > 0 else None
        finite = loss + grad_norm < math.inf  # as both are, which are not negative
        masters = {name: local_tensor(weight).detach() for name, weight in weights.master_weights.items()}
        self._state.optimizer.step(masters, gradients, lr, finite, scale)
        weights.sync_model()
        has_experts = self._stages[0].config.has_experts
        load = pop_load(self._stages, self._mesh_layout.router_copies) if has_experts else None
        if load is not None:
            move_selection_biases(self._stages, load, self._bias_update_rate, finite)
        return PendingStep(loss, grad_norm, load)

    def fetch_metrics(self, pendings: Sequence[PendingStep]) -> list[StepMetrics]:
        """Return the metrics of `pendings`; the only place where the host synchronizes."""
        if not pendings:
            return []
        with translate_dist_errors():
            # One copy: each would wait for the device.
            pairs = torch.stack([x for pending in pendings for x in (pending.loss, pending.grad_norm)]).tolist()
        loads = [
            None if pending.expert_load is None else self._expert_load(pending.expert_load) for pending in pendings
        ]
        values = zip(pairs[::2], pairs[1::2], loads, strict=True)
        return [StepMetrics(loss=loss, grad_norm=norm, experts=load) for loss, norm, load in values]

    def _expert_load(self, load_LE: Tensor) -> ExpertLoad:
        config = self._stages[0].config
        rows = [row for index, row in enumerate(load_LE.tolist()) if config.layer(index).experts]
        counts, losses = [row[:-1] for row in rows], tuple(row[-1] for row in rows)
        load = tuple(max(row) * len(row) / max(1.0, sum(row)) for row in counts)
        return ExpertLoad(load=load, idle=tuple(row.count(0) for row in counts), aux_loss=losses)

    @torch.no_grad()
    def validate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Return the summed loss (nats) and the number of valid tokens over all ranks' batches."""
        for stage in self._stages:
            stage.eval()
        device = self._computation.device if self._no_loss.dtype == torch.float64 else "cpu"
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        with translate_dist_errors():
            for batch in batches:
                parts: list[LossParts] = self._runner.forward(self._micro_batches(batch), z_loss=0.0)
                losses = [one.cross_entropy for one in parts] or [self._no_loss]
                totals[0] += torch.stack(losses).sum(dtype=self._no_loss.dtype).to(totals.device)
                # Context-parallel ranks compute their own part of a row's loss, and all know its number of tokens.
                totals[1] += batch.valid_tokens * (self._mesh_layout.cp_rank == 0)
            totals *= self._reports_loss
            if self.topology.world_size > 1:
                dist.all_reduce(totals)
            loss_sum, tokens = totals.tolist()
        self._reshard_params()
        return loss_sum, int(tokens)

    @torch.no_grad()
    def score(self, batch: StepBatch) -> PositionScores:
        """Return the log-probability of each label and whether it is the greedy choice; synchronizes."""
        for stage in self._stages:
            stage.eval()
        with translate_dist_errors():
            found: list[LabelScores] = self._runner.forward(self._micro_batches(batch), z_loss=None)
            scores = [(one.log_probs.cpu().numpy(), one.is_greedy.cpu().numpy()) for one in found if self._reports_loss]
        self._reshard_params()
        if not scores:
            return PositionScores.unreported(batch.labels)
        log_probs, is_greedy = (np.stack(arrays) for arrays in zip(*scores, strict=True))
        cp, cp_rank = self._mesh_layout.cp, self._mesh_layout.cp_rank
        indices = rank_positions(np.arange(batch.labels.size).reshape(batch.labels.shape), cp, cp_rank)
        return PositionScores.at_positions(batch.labels, indices, log_probs, is_greedy)

    def _reshard_params(self) -> None:
        for stage in self._stages:
            if stage.fsdp_sync is not None:
                stage.fsdp_sync.reshard_params()

    def on_step_begin(self, step: int) -> list[Path]:
        """Open or close profiler and memory-snapshot windows; return the files written."""
        return [] if self._profiler is None else self._profiler.on_step_begin(step)

    def dump_debug_info(self, folder: Path) -> str:
        """Dump this rank's last collectives from torch's flight recorder; return a hint on reading them."""
        return flight_recorder.dump(folder, rank=self.topology.rank, on_gpu=self._computation.device.type == "cuda")

    def peak_memory_bytes(self) -> int:
        """Return peak allocated device bytes since the last call; on mps what is allocated, on a CPU the peak RSS."""
        device = self._computation.device
        if device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if device.type == "mps":
            return torch.mps.driver_allocated_memory()
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak if self._graphs is None else max(peak, self._graphs.peak_bytes)

    def state_bytes(self) -> int:
        """Return the bytes of this rank's share of weights and optimizer state."""
        return self._state.n_bytes()

    def allocate_host_memory(self, n_bytes: int) -> np.ndarray:
        """Allocate `n_bytes` of host memory, page-locked if the device is a GPU."""
        return allocate_host_memory(n_bytes, self._computation.device)

    def state(self) -> Snapshot:
        """Return this rank's slices of weights and optimizer state, and the optimizer's step count."""
        return self._state.snapshot()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer state and step count, saved on any mesh; see `TrainedState.restore`."""
        self._state.restore(checkpoint, self.control)

    def load_weights(self, pretrained: PretrainedWeights) -> None:
        """Load a model's weights, cast to the master dtype; optimizer state is not touched."""
        self._state.load_weights(pretrained)

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def _describe_device(computation: Computation, world: World) -> Device:
    device = computation.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak, source = peak_flops(device, computation.dtype, name)
    return Device(
        name=name,
        kind=device.type,
        count=world.size,
        peak_flops=peak,
        peak_source=source,
        resolved={
            DTYPE_FIELD: str(computation.dtype).removeprefix("torch."),
            "engine.gpu.compile": computation.compile,
            "engine.gpu.attention": computation.attention,
            "engine.gpu.fp8": computation.options.fp8,
        },
        notes=list(computation.notes),
    )
