"""Little models of every family on each axis of the mesh, against one process, in float64.

Biases, norms of queries and keys, windows, scales and caps each have a rule of their own on some axis. The default run
draws an eleventh of the pairs, others each day; the slow set trains all. Ranks train all models one after the other.
"""

import datetime
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lt_model import config_from_hf, param_specs
from lt_model.decoder import Decoder
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, assemble, assert_near
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load
from lt_trainer.config.section import unflatten
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import checks
from lt_trainer_gpu import engine as engine_module
from lt_trainer_gpu.fp8 import TensorwiseLinear, apply_fp8, fp8_products

STEPS, ROWS, SEQ_LEN, VOCAB, SLOTS = 2, 8, 32, 61, ("momentum", "exp_avg")
MICRO_STEP_ROWS = 4  # of all ranks, over which experts are balanced
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN, "head_dim": 8},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FILES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"tie_word_embeddings": True, "rope_scaling": YARN},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 6, "rope_scaling": YARN},
    "smollm3": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 3},
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0, "mlp_bias": True},
    "starcoder2": {"sliding_window": 6},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 4, "v_head_dim": 10, "attention_bias": True, "first_k_dense_replace": 1},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 24, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    },
}
CONFIGS = {name: config_from_hf({"model_type": name, **SIZES, **file}) for name, file in FILES.items()}
AXES = {
    "tp": ("parallel.tp=2",),
    "sp": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "cp": ("parallel.cp=2",),
    "cp, dense": ("parallel.cp=2", "engine.gpu.attention=reference"),
    "pp": ("parallel.pp=2",),
    "interleaved": ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2"),
    "dp_shard": (),
    "dp_replicate": ("parallel.dp_replicate=2",),
    "selective": ("parallel.tp=2", "engine.gpu.activation_checkpointing=selective"),
    "pp, full": ("parallel.pp=2", "engine.gpu.activation_checkpointing=full"),
}
EP, EP4, SP = "parallel.ep=2", "parallel.ep=4", AXES["sp"]
EP_AXES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep": (2, (EP,)),
    "ep 4": (4, (EP4,)),
    "ep, sharded": (4, (EP,)),
    "ep, more ranks than experts": (8, (EP, "parallel.cp=2")),
    "ep, sp": (2, (EP, *SP)),
    "ep 4, sp": (4, (EP4, *SP)),
    "ep, cp": (2, (EP, "parallel.cp=2")),
    "ep, dp_replicate": (4, (EP, "parallel.dp_replicate=2")),
    "ep, pp": (4, (EP, "parallel.pp=2")),
    "ep, interleaved, sp": (4, (EP, *SP, *AXES["interleaved"])),
    "ep, selective": (2, (EP, "engine.gpu.activation_checkpointing=selective")),
    "ep, full": (4, (EP, "engine.gpu.activation_checkpointing=full", "engine.gpu.reshard_after_forward=false")),
}
ALL_AXES = {axis: (2, sets) for axis, sets in AXES.items()} | EP_AXES
PAIRS = [(family, axis) for family in CONFIGS for axis in AXES]
PAIRS += [(family, axis) for family in ("qwen3_moe", "deepseek_v3") for axis in EP_AXES]
PAIRS += [("qwen2_moe", axis) for axis in EP_AXES if "4" not in axis]
TODAY = datetime.date.today().toordinal()
DRAWN = {pair for number, pair in enumerate(PAIRS) if (number * 7 + TODAY) % 17 == 0}
DRAWN |= {("olmoe", "cp")}  # experts are counted over ranks, and over those of a row


