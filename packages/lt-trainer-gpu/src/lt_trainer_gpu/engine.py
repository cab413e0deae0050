"""The torch-native engine: one rank's model, optimizer and device behind `lt_trainer.engine.Engine`.

A step runs every micro-batch forward and backward, with the loss divided by the valid tokens of the global batch, so
gradients are right under accumulation and data parallelism alike; then one exact global norm, clipping, fused AdamW.
The host never waits for the device in `step`; `read` does, once for as many steps as the caller has gathered.

A loss or a norm that is not finite must not reach the weights, and asking the device about it would make the host wait.
So both are reduced over all ranks first, and fused AdamW gets "not finite" as `found_inf`, the tensor that torch's
loss scaling hands it: where it is 1 the kernel writes nothing and the step count stays. Every rank sees the same two
numbers, so all of them skip or none.

Shapes: M micro-batches, B rows, T positions.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, Shard
from lt_model import LlamaConfig, parameters
from lt_model.llama import Llama
from lt_model.loss import LossParts
from lt_trainer.control import Control, SoloControl
from lt_trainer.engine import Device, Snapshot, StepBatch, StepMetrics, World
from lt_trainer.pretrained import Pretrained
from lt_trainer.recipe import Recipe
from lt_trainer.torch import (
    GlooControl,
    Part,
    as_shard,
    decayed,
    fill_from,
    fill_from_pretrained,
    host_memory,
    initialise,
    peers,
    spec_of,
    to_device,
)
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.compilation import attention_of
from lt_trainer_gpu.devices import compute_dtype, init_process_group, take_device
from lt_trainer_gpu.gradients import clip_factor, squared_norm, summed_over_ranks
from lt_trainer_gpu.instruments import Instruments
from lt_trainer_gpu.layout import Layout
from lt_trainer_gpu.model import OnHost
from lt_trainer_gpu.optimizer import MOMENTS, AdamW
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.parallelize import parallelize
from lt_trainer_gpu.parts import part_of
from lt_trainer_gpu.peak import peak_flops
from lt_trainer_gpu.recompute import recomputed_flops_per_token
from lt_trainer_gpu.synchronisation import GradientSync
from lt_trainer_gpu.timing import stopwatch
from lt_trainer_gpu.weights import NarrowWeights, OwnWeights, Weights


@dataclass(frozen=True)
class Pending:
    """A step that the device may still be working on: the loss and the gradient norm, over all ranks."""

    loss: Tensor
    grad_norm: Tensor


class GpuEngine:
    """See the module's text."""

    def __init__(self, recipe: Recipe, config: LlamaConfig, world: World) -> None:
        options: GpuOptions = recipe.engine["gpu"]
        self._options, self._optimizer_options = options, recipe.optimizer
        self._document_mask = recipe.data.document_mask
        self._torch_device = take_device(options, world)
        self._dtype = compute_dtype(options, self._torch_device)
        master = torch.float64 if self._dtype == torch.float64 else torch.float32
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        self._layout = Layout.of(recipe.parallel, world.rank, world.size)
        self.topology = self._layout.topology
        with peers():  # a rank that never comes is one that is gone
            init_process_group(self._torch_device, world, recipe.guard.collective_timeout_s)
        self.control: Control = GlooControl(recipe.guard.collective_timeout_s) if world.size > 1 else SoloControl()
        attention = attention_of(options, self._torch_device, self._dtype, documents=self._document_mask)
        with torch.device("meta"):
            # What is not sharded needs no FSDP for its casts: the model is made in the dtype that it computes in.
            alone = self._layout.replicas * self._layout.shards == 1
            made_in = self._dtype if alone else master
            model = Llama(config, attention=attention, pad_vocab_to=max(1, options.pad_vocab_to)).to(made_in)
        with peers():
            model = parallelize(
                model,
                layout=self._layout,
                options=options,
                device_type=self._torch_device.type,
                compute=self._dtype,
                master=master,
                timeout_s=recipe.guard.collective_timeout_s,
            )
        self._model = model.to_empty(device=self._torch_device)
        if config.tie_word_embeddings:  # to_empty gives every module memory of its own
            self._model.lm_head.weight = self._model.model.embed_tokens.weight
        self._sync = GradientSync(self._model, options)
        self._weights: Weights = OwnWeights(self._model) if made_in == master else NarrowWeights(self._model, master)
        self._table = {parameter.name: parameter for parameter in parameters(config)}
        # Of the slices that several ranks hold alike, the norm counts one.
        self._counted = [name for name, row in self._table.items() if self._layout.copies(row)[1] == 0]
        parts = self._parts()
        initialise(parts, config, recipe.run.seed)
        self._weights.updated()
        self._optimizer = AdamW(
            {name: part.local for name, part in parts.items()},
            decayed(config, embeddings=recipe.optimizer.decay_embeddings),
            recipe.optimizer,
        )
        peak, source = peak_flops(self._torch_device, self._dtype)
        name = torch.cuda.get_device_name(self._torch_device) if self._torch_device.type == "cuda" else "cpu"
        self.device = Device(
            name=name, kind=self._torch_device.type, count=world.size, peak_flops=peak, peak_source=source
        )
        self._instruments = Instruments(
            recipe.metrics, out=Path(recipe.run.out), rank=world.rank, device=self._torch_device
        )
        self.stopwatch = stopwatch(self._torch_device)
        self.recomputed_flops_per_token = recomputed_flops_per_token(
            config, recipe.data.seq_len, options.activation_checkpointing
        )

    def step(self, batch: StepBatch, lr: float) -> Pending:
        """Forward and backward of all micro-batches, clip, update; returns without waiting for the device.

        Raises:
            PeerError: another rank is gone.
        """
        with peers(), self._instruments.watching_memory():
            return self._step(batch, lr)

    def _step(self, batch: StepBatch, lr: float) -> Pending:
        self.stopwatch.lap("forward_backward")
        self._model.train()
        n_micro = batch.input_ids.shape[0]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._torch_device)
        for i, parts in enumerate(self._losses(batch, self._optimizer_options.z_loss)):
            self._sync.before_backward(last=i == n_micro - 1)
            self._weights.before_backward(passes=n_micro)
            (parts.total / batch.valid_tokens).backward()
            loss_sum += parts.cross_entropy
        self.stopwatch.lap("optimizer")
        gradients = self._weights.gradients()
        loss, grad_norm = self._agree(loss_sum / batch.valid_tokens, gradients)
        most = self._optimizer_options.grad_clip
        scale = clip_factor(grad_norm, most) if most > 0 else None
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        weights = {name: part.local for name, part in self._parts().items()}
        self._optimizer.step(weights, gradients, lr, finite, scale)
        self._weights.forget_gradients()
        self._weights.updated()
        return Pending(loss, grad_norm)

    def _losses(self, batch: StepBatch, z_loss: float) -> Iterable[LossParts]:
        """Summed loss of one micro-batch after the other; the same on all tensor-parallel ranks."""
        arrays = (batch.input_ids, batch.position_ids, batch.labels)
        tensors = zip(*(to_device(array, self._torch_device) for array in arrays), strict=True)
        for index, (ids, positions, labels) in enumerate(tensors):
            # Where rows are one document each, no mask is made of the numbers: a GPU could not tell without a wait.
            documents = self._on_host(batch.doc_ids[index]) if self._document_mask else None
            yield self._model(ids, positions, documents, labels, z_loss)

    def _on_host(self, doc_ids: np.ndarray) -> OnHost:
        tensor = torch.from_numpy(doc_ids)
        return OnHost(tensor.pin_memory() if self._torch_device.type == "cuda" else tensor)

    def _agree(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the norm over all gradients, of all ranks and equal on all of them."""
        squares = squared_norm([gradients[name] for name in self._counted], self._torch_device)
        loss, squares = summed_over_ranks(loss * self._speaks, squares, ranks=self.topology.world)
        return loss, squares.sqrt()

    @property
    def _speaks(self) -> float:
        """1 for the one of the tensor-parallel ranks, which all read the same rows, whose rows are counted; else 0."""
        return float(self._layout.tp_rank == 0)

    def read(self, pendings: Sequence[Pending]) -> list[StepMetrics]:
        """The numbers of the steps behind `pendings`; the only place where the host waits for the device."""
        if not pendings:
            return []
        with peers():
            losses = torch.stack([pending.loss for pending in pendings]).tolist()
            norms = torch.stack([pending.grad_norm for pending in pendings]).tolist()
        return [StepMetrics(loss=loss, grad_norm=norm) for loss, norm in zip(losses, norms, strict=True)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[StepBatch]) -> tuple[float, int]:
        """Sum of the loss in nats and of valid tokens, over every rank's batches."""
        self._model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self._torch_device)
        with peers():
            for batch in batches:
                for parts in self._losses(batch, z_loss=0.0):
                    totals[0] += parts.cross_entropy
                totals[1] += batch.valid_tokens
            totals *= self._speaks
            if self.topology.world > 1:
                dist.all_reduce(totals)
            loss_sum, tokens = totals.tolist()
        self._sync.after_evaluation()
        return loss_sum, int(tokens)

    def boundary(self, step: int) -> list[Path]:
        """Begin or end what the profiler and the memory history are to see."""
        return self._instruments.boundary(step)

    def last_words(self, folder: Path) -> str:
        """The last collectives of this rank, from torch's flight recorder."""
        return flight_recorder.dump(folder, rank=self.topology.rank, on_gpu=self._torch_device.type == "cuda")

    def memory_bytes(self) -> int:
        """Peak allocated bytes of the GPU since it was last asked, or the peak resident size of this process so far."""
        if self._torch_device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._torch_device)
            torch.cuda.reset_peak_memory_stats(self._torch_device)
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def state_bytes(self) -> int:
        """Bytes of what this rank gives of the weights and of both moments."""
        return sum(part.share().local.nbytes for group in self._groups().values() for part in group.values())

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Page-locked memory, on a GPU."""
        return host_memory(n_bytes, self._torch_device)

    def state(self) -> Snapshot:
        """This rank's slices of the weights and of both moments, and the optimizer's step count."""

        def shards() -> Iterable[Shard]:
            for group, parts in self._groups().items():
                for name, part in parts.items():
                    shard = as_shard(group, name, part)
                    if shard is not None:
                        yield shard

        return Snapshot(shards=shards(), small={"optimizer_step": self._optimizer.steps})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over weights, moments and step count, from whatever mesh they were saved on."""
        groups = self._groups()
        checkpoint.require({g: {name: spec_of(part) for name, part in parts.items()} for g, parts in groups.items()})
        fill_from(checkpoint, groups)
        self._weights.updated()
        self._optimizer.steps = int(checkpoint.manifest.small["optimizer_step"])

    def load_weights(self, pretrained: Pretrained) -> None:
        """Take over a model's weights, cast to the master dtype; moments and step count stay as new."""
        fill_from_pretrained(pretrained, self._parts())
        self._weights.updated()

    def _parts(self) -> dict[str, Part]:
        """This rank's slices of the weights. Asked each time: FSDP may put them elsewhere when it first runs."""
        return {
            name: part_of(self._table[name], tensor, self._layout) for name, tensor in self._weights.masters.items()
        }

    def _groups(self) -> dict[str, dict[str, Part]]:
        parts, slots = self._parts(), self._optimizer.slots
        return {
            "weights": parts,
            **{
                moment: {name: replace(part, local=getattr(slots[name], moment)) for name, part in parts.items()}
                for moment in MOMENTS
            },
        }

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
