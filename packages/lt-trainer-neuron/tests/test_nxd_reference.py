"""The cpu backend against what neuronx-distributed itself has written, and against transformers.

Weights that go in by Hugging Face's names lie on every rank as in NxD's own shards, bit for bit; with them a rank's
layers give transformers' logits, loss and gradients in fp32; and three steps of NxD's own model, parallel layers and
ZeRO-1 optimizer come out again: losses, norms, and each rank's rows of masters and moments. `data/nxd/README.md` says
where the data come from and how near one can get.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from neuron_engine import neuron_engine

from lt_ckpt import open_source
from lt_model import ModelConfig, config_from_hf
from lt_test_helpers.layouts import step_batch
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer.engine import StepBatch
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd.backend import NxdBackend

DATA = Path(__file__).parent / "data" / "nxd"
BETA1 = 0.9
GQA = ("engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama2-mha-tp2": (2, ("parallel.tp=2",)),
    "llama3-gqa-tp4-pp2-kv2": (8, ("parallel.tp=4", "parallel.pp=2", *GQA)),
}


def config_in(folder: Path) -> ModelConfig:
    return config_from_hf(json.loads((folder / "config.json").read_text()))


def open_engine(weights: Path, seq_len: int, rows: int, *sets: str) -> tuple[NeuronEngine, NxdBackend]:
    """An engine with the weights of a Hugging Face folder."""
    config = config_in(weights)
    engine = neuron_engine(config, *sets, rows=rows, seq_len=seq_len)
    assert isinstance(engine.backend, NxdBackend)
    pretrained = PretrainedWeights(source=open_source(str(weights)), source_model=config, model=config)
    engine.load_weights(pretrained)
    return engine, engine.backend


def batch_of(ids: np.ndarray, valid_tokens: int) -> StepBatch:
    """Rows [M, B, T], each one document, with the next token as label."""
    labels = np.concatenate([ids[..., 1:], np.full_like(ids[..., :1], -100)], axis=-1)
    positions = np.broadcast_to(np.arange(ids.shape[-1], dtype=np.int32), ids.shape).copy()
    return step_batch(
        input_ids=ids, labels=labels, position_ids=positions, doc_ids=np.zeros_like(ids), valid_tokens=valid_tokens
    )


def rank_file(folder: Path, backend: NxdBackend, kind: str = "model") -> Any:
    grid = backend.grid
    dp_rank = grid.dp_rank if kind == "optim" else 0
    name = f"dp_rank_{dp_rank:02d}_tp_rank_{grid.tp_rank:02d}_pp_rank_{grid.pp_rank:02d}.pt"
    return torch.load(folder / kind / name, weights_only=True)


Boxes = list[tuple[str, tuple[int, ...], np.ndarray]]


@dataclass(frozen=True)
class Computed:
    """What one rank has: logits on the last stage, the loss, and its parts of the gradients."""

    logits: np.ndarray | None
    loss: float
    gradients: Boxes


def compute(case: str, ids: np.ndarray, sets: tuple[str, ...]) -> Computed:
    """In a rank: NxD's shards compared, all logits, and one step's loss and gradients."""
    folder = DATA / case
    engine, backend = open_engine(folder / "hf", ids.shape[-1], ids.shape[1], "optimizer.grad_clip=0", *sets)
    shards = rank_file(folder / "nxd-plain", backend)
    assert list(shards) == list(backend.weights), "the keys of NxD's file, in its order"
    for key, tensor in shards.items():
        assert torch.equal(backend.weights[key], tensor.to(torch.float32)), key
    batch = batch_of(ids, valid_tokens=ids.size - ids.shape[0] * ids.shape[1])
    outputs: list[torch.Tensor] = []
    hook = backend.stage.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    backend.validate(batch)
    hook.remove()
    logits = None
    if backend.grid.is_last_stage:
        logits = backend._collectives.all_gather(outputs[0].movedim(-1, 0), "tp").movedim(0, -1).numpy()
    (numbers,) = engine.fetch_metrics([engine.step(batch, 1e-3)])
    boxes: Boxes = [
        (s.name, s.offset, s.bytes().view(np.float32).reshape(s.shape) / np.float32(1 - BETA1))
        for s in engine.iter_model_shards()
        if s.group == "exp_avg"
    ]
    engine.close()
    return Computed(logits, numbers.loss, boxes)


@pytest.mark.parametrize("case", CASES)
def test_nxds_shards_give_the_logits_loss_and_gradients_of_transformers(ranks, case: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, which is compared with, is not there")
    from safetensors.torch import load_file

    n, sets = CASES[case]
    folder = DATA / case / "hf"
    ids = np.random.default_rng(5).integers(0, config_in(folder).vocab_size, (1, 3, 24), dtype=np.int32)
    found: list[Computed] = ranks.run(compute, case, ids, sets, ranks=n)
    theirs = transformers.LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
    theirs._attn_implementation = "eager"
    theirs.use_cache = False
    model = transformers.LlamaForCausalLM(theirs).to(torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    tokens = torch.from_numpy(ids[0]).long()
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    wanted = result.logits.detach().numpy()
    last = [one.logits for one in found if one.logits is not None]
    assert last
    for logits in last:
        assert np.abs(logits - wanted).max() <= 1e-5
    assert [one.loss for one in found] == pytest.approx([result.loss.item()] * n, abs=1e-6)
    for name, parameter in model.named_parameters():
        gradient = np.zeros(tuple(parameter.shape), np.float32)
        for one in found:
            for _, offset, values in (box for box in one.gradients if box[0] == name):
                gradient[tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True))] += values
        assert parameter.grad is not None
        norm = float(parameter.grad.norm())
        assert np.linalg.norm(gradient - parameter.grad.numpy()) <= 2e-5 * norm, name


@dataclass(frozen=True)
class Steps:
    """What one rank saw: losses and norms, and by group and key its own and NxD's rows after the last step."""

    losses: list[float]
    norms: list[float]
    rows: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]
    weights: dict[str, tuple[np.ndarray, np.ndarray]]
    start: dict[str, np.ndarray]
    steps: int


