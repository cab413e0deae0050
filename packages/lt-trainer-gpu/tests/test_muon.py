"""Muon: the formula, and every layout against one process in float64.

The formula is written out with numpy: Newton-Schulz of the whole matrix, AdamW for embedding, head and norms. Layouts
split matrices along rows (FSDP), features (tensor parallelism) and both, evenly and not.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lt_model import ModelConfig, param_specs
from lt_model.config import LayerKind
from lt_model.params import ParamSpec
from lt_test_helpers import layouts
from lt_test_helpers.layouts import TrainResult, assemble, assert_near
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load
from lt_trainer.engine import StepBatch
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.muon import MUON
from lt_trainer.optimizers.spec import ROLES, ParamSlice, lr_scale
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.matrix_exchange import ShardedMatrices
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.optimizer import GpuOptimizer

ROWS, SEQ_LEN, VOCAB = 12, 16, 61
MODEL = {"hidden_size": 32, "intermediate_size": 44, "n_heads": 8, "n_kv_heads": 4, "n_layers": 2}
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **MODEL)
SPECS = {spec.name: spec for spec in param_specs(CONFIG)}
MATRICES = {spec.name for spec in SPECS.values() if spec.type == "matrix"}
MIXTURE = {"n_experts": 3, "experts_per_token": 2, "expert_size": 20, "layers": (LayerKind(experts=True),) * 2}
MIXTURE |= {"family": "qwen2_moe", "qkv_bias": True, "shared_expert_size": 24, "shared_expert_gate": True}
MIXED = {spec.name: spec for spec in param_specs(replace(CONFIG, **MIXTURE))}
ORTHOGONAL = {name for name in MIXED if name.endswith("_proj.weight") or ".mlp.experts." in name}
SETS = ("optimizer.name=muon", "optimizer.newton_schulz_dtype=float32", "optimizer.momentum=0.8")


def newton_schulz(u: np.ndarray, steps: int) -> np.ndarray:
    """Return the whole matrix after the quintic iteration; of stacked experts each."""
    if u.ndim == 3:
        return np.stack([newton_schulz(one, steps) for one in u])
    a, b, c = 3.4445, -4.7750, 2.0315
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def by_the_formula(
    weights: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]], options: OptimizerOptions, lr: float
) -> dict[str, np.ndarray]:
    done = {}
    for name, weight in weights.items():
        w, m, v = weight.copy(), np.zeros_like(weight), np.zeros_like(weight)
        spec = MIXED[name]
        rate = lr * getattr(options.lr_scale, ROLES.get(spec.type, spec.type))
        for t, step in enumerate(gradients, start=1):
            g = step[name]
            decay = rate * options.weight_decay * w if spec.decay else 0.0
            if name in ORTHOGONAL:
                m = options.momentum * m + (1 - options.momentum) * g
                u = options.momentum * m + (1 - options.momentum) * g if options.nesterov else m
                rows, columns = w.shape[-2:]
                scale = 0.2 * max(rows, columns) ** 0.5
                if options.adjust_lr == "original":
                    scale = max(1, rows / columns) ** 0.5
                change = rate * scale * newton_schulz(u, options.newton_schulz_steps)
            else:
                m = options.beta1 * m + (1 - options.beta1) * g
                v = options.beta2 * v + (1 - options.beta2) * g * g
                root = np.sqrt(v / (1 - options.beta2**t)) + options.eps
                change = rate * m / (1 - options.beta1**t) / root
            w = w - change - decay
        done[name] = w
    return done


def given(seed: int, specs: dict[str, ParamSpec] = SPECS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(spec.shape) for name, spec in specs.items()}


def make(kind: type[OptimizerDriver], options: OptimizerOptions, weights: dict[str, torch.Tensor]) -> OptimizerDriver:
    params = {
        name: ParamSlice(
            specs=(spec,), offset=(0,) * len(spec.shape), decay=spec.decay, lr_scale=lr_scale(spec, options)
        )
        for name, spec in MIXED.items()
    }
    return kind(MUON, options, params, weights)


@pytest.mark.parametrize("kind", [GpuOptimizer, OptimizerDriver])
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("adjust_lr=original", "nesterov=false", "momentum=0.7"),
        ("newton_schulz_steps=3", "weight_decay=0.3", "eps=1e-3", "beta1=0.5", "beta2=0.7"),
        ("lr_scale.matrices=3", "lr_scale.embedding=10", "lr_scale.head=0.1", "lr_scale.norm=0"),
    ],
)
def test_steps_are_those_of_the_formula(kind: type[OptimizerDriver], sets: tuple[str, ...]) -> None:
    overrides = [f"optimizer.{one}" for one in ("name=muon", "newton_schulz_dtype=float32", *sets)]
    options = load(base={"data": {"store": "unused"}}, overrides=overrides).recipe.optimizer
    start, *gradients = (given(seed, MIXED) for seed in range(4))
    weights = {name: torch.from_numpy(w.copy()) for name, w in start.items()}
    muon = make(kind, options, weights)
    assert set(muon.slots["momentum"]) == ORTHOGONAL
    assert set(muon.slots["exp_avg"]) == set(muon.slots["exp_avg_sq"]) == set(MIXED) - ORTHOGONAL
    for step in gradients:
        muon.step(
            weights,
            {name: torch.from_numpy(2 * g) for name, g in step.items()},
            1e-2,
            torch.tensor(True),
            torch.tensor(0.5, dtype=torch.float64),
        )
    wanted = by_the_formula(start, gradients, options, 1e-2)
    for name, weight in weights.items():
        moved = np.linalg.norm(wanted[name] - start[name])
        assert moved > 0 or (options.lr_scale.norm == 0 and MIXED[name].type in ("norm", "bias")), name
        assert np.linalg.norm(weight.numpy() - wanted[name]) <= 1e-12 * moved, name


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_the_iteration_makes_singular_values_near_one(shape: tuple[int, int], size: float) -> None:
    assert MUON.transform is not None
    u = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dtype, spread in (("float32", 1e-5), ("bfloat16", 0.1)):
        options = OptimizerOptions(name="muon", newton_schulz_dtype=dtype)
        orthogonal = MUON.transform.transform(options, u.to(getattr(torch, dtype)))
        assert orthogonal.dtype == getattr(torch, dtype)
        values = torch.linalg.svdvals(orthogonal.double())
        assert 0.5 < values.min() < values.max() < 1.3
        wanted = newton_schulz(u.double().numpy(), 5)
        assert np.linalg.norm(orthogonal.double().numpy() - wanted) <= spread * np.linalg.norm(wanted)
    assert MUON.transform.transform(options, torch.zeros(3, 4)).tolist() == [[0.0] * 4] * 3, "without a gradient"


def open_engine(*sets: str) -> GpuEngine:
    optimizer = {"weight_decay": 0.1, "grad_clip": 0.3}
    return layouts.open_engine(*SETS, *sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, optimizer=optimizer)


def global_batches(n_steps: int) -> list[StepBatch]:
    return layouts.global_batches(n_steps, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)


def train(sets: tuple[str, ...]) -> TrainResult:
    engine = open_engine(*sets)
    return layouts.train_steps(engine, global_batches(3), global_batches(4)[3], 1, lambda: engine.state().shards)


@pytest.fixture(scope="module")
def alone(ranks: Callable[..., list[TrainResult]]) -> TrainResult:
    return ranks.run(train, (), ranks=1)[0]


TP_SP = ("parallel.tp=2", "parallel.sequence_parallel=true")
LAYOUTS = {"fsdp3-uneven": (3, ()), "tp4": (4, ("parallel.tp=4",)), "fsdp3-tp-sp": (6, TP_SP)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process(ranks: Callable[..., list[TrainResult]], alone: TrainResult, name: str) -> None:
    n, sets = LAYOUTS[name]
    found = ranks.run(train, sets, ranks=n)
    for rank in found:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-10)
        assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=1e-10)
        assert rank.state_bytes[0] == rank.state_bytes[1]
    wanted, states = assemble([alone.states[-1]]), assemble([rank.states[-1] for rank in found])
    assert {name for group, name in wanted if group == "momentum"} == MATRICES
    assert_near(states, wanted, 1e-9)


def exchange_bits(dtype: torch.dtype) -> tuple[dict[str, bytes], list[str]]:
    """In a rank: its slices of matrices, each transformed by its owner; and the matrices that it transformed."""
    torch.distributed.init_process_group("gloo")
    rank, tp = torch.distributed.get_rank(), 2
    size = torch.distributed.get_world_size()
    layout = MeshLayout(dp_shard=size // tp, tp=tp, dp_shard_rank=rank // tp, tp_rank=rank % tp)
    exchange = ShardedMatrices(SPECS, layout, 60.0)
    shapes: list[str] = []

    def own(name: str, matrix: torch.Tensor) -> torch.Tensor:
        offset, shape = layout.slice_of(SPECS[name], rank // tp, rank % tp)
        return matrix[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))].contiguous()

    def transform(matrix: torch.Tensor) -> torch.Tensor:
        shapes.append(str(tuple(matrix.shape)))
        return matrix.flip(0).flip(1)

    whole = {name: torch.from_numpy(g).to(dtype) for name, g in given(3).items()}
    found = dict(exchange.transform(sorted(MATRICES), lambda name: own(name, whole[name]), transform))
    assert set(found) == MATRICES
    for name, values in found.items():
        assert torch.equal(values, own(name, whole[name].flip(0).flip(1))), name
    torch.distributed.destroy_process_group()
    return {}, shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_whole_at_balanced_owners(ranks: Callable[..., list[tuple]], dtype: torch.dtype) -> None:
    owned = [shapes for _, shapes in ranks.run(exchange_bits, dtype, ranks=6)]
    assert sorted(shape for shapes in owned for shape in shapes) == sorted(str(SPECS[name].shape) for name in MATRICES)
    assert sorted(map(len, owned)) == [2, 2, 2, 2, 3, 3]
