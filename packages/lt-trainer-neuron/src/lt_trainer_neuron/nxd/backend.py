"""The backend of Trainium put together: groups, one stage, its passes, the step.

With `engine.neuron.backend = "nxd"` groups and layers are NxD's; with "xla" one rank trains on plain torch-xla. Stages
run by our own schedule over NxD's transfers (`pipeline`): NxD's model class for stages would trace the layers again. In
NxD's own CPU mode (NXD_CPU_MODE=1) tensors lie on the host and collectives go over gloo, for tests.

| precision     | weights             | masters, moments, gradients | norms, softmax, loss | made so on the device by |
|---------------|---------------------|-----------------------------|----------------------|--------------------------|
| `bf16_sr`     | float32, there bf16 | float32, there bf16         | float32, there bf16  | XLA_USE_BF16             |
| `downcast`    | float32, there bf16 | float64, there fp32         | float64, there fp32  | XLA_DOWNCAST_BF16        |
| `fp32_master` | bfloat16            | float32                     | float32              | nothing                  |

Cost: nothing beside that of its parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_ckpt.nxd.layout import nxd_layout, rank_rules
from lt_ckpt.nxd.zero import shard_rows
from lt_model import LlamaConfig
from lt_trainer.control import Control, SoloControl
from lt_trainer.engine import Device, StepBatch, Stopwatch, World
from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer.timing import HostStopwatch
from lt_trainer.torch import GlooControl, decayed
from lt_trainer_neuron.backend import MASTERS, Rows
from lt_trainer_neuron.grid import Grid, cut_of
from lt_trainer_neuron.held import EMBED, HEAD, Held, held_by
from lt_trainer_neuron.nxd.attention import by_formula, flash
from lt_trainer_neuron.nxd.device import HostDevice, TensorDevice, XlaDevice
from lt_trainer_neuron.nxd.groups import check_grid, join
from lt_trainer_neuron.nxd.layers import Layers, NxdLayers, TorchLayers
from lt_trainer_neuron.nxd.llama import Stage
from lt_trainer_neuron.nxd.passes import OneStage, StageLoss, micro_batches
from lt_trainer_neuron.nxd.pipeline import Pipelined
from lt_trainer_neuron.nxd.ranks import Alone, Neighbours, NxdNeighbours, NxdRanks, Ranks
from lt_trainer_neuron.nxd.signatures import check_installed
from lt_trainer_neuron.nxd.step import Passes, Precision, Step, Weight
from lt_trainer_neuron.options import SECTION, NeuronOptions

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import NxdOptions

__all__ = ["PEAK_FLOPS", "PRECISIONS", "NxdBackend"]

PRECISIONS: Mapping[str, Precision] = {
    "bf16_sr": Precision(compute=torch.float32, master=torch.float32, wide=torch.float32),
    "downcast": Precision(compute=torch.float32, master=torch.float64, wide=torch.float64),
    "fp32_master": Precision(compute=torch.bfloat16, master=torch.float32, wide=torch.float32),
}
"""By `engine.neuron.precision`, as torch sees them; see the module's table."""

PEAK_FLOPS = 95e12
"""Dense bf16 FLOP/s of a NeuronCore-v2: AWS gives 190 TFLOP/s for a Trainium chip, which has two."""


