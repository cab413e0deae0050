"""The nxd backend's own part (model, loss, step, ZeRO-1) with tensors on the host, against the cpu backend in float64.

Neither NxD nor torch-xla is needed: layers are torch's, and collectives go over gloo. What a graph is made of, and what
NxD's layers add, are the subjects of `test_xla_step.py` and `test_nxd_host.py`.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_model import LlamaConfig
from lt_model.loss import cross_entropy_sum
from lt_trainer.engine import StepBatch, World
from lt_trainer.recipe import load
from lt_trainer_neuron.cpu.backend import CpuBackend
from lt_trainer_neuron.cpu.groups import join
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd import backend as nxd
from lt_trainer_neuron.nxd.device import HostDevice
from lt_trainer_neuron.nxd.layers import TorchLayers
from lt_trainer_neuron.nxd.loss import vocabulary_loss
from lt_trainer_neuron.nxd.step import Precision

DOUBLE = Precision(compute=torch.float64, master=torch.float64, wide=torch.float64)
RATES = (0.0, 1e-2, 5e-2, 1e-2)
BAD = 2
ROWS, SEQ_LEN = 4, 16


class GlooRanks:
    """All ranks lie along one axis."""

    def __init__(self, axis: str) -> None:
        self._axis = axis

    def summed(self, tensor: Tensor, axis: str) -> Tensor:
        return self._reduced(tensor, axis, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor, axis: str) -> Tensor:
        return self._reduced(tensor, axis, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, axis: str, how: Any) -> Tensor:
        tensor = tensor.detach().clone()
        if axis == self._axis:
            dist.all_reduce(tensor, how)
        return tensor

    def scattered(self, tensor: Tensor, axis: str) -> Tensor:
        assert axis == self._axis
        assert tensor.shape[0] % dist.get_world_size() == 0
        return self.summed(tensor, axis).chunk(dist.get_world_size())[dist.get_rank()].clone()

    def gathered(self, tensor: Tensor, axis: str) -> Tensor:
        assert axis == self._axis
        boxes = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(boxes, tensor.contiguous())
        return torch.cat(boxes)


def model(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=63,
        hidden_size=24,
        intermediate_size=33,
        n_layers=2,
        n_heads=4,
        n_kv_heads=1,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


def trained(tied: bool, backend: str, *sets: str) -> dict[str, Any]:
    """In a rank: four steps, the third of which is told that no token counts; everything that can be compared."""
    world = World.from_env(os.environ)
    config = model(tied=tied)
    shape = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers", "tie_word_embeddings")
    base = {
        "run": {"engine": "neuron"},
        "model": {name: getattr(config, name) for name in shape},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch": ROWS, "micro_batch": 1},
        "optimizer": {"beta1": 0.8, "grad_clip": 0.3, "weight_decay": 0.1, "z_loss": 1e-3},
        "schedule": {"max_steps": 9, "warmup_steps": 1},
        "engine": {"neuron": {"backend": "cpu", "cpu_dtype": "float64", "num_neuroncores": world.size}},
    }
    recipe = load(base=base, sets=sets).recipe
    if backend == "cpu":
        engine = NeuronEngine(recipe, config, CpuBackend(recipe, config, world))
    else:
        join(world, 60.0)
        nxd._places = lambda *_: (HostDevice(), GlooRanks("dp"), TorchLayers(torch.float64))
        engine = NeuronEngine(recipe, config, nxd.NxdBackend(recipe, config, world, precision=DOUBLE))
    place, rng, numbers = engine.topology, np.random.default_rng(2), []
    mine = slice(place.dp_rank * ROWS // place.dp_size, (place.dp_rank + 1) * ROWS // place.dp_size)
    for step, rate in enumerate(RATES):
        ids, labels = (rng.integers(0, 63, (ROWS, SEQ_LEN), dtype=np.int32) for _ in range(2))
        labels[rng.random(labels.shape) < rng.random((ROWS, 1))] = -100
        cuts = rng.integers(1, SEQ_LEN, (ROWS, 1))
        documents = (np.arange(SEQ_LEN) >= cuts).astype(np.int32)
        positions = (np.arange(SEQ_LEN) - documents * cuts).astype(np.int32)
        valid = int((labels != -100).sum()) if step != BAD else 0
        ids, labels, documents, positions = (
            x[mine].reshape(-1, 1, SEQ_LEN) for x in (ids, labels, documents, positions)
        )
        batch = StepBatch(input_ids=ids, labels=labels, position_ids=positions, doc_ids=documents, valid_tokens=valid)
        (read,) = engine.read([engine.step(batch, rate)])
        numbers.append((read.loss, read.grad_norm))
    boxes = [
        (f"{s.group} {s.name}", s.global_shape, s.offset, s.shape, s.bytes().view(np.float64)) for s in engine.boxes()
    ]
    weights = {key: tensor.detach().double().numpy().copy() for key, tensor in engine.backend.weights.items()}
    found = {"numbers": numbers, "steps": engine.backend.steps, "boxes": boxes, "weights": weights}
    found["evaluated"] = engine.evaluate([batch])
    engine.close()
    return found


def whole(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The tensors that all ranks' boxes make up, each element from exactly one of them."""
    tensors: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, shape, offset, extent, values in rank["boxes"]:
            tensor = tensors.setdefault(name, np.full(shape, np.nan))
            place = tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))
            assert np.isnan(tensor[place]).all(), name
            tensor[place] = values.reshape(extent)
    return tensors


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("zero1", ["true", "false"])
def test_two_data_parallel_ranks_give_what_one_process_of_the_cpu_backend_gives(ranks, tied: bool, zero1: str) -> None:
    sets = (f"engine.neuron.zero1={zero1}", "engine.neuron.selective_checkpointing=true")
    if not tied:  # NxD's GQA layer under its own names
        sets = (*sets, "engine.neuron.qkv_linear=true", "engine.neuron.fuse_qkv=true")
    (one,) = ranks.run(trained, tied, "cpu", *sets, ranks=1)
    found = ranks.run(trained, tied, "nxd", *sets, ranks=2)
    wanted = whole([one])
    for name, tensor in whole(found).items():
        assert np.linalg.norm(tensor - wanted[name]) <= 1e-11 * np.linalg.norm(wanted[name]), name
    assert len(wanted) == 3 * sum(key.startswith("weights ") for key in wanted)
    for rank in found:
        assert rank["numbers"] == [pytest.approx(pair, rel=1e-11, nan_ok=True) for pair in one["numbers"]]
        assert rank["steps"] == len(RATES) - 1
        assert list(rank["weights"]) == list(one["weights"])
        for key, tensor in one["weights"].items():
            assert rank["weights"][key] == pytest.approx(tensor, rel=1e-9, abs=1e-12), key
    assert not np.isfinite(one["numbers"][BAD][0])
    assert found[0]["evaluated"][0] == pytest.approx(one["evaluated"][0], rel=1e-11)


