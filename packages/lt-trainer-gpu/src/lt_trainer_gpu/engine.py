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

import datetime
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lt_ckpt import Checkpoint, Shard
from lt_model import LlamaConfig
from lt_model.llama import Llama
from lt_trainer.engine import Control, Device, Snapshot, SoloControl, StepBatch, StepMetrics, Topology, World
from lt_trainer.pretrained import Pretrained
from lt_trainer.recipe import Recipe
from lt_trainer.torch import (
    GlooControl,
    as_shard,
    fill_from,
    fill_from_pretrained,
    host_memory,
    initialise,
    local_part,
    parameter_groups,
    peers,
    spec_of,
    to_device,
)
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.peak import peak_flops
from lt_trainer_gpu.recompute import recomputed_flops_per_token
from lt_trainer_gpu.timing import stopwatch

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Pending:
    """A step that the device may still be working on: the loss and the gradient norm, over all ranks."""

    loss: Tensor
    grad_norm: Tensor


class GpuEngine:
    """See the module's text."""

    def __init__(self, recipe: Recipe, config: LlamaConfig, world: World) -> None:
        options: GpuOptions = recipe.engine["gpu"]
        self._config, self._grad_clip = config, recipe.optimizer.grad_clip
        self._document_mask = recipe.data.document_mask
        self._torch_device = _take_device(options, world)
        self._dtype = _compute_dtype(options, self._torch_device)
        master = torch.float64 if self._dtype == torch.float64 else torch.float32
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        self.topology = Topology(rank=world.rank, world=world.size, dp_rank=world.rank, dp_size=world.size)
        with peers():  # a rank that never comes is one that is gone
            _init_process_group(self._torch_device, world, recipe.guard.collective_timeout_s)
        self.control: Control = GlooControl(recipe.guard.collective_timeout_s) if world.size > 1 else SoloControl()
        with torch.device("meta"):
            model = Llama(config, attention=options.attention).to(master)
        self._sharded = world.size > 1 or self._dtype != master
        if self._sharded:  # else there is nothing to gather, to reduce or to cast
            # Imported here because DTensor's import takes seconds, which one process on a CPU need not wait for.
            from lt_trainer_gpu.parallelize import parallelize

            parallelize(
                model, device_type=self._torch_device.type, ranks=world.size, compute=self._dtype, master=master
            )
        self._model = model.to_empty(device=self._torch_device)
        if config.tie_word_embeddings:  # to_empty gives every module memory of its own
            self._model.lm_head.weight = self._model.model.embed_tokens.weight
        initialise(self._model, config, recipe.run.seed)
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._model, config, recipe.optimizer.weight_decay),
            lr=recipe.optimizer.lr,
            betas=(recipe.optimizer.beta1, recipe.optimizer.beta2),
            eps=recipe.optimizer.eps,
            fused=True,
        )
        self._set_optimizer_step(0)
        peak, source = peak_flops(self._torch_device, self._dtype)
        name = torch.cuda.get_device_name(self._torch_device) if self._torch_device.type == "cuda" else "cpu"
        self.device = Device(
            name=name, kind=self._torch_device.type, count=world.size, peak_flops=peak, peak_source=source
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
        with peers():
            return self._step(batch, lr)

    def _step(self, batch: StepBatch, lr: float) -> Pending:
        self.stopwatch.lap("forward_backward")
        self._model.train()
        n_micro = batch.input_ids.shape[0]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._torch_device)
        for i, loss in enumerate(self._losses(batch)):
            if self._sharded:
                self._model.set_requires_gradient_sync(i == n_micro - 1)  # pyright: ignore[reportCallIssue]
            (loss / batch.valid_tokens).backward()
            loss_sum += loss.detach()
        loss = loss_sum / batch.valid_tokens
        if self.topology.world > 1:
            dist.all_reduce(loss)
        self.stopwatch.lap("optimizer")
        grad_norm = self._clip()
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        self._optimizer.found_inf = (~finite).to(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Pending(loss, grad_norm)

    def _losses(self, batch: StepBatch) -> Iterable[Tensor]:
        """Summed cross-entropy of one micro-batch after the other."""
        arrays = (batch.input_ids, batch.position_ids, batch.doc_ids, batch.labels)
        for ids, positions, docs, labels in zip(
            *(to_device(array, self._torch_device) for array in arrays), strict=True
        ):
            # Where rows are one document each, no mask is made of the numbers: a GPU could not tell without a wait.
            seen = docs if self._document_mask else None
            yield self._model(ids, position_ids_BT=positions, doc_ids_BT=seen, labels_BT=labels)

    def _clip(self) -> Tensor:
        """The norm over all gradients of all ranks.

        Gradients above `grad_clip` are scaled down to it (0: left alone).
        """
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        if self._grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._grad_clip, norm)
        return norm

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
                for loss in self._losses(batch):
                    totals[0] += loss
                totals[1] += batch.valid_tokens
            if self.topology.world > 1:
                dist.all_reduce(totals)
            loss_sum, tokens = totals.tolist()
        if self._sharded:
            # Without a backward pass FSDP keeps the root's gathered weights (embedding, head, last norm), and a later
            # forward would use them even after `restore` has put others in their place.
            self._model.reshard()  # pyright: ignore[reportCallIssue]
        return loss_sum, int(tokens)

    def memory_bytes(self) -> int:
        """Peak allocated bytes of the GPU since it was last asked, or the peak resident size of this process so far."""
        if self._torch_device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._torch_device)
            torch.cuda.reset_peak_memory_stats(self._torch_device)
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def state_bytes(self) -> int:
        """Bytes of this rank's slices of the weights and of both moments."""
        tensors = [tensor for group in self._groups().values() for tensor in group.values()]
        return sum(local_part(tensor)[0].nbytes for tensor in tensors)

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Page-locked memory, on a GPU."""
        return host_memory(n_bytes, self._torch_device)

    def state(self) -> Snapshot:
        """This rank's slices of the weights and of both moments, and the optimizer's step count."""

        def shards() -> Iterable[Shard]:
            for group, tensors in self._groups().items():
                for name, tensor in tensors.items():
                    shard = as_shard(group, name, tensor)
                    if shard is not None:
                        yield shard

        return Snapshot(shards=shards(), small={"optimizer_step": self._optimizer_step})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over weights, moments and step count, from whatever mesh they were saved on."""
        groups = self._groups()
        checkpoint.require(
            {g: {name: spec_of(tensor) for name, tensor in tensors.items()} for g, tensors in groups.items()}
        )
        fill_from(checkpoint, groups)
        self._set_optimizer_step(int(checkpoint.manifest.small["optimizer_step"]))

    def load_weights(self, pretrained: Pretrained) -> None:
        """Take over a model's weights, cast to the master dtype; moments and step count stay as new."""
        fill_from_pretrained(pretrained, {name: parameter.data for name, parameter in self._parameters.items()})

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        state = self._optimizer.state
        return {
            "weights": {name: parameter.data for name, parameter in self._parameters.items()},
            **{
                moment: {name: state[parameter][moment] for name, parameter in self._parameters.items()}
                for moment in MOMENTS
            },
        }

    @property
    def _optimizer_step(self) -> int:
        first = next(iter(self._parameters.values()))
        return int(self._optimizer.state[first]["step"].item())

    def _set_optimizer_step(self, step: int) -> None:
        """Set AdamW's step count, making its state first.

        Torch makes it at the first step only, too late to fill it.
        """
        for parameter in self._parameters.values():
            state = self._optimizer.state[parameter]
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=self._torch_device)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _take_device(options: GpuOptions, world: World) -> torch.device:
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "engine.gpu.device = 'cuda', but torch finds no CUDA device; set it to 'cpu' or 'auto', or mend the driver"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"local rank {world.local_rank} has no GPU: torch finds {torch.cuda.device_count()}; start at most that "
            "many ranks on this node"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def _compute_dtype(options: GpuOptions, device: torch.device) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[options.dtype]


def _init_process_group(device: torch.device, world: World, timeout_s: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1:
        # One process needs no rendezvous, and so no port and no network; FSDP2 still wants a group for its casts.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)


class DeviceError(ValueError):
    """The machine does not have the device that the recipe asks for."""

    exit_code = 64