class NxdBackend:
    """See `lt_trainer_neuron.backend.Backend`.

    Args:
        recipe: the run's, checked.
        config: the model.
        world: the ranks.
        precision: dtypes, where they are not to follow the recipe's `engine.neuron.precision`.

    Raises:
        RecipeError: something that this backend does not have.
    """

    def __init__(
        self, recipe: Recipe, config: LlamaConfig, world: World, *, precision: Precision | None = None
    ) -> None:
        options = engine_options(recipe, "neuron", NeuronOptions)
        _check(recipe, config, options, world)
        self._precision = precision = precision or PRECISIONS[options.precision]
        self.grid = Grid.of(recipe.parallel, world.rank, world.size)
        device, ranks, neighbours, layers = _places(recipe, options, self.grid, precision)
        self._tensors, self._ranks, cut = device, ranks, cut_of(recipe)
        self.control: Control = GlooControl(recipe.guard.collective_timeout_s) if world.size > 1 else SoloControl()
        self._config, self._cut = config, cut
        numbers = sorted({number for number in map(_layer_of, _keys(config, cut, self.grid)) if number is not None})
        stage = Stage(
            config,
            cut,
            layers,
            flash() if options.flash_attention else by_formula(precision.wide),
            numbers=numbers,
            first=self.grid.first_stage,
            last=self.grid.last_stage,
            dtype=precision.compute,
            wide=precision.wide,
            recompute=device.recomputed if options.selective_checkpointing else None,
        )
        stage = on_device(stage, device.torch_device)
        if config.tie_word_embeddings and self.grid.pp == 1:
            stage.lm_head.weight = stage.model.embed_tokens.weight
        self.stage = stage
        """The layers, under NxD's keys; NxD's own loader takes it for a model."""
        self._parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._step = Step(
            self._weights_of(recipe, options, layers),
            recipe.optimizer,
            precision=precision,
            device=device,
            ranks=ranks,
            grid=self.grid,
            zero1=options.zero1,
            whole=options.graph == "step",
            tied=_tied_over_stages(config, self.grid),
        )
        with_loss = StageLoss(
            stage,
            ranks,
            first_column=config.vocab_size // self.grid.tp * self.grid.tp_rank,
            z_loss=recipe.optimizer.z_loss,
            wide=precision.wide,
            documents=recipe.data.document_mask,
        )
        self._passes: Passes = OneStage(with_loss)
        if neighbours is not None:
            self._passes = Pipelined(with_loss, neighbours, device=device, grid=self.grid, dtype=precision.compute)
        self.device = _described(device, world)
        self.stopwatch: Stopwatch = HostStopwatch()
        again = options.selective_checkpointing and not options.flash_attention
        attention = 4 * config.n_layers * config.n_heads * config.head_dim * recipe.data.seq_len
        self.recomputed_flops_per_token = float(attention) if again else 0.0

    def _weights_of(self, recipe: Recipe, options: NeuronOptions, layers: Layers) -> dict[str, Weight]:
        """The rank's tensors, each memory once, and what the step must know of them."""
        held = held_by(self._config, self._cut, self.grid)
        decays = decayed(self._config, embeddings=recipe.optimizer.decay_embeddings)
        return {
            key: Weight(
                parameter=self._parameters[key],
                decays=boxes[0].name in decays,
                counted=tuple(_counted(boxes, self.grid, every_copy=options.nxd_grad_norm)),
                summed_over_tp=layers.sequence_parallel and self._parameters[key].ndim == 1,
            )
            for key, boxes in held.items()
            if not (key == HEAD and self._config.tie_word_embeddings and self.grid.pp == 1)
        }

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The layers' tensors by NxD's key, in the order of the rank's file."""
        return {key: self._parameters[key] for key in _keys(self._config, self._cut, self.grid)}

    @property
    def slots(self) -> Mapping[str, Mapping[str, Rows]]:
        """Masters and moments; the views are made anew each time, as a step may put a device's tensors elsewhere."""
        optimizer = self._step.optimizer
        groups = {MASTERS: self._step.masters, "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
        return {
            group: {key: self._rows(key, tensor) for key, tensor in tensors.items()}
            for group, tensors in groups.items()
        }

    def _rows(self, key: str, tensor: Tensor) -> Rows:
        if not self._step.cut:
            return Rows(local=tensor.detach())
        first, held, _ = shard_rows(self._parameters[key].shape[0], self.grid.dp, self.grid.dp_rank)
        return Rows(local=tensor.detach()[:held], first=first)

    @property
    def steps(self) -> int:
        """Updates that had an effect; waits for the device."""
        return int(self._tensors.read([self._step.optimizer.step])[0])

    @steps.setter
    def steps(self, value: int) -> None:
        step = self._step.optimizer.step
        step.copy_(self._tensors.scalar(value, step.dtype))

    def slots_changed(self) -> None:
        """Give the layers their weights."""
        self._step.masters_to_weights()

    def accumulate(self, batch: StepBatch) -> Tensor:
        """All passes of the step; see `Backend.accumulate`."""
        return self._step.accumulate(self._passes, micro_batches(batch, self._tensors), batch.valid_tokens)

    def update(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Sum, clip and update; see `Backend.update`."""
        return self._step.update(loss, lr)

    def evaluate(self, batch: StepBatch) -> Tensor:
        """The summed loss of the rows."""
        return self._passes.evaluate(micro_batches(batch, self._tensors))

    def summed(self, values: Tensor) -> Tensor:
        """Summed over data-parallel ranks and stages."""
        return self._ranks.summed(self._ranks.summed(values, "dp"), "pp")

    def mark(self) -> None:
        """End the graph."""
        self._tensors.mark()

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Scalars as numbers."""
        return self._tensors.read(values)

    def memory_bytes(self) -> int:
        """Peak memory of the device, or of this process."""
        return self._tensors.memory_bytes()

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


def on_device(stage: Stage, device: torch.device) -> Stage:
    """The stage with memory on the device. NxD's marks on its parameters, which `to_empty` drops, are kept."""
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fresh = nn.Parameter(torch.zeros_like(parameter, device=device))
            vars(fresh).update(vars(parameter))
            setattr(module, name, fresh)
    return stage


def _check(recipe: Recipe, config: LlamaConfig, options: NeuronOptions, world: World) -> None:
    """What this backend does not have; what of stages it does not have is refused before (`checks`)."""
    if options.backend == "xla" and world.size > 1:
        raise RecipeError(
            "plain torch-xla is for one rank",
            values={f"{SECTION}.backend": options.backend, "ranks": world.size},
            remedy="set engine.neuron.backend to nxd, or start one rank",
        )


def _places(
    recipe: Recipe, options: NeuronOptions, grid: Grid, precision: Precision
) -> tuple[TensorDevice, Ranks, Neighbours | None, Layers]:
    """Where tensors lie, who else there is (neighbours where there are stages), and what layers are made of."""
    if options.backend == "xla":
        return XlaDevice(), Alone(), None, TorchLayers(precision.compute)
    check_installed()
    on_host = int(os.environ.get("NXD_CPU_MODE", "0")) > 0
    join(recipe, on_host=on_host)
    check_grid(grid)
    layers = NxdLayers(precision.compute, sequence_parallel=recipe.parallel.sequence_parallel)
    neighbours = NxdNeighbours() if grid.pp > 1 else None
    return (HostDevice() if on_host else XlaDevice()), NxdRanks(), neighbours, layers


def _tied_over_stages(config: LlamaConfig, grid: Grid) -> tuple[str, tuple[int, int]] | None:
    """Key and shape of an embedding that two stages have, as `Step` asks for it."""
    if not config.tie_word_embeddings or grid.pp == 1:
        return None
    return HEAD if grid.last_stage else EMBED, (config.vocab_size // grid.tp, config.hidden_size)


def _described(device: TensorDevice, world: World) -> Device:
    neuron = device.kind == "neuron"
    return Device(
        name="NeuronCore-v2" if neuron else device.name,
        kind=device.kind,
        count=world.size,
        peak_flops=PEAK_FLOPS if neuron else 0.0,
        peak_source="AWS's datasheet: 190 TFLOP/s bf16 a chip of two cores" if neuron else "not known",
    )


def _keys(config: LlamaConfig, cut: NxdOptions, grid: Grid) -> list[str]:
    """NxD's keys of this rank's file, in its order."""
    nxd_layout(config, cut)  # refuses what cannot be cut so
    return [prefix + rule.key for prefix, rule in rank_rules(config, cut, grid.pp_rank)]


def _layer_of(key: str) -> int | None:
    """The number of a key's layer; None where it is of none."""
    parts = key.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _counted(boxes: Sequence[Held], grid: Grid, *, every_copy: bool) -> Iterator[tuple[int, int]]:
    """Runs of a tensor's rows that this rank counts in the norm.

    Args:
        boxes: what the tensor is made of.
        grid: this rank's place.
        every_copy: count each copy of a replicated key/value head, as NxD does; norms are counted once all the same.
    """
    for box in boxes:
        if box.copy_of(grid) == 0 or (every_copy and len(box.shape) > 1 and box.name not in (EMBED, HEAD)):
            yield box.row, box.row + box.shape[0]