def losses(z_loss: float) -> tuple[float, float, np.ndarray]:
    """In one of two ranks with half of the columns each: the loss, its cross-entropy, the gradient."""
    join(World.from_env(os.environ), 60.0)
    half, labels = logits_and_labels()[0].chunk(2, dim=1)[dist.get_rank()].clone(), logits_and_labels()[1]
    half.requires_grad_()
    first = dist.get_rank() * half.shape[1]
    parts = vocabulary_loss(half, labels, ranks=GlooRanks("tp"), first_column=first, z_loss=z_loss, wide=torch.float64)
    (parts.total * 3).backward()
    assert half.grad is not None
    found = float(parts.total.detach()), float(parts.cross_entropy), half.grad.numpy()
    dist.destroy_process_group()
    return found


def logits_and_labels() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 12, generator=random, dtype=torch.float64) * 30
    return logits, torch.tensor([0, 5, 6, 11, -100, 3, 7, -100, 2], dtype=torch.int32)


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_a_vocabulary_over_two_ranks_has_the_loss_and_gradient_of_a_whole_one(ranks, z_loss: float) -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    wanted = cross_entropy_sum(logits, labels, z_loss=z_loss)
    (wanted * 3).backward()
    assert logits.grad is not None
    found = ranks.run(losses, z_loss, ranks=2)
    for total, cross_entropy, _ in found:
        assert total == pytest.approx(float(wanted.detach()), rel=1e-12)
        assert cross_entropy == pytest.approx(float(cross_entropy_sum(logits.detach(), labels)), rel=1e-12)
    gradient = np.concatenate([rank[2] for rank in found], axis=1)
    assert gradient == pytest.approx(logits.grad.numpy(), rel=1e-10, abs=1e-13)
