"""Expert-parallel ranks compute what one process does in float32, by the grouped kernel, and compiled."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("lt_trainer_gpu", reason="the engine for GPUs divides experts among ranks, and it is not installed")

from lt_model import config_from_hf
from lt_test_helpers import layouts
from lt_test_helpers.pool import RankPool
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load
from lt_trainer.config.section import unflatten
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import checks
from lt_trainer_gpu.expert_parallel import expert_order

CONFIG = config_from_hf(
    {
        **{"model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    }
)


def train(dtype: str, *sets: str) -> tuple[list[float], list[layouts.StateSlice], int]:
    """In a rank: the losses of two steps, the weights after them, graphs of the compiler."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="eager")
    checks.COMPILE_TORCH_VERSIONS = (checks.parse_torch_version(torch.__version__),)
    model: Any = unflatten(architecture_values(CONFIG))
    engine = layouts.open_engine(*sets, model=model, rows=4, seq_len=32, vocab=61, dtype=dtype)
    losses = []
    for step, batch in enumerate(layouts.global_batches(2, rows=4, seq_len=32, vocab=61)):
        part = layouts.rank_batch(batch, engine, 4 // engine.topology.dp_size)
        losses += [one.loss for one in engine.fetch_metrics([engine.step(part, layouts.learning_rate_at(step))])]
    weights = layouts.copy_slices(one for one in engine.state().shards if one.group == "weights")
    return losses, weights, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("dtype", "sets", "near"),
    [("float32", ("engine.gpu.compile=false",), 1e-5), ("float64", ("engine.gpu.compile=true",), 1e-12)],
)
def test_ranks_with_experts_train_as_one_process(dtype: str, sets: tuple[str, ...], near: float) -> None:
    pool = RankPool(2, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))
    (alone,) = pool.run(train, dtype, "engine.gpu.compile=false", ranks=1)
    ranks = pool.run(train, dtype, "parallel.ep=2", *sets, ranks=2)
    for losses, _, graphs in ranks:
        assert losses == pytest.approx(alone[0], rel=near)
        assert (graphs > 2) == ("engine.gpu.compile=true" in sets), "the dense layer, parts of mixtures, the loss"
    found, wanted = (layouts.assemble(weights) for weights in ([rank[1] for rank in ranks], [alone[1]]))
    layouts.assert_near(found, wanted, 100 * near)


def test_rows_by_source_are_ordered_by_expert() -> None:
    counts_SL = torch.tensor([[2, 0, 3], [0, 0, 1], [4, 1, 0]])
    sources, experts = (grid.flatten() for grid in torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
    rows = torch.stack((experts, sources), 1).repeat_interleave(counts_SL.flatten(), dim=0)
    order, places = expert_order(counts_SL, len(rows))
    assert rows[order].tolist() == sorted(rows.tolist())
    assert torch.equal(order[places], torch.arange(len(rows)))


@pytest.mark.parametrize(
    ("type", "version", "sets", "message"),
    [
        (
            "cpu",
            "2.10.1",
            ("parallel.ep=2",),
            r"parallel\.ep = 2: expert parallelism needs torch 2\.11 or newer, not 2",
        ),
        ("cuda", "2.15.0", ("parallel.tp=2",), r"a rank has 12 of expert_size = 24, .*, or use parallel\.ep"),
        ("cuda", "2.11.0", ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2"), ""),
    ],
)
def test_a_torch_or_a_width_that_cannot_be_divided_is_refused(type, version, sets, message) -> None:
    base = {"model": unflatten(architecture_values(CONFIG)), "data": {"store": "unused"}}
    facts = checks.DeviceFacts(type=type, torch_version=version)
    with pytest.raises(RecipeError, match=message) if message else nullcontext():
        checks.check_device(load(base=base, overrides=sets).recipe, facts)