def repeat(steps_file: str, checkpoint: str, dtype: str) -> Steps:
    """In a rank: NxD's three steps."""
    folder = DATA / "llama2-mha-tp2-dp2-zero1-steps"
    said = json.loads((folder / steps_file).read_text())
    ours, batch = said["optimizer"], said["batch"]
    rows, length = batch["sequences_per_dp_rank"], batch["sequence_length"]
    dp = said["parallel"]["data_parallel"]
    engine, backend = open_engine(
        folder / "hf-start",
        length,
        rows * dp,
        "parallel.tp=2",
        f"batch.micro_batch_size={rows}",
        f"engine.neuron.cpu_dtype={dtype}",
        f"optimizer.beta1={ours['betas'][0]}",
        f"optimizer.beta2={ours['betas'][1]}",
        f"optimizer.eps={ours['eps']}",
        f"optimizer.weight_decay={ours['weight_decay']}",
        f"optimizer.grad_clip={ours['max_grad_norm']}",
        "optimizer.decay_embeddings=true",
    )
    grid = backend.grid
    assert grid.groups("tp") == said["parallel"]["tp_groups"]
    assert grid.groups("dp") == said["parallel"]["dp_groups"]
    start = {key: rows.to_host().numpy().copy() for key, rows in backend.optimizer_state["weights"].items()}
    pendings = []
    for step in said["steps"]:
        (read,) = (one for one in step["dp_ranks"] if one["dp_rank"] == grid.dp_rank)
        ids = np.array(read["input_ids"], np.int32)[None]
        pendings.append(engine.step(batch_of(ids, valid_tokens=dp * rows * (length - 1)), step["lr"]))
    numbers = engine.fetch_metrics(pendings)
    optimizer = rank_file(folder / checkpoint, backend, "optim")
    keys = [name for group in said["param_groups"] for name in group["names"]]
    assert sorted(keys) == sorted(backend.weights)
    compared: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for group, slots in backend.optimizer_state.items():
        for index, key in enumerate(keys):
            state = optimizer["base_state"][index] | {"weights": optimizer["sharded_master_weights"][index]}
            mine, theirs = slots[key], state[group]
            assert not theirs[mine.n_rows :].any(), f"{key}: what we take for padding is none"
            assert mine.start_row == grid.dp_rank * theirs.shape[0]
            compared.setdefault(group, {})[key] = mine.to_host().numpy().copy(), theirs[: mine.n_rows].numpy()
    saved = rank_file(folder / checkpoint, backend)
    weights = {
        key: (one.detach().to(torch.float32).numpy(), saved[key].to(torch.float32).numpy())
        for key, one in backend.weights.items()
    }
    assert {key: one.dtype for key, one in saved.items()} == {key: one.dtype for key, one in backend.weights.items()}
    count = backend.step_count
    engine.close()
    return Steps([n.loss for n in numbers], [n.grad_norm for n in numbers], compared, weights, start, count)


def relative(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Relative L2 difference over all tensors."""
    apart = sum(np.square(mine.astype(np.float64) - theirs).sum() for mine, theirs in pairs)
    return float(np.sqrt(apart / sum(np.square(theirs.astype(np.float64)).sum() for _, theirs in pairs)))


def changes(found: Steps) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the steps have made of the masters: ours and NxD's."""
    return [
        (mine - found.start[key], theirs - found.start[key]) for key, (mine, theirs) in found.rows["weights"].items()
    ]


def test_three_steps_of_nxds_zero1_in_fp32(ranks) -> None:
    said = json.loads((DATA / "llama2-mha-tp2-dp2-zero1-steps" / "steps-fp32.json").read_text())["steps"]
    for found in ranks.run(repeat, "steps-fp32.json", "nxd-plain-fp32/step_3", "float32", ranks=4):
        assert found.steps == 3
        assert found.losses == pytest.approx([step["loss_mean"] for step in said], abs=1e-6)
        assert found.norms == pytest.approx([step["grad_norm"] for step in said], rel=2e-6)
        for key, (mine, theirs) in found.rows["weights"].items():
            assert np.abs(mine - theirs).max() <= 1e-5, key
        for key, (mine, theirs) in found.weights.items():
            assert np.abs(mine - theirs).max() <= 1e-5, key
        assert relative(changes(found)) <= 1e-5
        for moment in ("exp_avg", "exp_avg_sq"):
            assert relative(list(found.rows[moment].values())) <= 5e-6


def test_three_steps_of_nxds_zero1_in_bf16_with_fp32_masters(ranks) -> None:
    """Within what two independent bf16 runs agree to."""
    said = json.loads((DATA / "llama2-mha-tp2-dp2-zero1-steps" / "steps.json").read_text())["steps"]
    for found in ranks.run(repeat, "steps.json", "nxd-plain/step_3", "bfloat16", ranks=4):
        assert found.losses == pytest.approx([step["loss_mean"] for step in said], abs=5e-3)
        assert found.norms == pytest.approx([step["grad_norm"] for step in said], rel=1e-2)
        assert relative(list(found.rows["weights"].values())) <= 1e-3
        assert relative(changes(found)) <= 6e-2
        for moment in ("exp_avg", "exp_avg_sq"):
            assert relative(list(found.rows[moment].values())) <= 2e-2