def train(axis: tuple[str, ...], families: list[str]) -> dict[str, tuple[list[Any], ...]]:
    """In a rank: losses, momentum after the first step (the gradients) and last weights of each family."""
    found = {}
    for family in families:
        model = unflatten(architecture_values(CONFIGS[family]))
        sets = (*axis, "optimizer.name=muon", "optimizer.lr_scale.norm=3", "optimizer.weight_decay=0.3")
        sets += (
            ("moe.aux_loss=0.5", "moe.sequence_aux_loss=0.5", "moe.router_z_loss=0.1")
            if CONFIGS[family].has_experts
            else ()
        )
        engine = layouts.open_engine(*sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
        engine_module.init_process_group = lambda *_: None  # the ranks have met
        losses, balance, moments, dp_size = list[float](), list[float](), list[StateSlice](), engine.topology.dp_size
        for step, batch in enumerate(layouts.global_batches(STEPS, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)):
            order = np.arange(ROWS).reshape(-1, dp_size).T.flatten()  # a micro-step has the same rows in every layout
            arrays = {name: array[:, order] for name, array in vars(batch).items() if np.ndim(array) == 3}
            part = layouts.rank_batch(replace(batch, **arrays), engine, MICRO_STEP_ROWS // dp_size)
            (metrics,) = engine.fetch_metrics([engine.step(part, layouts.learning_rate_at(step))])
            losses += [metrics.loss]
            balance += metrics.experts.load + metrics.experts.aux_loss if metrics.experts else ()
            moments = moments or layouts.copy_slices(s for s in engine.state().shards if s.group in SLOTS)
        weights = layouts.copy_slices(shard for shard in engine.state().shards if shard.group == "weights")
        found[family] = (losses, moments, weights, balance)
    return found


def compare(ranks: Any, pairs: set[tuple[str, str]]) -> None:
    families = [family for family in CONFIGS if any(family == one for one, _ in pairs)]
    (alone,) = ranks.run(train, (), families, ranks=1)
    for axis, (n_ranks, sets) in ALL_AXES.items():
        own = [family for family in families if (family, axis) in pairs]
        results = ranks.run(train, sets, own, ranks=n_ranks) if own else []
        for family in own:
            losses, moments, weights, balance = alone[family]
            for rank in results:
                assert rank[family][0] == pytest.approx(losses, rel=1e-12), (family, axis)
                assert rank[family][3] == pytest.approx(balance, rel=1e-6), (family, axis)
            assert_near(assemble(rank[family][1] for rank in results), assemble([moments]), 1e-10)
            assert_near(assemble(rank[family][2] for rank in results), assemble([weights]), 1e-9)


@pytest.mark.parametrize("pairs", [DRAWN, pytest.param(set(PAIRS), marks=pytest.mark.slow)], ids=["drawn", "all"])
def test_families_train_on_an_axis_as_in_one_process(ranks, pairs: set[tuple[str, str]]) -> None:
    compare(ranks, pairs)


def one_process(open_on, family: str, *sets: str, n_steps: int = 3) -> tuple[list[float], dict[str, set[str]]]:
    """Losses of steps on the same batch, and the names of the parameters in each group of the state."""
    (batch,) = layouts.global_batches(1, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    engine = open_on("cpu", CONFIGS[family], "optimizer.name=muon", "engine.gpu.dtype=bfloat16", *sets)
    before = layouts.copy_slices(one for one in engine.state().shards if one.group == "weights")
    losses = [one.loss for one in engine.fetch_metrics([engine.step(batch, 3e-3) for _ in range(n_steps)])]
    shards, groups = list(engine.state().shards), dict[str, set[str]]()
    for one in shards:
        groups.setdefault(one.group, set()).add(one.name)
    after = layouts.copy_slices(one for one in shards if one.group == "weights")
    moved = {b.name for a, b in zip(before, after, strict=True) if (a.values != b.values).any()}
    assert moved == groups["weights"]
    return losses, groups


OPTIONS = {
    "fp8": ("engine.gpu.fp8=tensorwise",),
    "fp8 by row": ("engine.gpu.fp8=rowwise",),
    "bfloat16": ("optimizer.weights_dtype=bfloat16",),
    "both": ("optimizer.weights_dtype=bfloat16", "engine.gpu.fp8=tensorwise"),
}
OPTION_PAIRS = [(f, o) for f, config in CONFIGS.items() for o in OPTIONS if o == "bfloat16" or not config.has_experts]


@pytest.mark.parametrize(
    ("family", "option"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * ((n * 7 + TODAY) % 23 > 0)) for n, pair in enumerate(OPTION_PAIRS)],
)
def test_muon_trains_families_in_narrow_formats(open_on, family: str, option: str) -> None:
    """Matrices have Muon's momentum; norms and biases AdamW's moments; all move, and losses are near the wide ones."""
    losses, groups = one_process(open_on, family, *OPTIONS[option])
    matrices = {spec.name for spec in param_specs(CONFIGS[family]) if spec.type in ("matrix", "experts")}
    assert groups["momentum"] == matrices
    assert groups["exp_avg"] == {spec.name for spec in param_specs(CONFIGS[family]) if spec.is_trained} - matrices
    wanted, _ = one_process(open_on, family)
    assert losses == pytest.approx(wanted, rel=0.01)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "gpt_neox", "granite"])
def test_fp8_adds_every_bias_in_the_compute_dtype(family: str) -> None:
    config = CONFIGS[family]
    model = Decoder(config).to(torch.bfloat16)
    scaling = "rowwise" if config.gated else "tensorwise"
    assert apply_fp8(model, scaling, 1) == 2 * (7 if config.gated else 6)
    generator, with_bias = torch.Generator().manual_seed(0), set()
    for name, module in model.named_modules():
        if isinstance(module, TensorwiseLinear) and module.bias is not None:
            x, bias = torch.randn(16, module.in_features, generator=generator).bfloat16(), module.bias
            torch.nn.init.normal_(bias, generator=generator)
            module.bias = None
            product = module(x)
            module.bias = bias
            found = module(x)
            found.backward(upstream := torch.randn(found.shape, generator=generator).bfloat16())
            assert torch.equal(found, product + bias)
            assert torch.equal(bias.grad, upstream.sum(0))
            with_bias.add(f"{name}.bias")
    products = {spec.name.removesuffix(".weight") for spec in fp8_products(config, 1)}
    table = {spec.name for spec in param_specs(config) if spec.type == "bias"}
    assert with_bias == {name for name in table if name.removesuffix(".bias") in products}


def compile_and_compare(open_on, monkeypatch, family: str) -> None:
    """The compiled losses are the eager ones, and batches with other documents make no graph anew."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(checks, "COMPILE_TORCH_VERSIONS", (checks.parse_torch_version(torch.__version__),))
    batches = layouts.global_batches(4, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    losses, graphs = dict[bool, list[float]](), list[int]()
    torch._dynamo.reset()
    for compiled in (False, True):
        engine = open_on("cpu", CONFIGS[family], f"engine.gpu.compile={compiled}".lower())
        for batch in batches:
            found = engine.fetch_metrics([engine.step(batch, 1e-3)])[0].loss
            losses.setdefault(compiled, []).append(found)
            graphs.append(counters["stats"]["unique_graphs"])
    assert losses[True] == pytest.approx(losses[False], rel=1e-9)
    kinds = {CONFIGS[family].layer(n) for n in range(4)}
    assert 0 < graphs[4] - graphs[3] <= len(kinds) + 2, "of each kind of layer one, and two of the loss"
    assert graphs[4:] == [graphs[4]] * 4


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_blocks_of_every_family_compile_as_one_graph(open_on, monkeypatch, family: str) -> None:
    compile_and_compare(open_on, monkeypatch, family)


@pytest.mark.parametrize("family", [name for number, name in enumerate(CONFIGS) if (number + TODAY) % 7 == 0])
def test_blocks_of_families_are_traced_as_one_graph(open_on, monkeypatch, family: str) -> None:
    """As the compiler's first part does; its code generator takes half a minute for each and is left out."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compile_and_compare(open_on, monkeypatch, family)


def test_what_options_lack_is_refused_with_the_field() -> None:
    configs = CONFIGS | {"odd": replace(CONFIGS["qwen3_moe"], expert_size=25)}
    for family, sets, message in (
        ("gemma2", ("engine.gpu.attention=sdpa",), r"attention_softcap = 5\.0 of family = 'gemma2' is not .*= sdpa"),
        ("olmoe", ("engine.gpu.fp8=tensorwise",), r"n_experts = 5 of family = 'olmoe' is not .*fp8 = tensorwise"),
        ("llama", (EP,), r"parallel\.ep = 2: this model has no experts"),
        ("olmoe", (EP,), r"parallel\.ep = 2: .* parts of the experts, and there are 5; .* divisor of 1"),
        ("qwen2_moe", ("parallel.ep=3",), r"parallel\.ep = 3: .*dp_shard x cp x tp, and there are 4; .* divisor of 2"),
        ("qwen2_moe", (EP, "parallel.dp_replicate=4"), r"parallel\.ep = 2: .* x tp, and there are 1; .* divisor of 1"),
        ("qwen3_moe", (EP, *AXES["tp"]), r"parallel\.ep = 2, parallel\.tp = 2, .*: each .* the same tokens"),
        ("odd", AXES["tp"], r"expert_size = 25; set it to a divisor of 25, or use parallel\.ep"),
        ("odd", (EP, *SP), ""),
    ):
        model = unflatten(architecture_values(configs[family]))
        base = {"model": model, "data": {"store": "unused", "seq_len": SEQ_LEN}}
        with pytest.raises(RecipeError, match=message) if message else nullcontext():
            checks.check_recipe(load(base=base, overrides=sets).recipe, World(size=4, local_size=4))
