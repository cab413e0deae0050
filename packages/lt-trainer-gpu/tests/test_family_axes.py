"""Little models of every family on each axis of the mesh, against one process, in float64.

Biases, norms of queries and keys, windows, scales and caps each have a rule of their own on some axis. The listed cases
have each family on each axis, and each pair of axes on some mesh; the slow set has every family on every mesh. Ranks
train many models one after the other.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest
import torch

from lt_model import config_from_hf, param_specs
from lt_model.decoder import Decoder
from lt_model.families import FAMILIES
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, assemble, assert_near
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load
from lt_trainer.config.section import unflatten
from lt_trainer.config.sections import ParallelOptions
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import checks
from lt_trainer_gpu import engine as engine_module
from lt_trainer_gpu.checks import fp8_products
from lt_trainer_gpu.fp8 import TensorwiseLinear, apply_fp8

EP = "parallel.ep=2"
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
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
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
AXES: dict[str, tuple[str, ...]] = {
    "tp": ("parallel.tp=2", "parallel.sequence_parallel=false"),
    "sp": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp": ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=1"),
    "interleaved": ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2"),
    "cp": ("parallel.cp=2", "engine.gpu.attention=auto"),
    "cp dense": ("parallel.cp=2", "engine.gpu.attention=reference"),
    "dp_replicate": ("parallel.dp_replicate=2",),
    "dp_shard": ("parallel.dp_shard=2",),
    "ep": (EP,),
    "full": ("engine.gpu.activation_checkpointing=full",),
    "selective": ("engine.gpu.activation_checkpointing=selective",),
    "keep": ("engine.gpu.reshard_after_forward=false",),
    "each": ("engine.gpu.reduce_each_micro_batch=true",),
}
"""What a mesh is made of; two that set a field to different values exclude each other."""
WIDER = {"dp_shard 4": ("parallel.dp_shard=4",), "ep 4": ("parallel.ep=4",)}
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "llama phi3 olmoe",
        (
            "tp, pp",
            "sp, cp dense, full, keep, each",
            "interleaved, cp",
            "dp_replicate, dp_shard, selective",
        ),
    ),
    (
        "mistral granite qwen2_moe",
        (
            "tp, cp dense, keep",
            "sp, pp",
            "interleaved, dp_shard, selective, each",
            "cp, dp_replicate, full",
        ),
    ),
    (
        "qwen2 gpt_neox qwen3_moe",
        (
            "tp, interleaved, selective",
            "sp, dp_replicate",
            "pp, cp, full, keep, each",
            "cp dense, dp_shard",
        ),
    ),
    (
        "olmo2 gemma2 mixtral",
        (
            "tp, cp, full",
            "sp, dp_shard, selective, keep",
            "pp, cp dense",
            "interleaved, dp_replicate, each",
        ),
    ),
    (
        "qwen3 olmo3 deepseek_v3",
        (
            "tp, dp_replicate, each",
            "sp, cp, selective",
            "pp, dp_shard, full",
            "interleaved, cp dense, keep",
        ),
    ),
    (
        "smollm3 gemma3_text",
        (
            "tp, pp, selective",
            "sp, interleaved, full",
            "cp, dp_shard, each",
            "cp dense, dp_replicate, keep",
        ),
    ),
    (
        "starcoder2",
        (
            "tp, dp_shard",
            "sp, cp",
            "pp, dp_replicate, full",
            "interleaved, cp dense, selective, keep, each",
        ),
    ),
    ("qwen3_moe", ("dp_replicate, dp_shard, ep", "dp_shard 4, ep", "sp, dp_shard, ep 4")),
    ("qwen3_moe", ("dp_shard 4, cp, ep",)),  # more ranks than experts
    ("deepseek_v3", ("pp, dp_shard, ep, full", "cp, ep, keep")),
    ("qwen2_moe", ("sp, interleaved, ep, selective",)),
    ("mixtral", ("cp dense, ep, each",)),
)
"""Families, and the meshes on each of which all of them train."""
ALL_MESHES = list(dict.fromkeys(mesh for _, meshes in CASES for mesh in meshes))


def fields_of(mesh: Iterable[str]) -> dict[str, str] | None:
    """Return the recipe's fields, or None where two axes exclude each other."""
    fields: dict[str, str] = {}
    for axis in mesh:
        for override in (AXES | WIDER)[axis]:
            name, _, value = override.partition("=")
            if fields.setdefault(name, value) != value:
                return None
    return fields


def n_ranks_of(fields: Mapping[str, str]) -> int:
    n_ranks = 1
    for degree in ("tp", "pp", "cp", "dp_replicate", "dp_shard"):
        n_ranks *= int(fields.get(f"parallel.{degree}", 1))
    return n_ranks


@cache
def is_trained(family: str, mesh: frozenset[str]) -> bool:
    """Whether the engine takes this family on this mesh."""
    fields = fields_of(mesh)
    if fields is None:
        return False
    base = {
        "model": unflatten(architecture_values(CONFIGS[family])),
        "data": {"store": "unused", "seq_len": SEQ_LEN},
    }
    overrides = [f"{name}={value}" for name, value in fields.items()]
    n_ranks = n_ranks_of(fields)
    try:
        recipe = load(base=base, overrides=overrides).recipe
        checks.check_recipe(recipe, World(size=n_ranks, local_size=n_ranks))
    except RecipeError:
        return False
    return True


def stands_somewhere(family: str, *axes: str) -> bool:
    """Whether the engine takes this family on some mesh with these axes."""
    return any(is_trained(family, frozenset((*axes, another))) for another in AXES)


def test_each_family_is_on_each_axis_and_each_axis_with_each_other() -> None:
    listed: set[tuple[str, str]] = set()
    together: set[frozenset[str]] = set()
    for families, meshes in CASES:
        for mesh in meshes:
            axes = mesh.split(", ")
            listed |= {(family, axis) for family in families.split() for axis in axes}
            together |= {frozenset(pair) for pair in combinations(axes, 2)}
    assert CONFIGS.keys() == FAMILIES.keys() - {"gpt_oss"}, "gpt_oss is not trained yet"
    missing = [
        (family, axis)
        for family in CONFIGS
        for axis in AXES
        if (family, axis) not in listed and stands_somewhere(family, axis)
    ]
    missing += [
        pair
        for pair in combinations(AXES, 2)
        if frozenset(pair) not in together and stands_somewhere("deepseek_v3", *pair)
    ]
    assert missing == []
    fields = {override.partition("=")[0] for axis in AXES.values() for override in axis}
    degrees = {f"parallel.{name}" for name in ParallelOptions.model_fields}
    assert degrees - fields == {"parallel.n_nodes"}, "an axis without a case"


Result = tuple[list[Any], ...]


def train_on_meshes(meshes: Iterable[str], families: list[str]) -> dict[str, dict[str, Result]]:
    """In a rank: what `train` returns for each mesh."""
    found: dict[str, dict[str, Result]] = {}
    for mesh in meshes:
        fields = fields_of(mesh.split(", ")) or {}
        found[mesh] = train(tuple(f"{name}={value}" for name, value in fields.items()), families)
    return found


def train(axis: tuple[str, ...], families: list[str]) -> dict[str, Result]:
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
            part = layouts.rank_batch(batch, engine, MICRO_STEP_ROWS // dp_size)
            (metrics,) = engine.fetch_metrics([engine.step(part, layouts.learning_rate_at(step))])
            losses += [metrics.loss]
            balance += metrics.experts.load + metrics.experts.aux_loss if metrics.experts else ()
            moments = moments or layouts.copy_slices(s for s in engine.state().shards if s.group in SLOTS)
        weights = layouts.copy_slices(shard for shard in engine.state().shards if shard.group == "weights")
        found[family] = (losses, moments, weights, balance)
    return found


@pytest.fixture(scope="module")
def alone(ranks) -> Callable[[list[str]], dict[str, Result]]:
    """The results of one process, by family."""
    done: dict[str, Result] = {}

    def trained(families: list[str]) -> dict[str, Result]:
        missing = [family for family in families if family not in done]
        if missing:
            (found,) = ranks.run(train, (), missing, ranks=1)
            done.update(found)
        return done

    return trained


def compare(ranks: Any, wanted: Mapping[str, Result], families: list[str], meshes: Iterable[str]) -> None:
    by_n_ranks: dict[int, list[str]] = {}
    for mesh in meshes:
        by_n_ranks.setdefault(n_ranks_of(fields_of(mesh.split(", ")) or {}), []).append(mesh)
    for n_ranks, own in by_n_ranks.items():
        results = ranks.run(train_on_meshes, own, families, ranks=n_ranks)
        for mesh in own:
            for family in families:
                assert_trained_alike([rank[mesh][family] for rank in results], wanted[family], f"{family}: {mesh}")


def assert_trained_alike(found: list[Result], wanted: Result, case: str) -> None:
    losses, moments, weights, balance = wanted
    for rank in found:
        assert rank[0] == pytest.approx(losses, rel=1e-12), case
        assert rank[3] == pytest.approx(balance, rel=1e-6), case
    assert_near(assemble(rank[1] for rank in found), assemble([moments]), 1e-10)
    assert_near(assemble(rank[2] for rank in found), assemble([weights]), 1e-9)


@pytest.mark.parametrize(
    ("families", "meshes"), CASES, ids=["; ".join((families, *meshes)) for families, meshes in CASES]
)
def test_families_train_on_meshes_as_in_one_process(ranks, alone, families: str, meshes: tuple[str, ...]) -> None:
    names = families.split()
    compare(ranks, alone(names), names, meshes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ALL_MESHES)
def test_every_family_trains_on_every_mesh(ranks, alone, mesh: str) -> None:
    names = [family for family in CONFIGS if is_trained(family, frozenset(mesh.split(", ")))]
    compare(ranks, alone(names), names, [mesh])


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
OPTION_PAIRS = [
    (family, option)
    for family, config in CONFIGS.items()
    for option in OPTIONS
    if option == "bfloat16" or not config.has_experts
]
LISTED_OPTIONS = {
    **{"llama": "fp8 by row", "qwen2": "fp8", "qwen3": "both", "gemma2": "fp8 by row", "gpt_neox": "fp8"},
    **{"granite": "both", "qwen2_moe": "bfloat16", "deepseek_v3": "bfloat16"},
}


@pytest.mark.parametrize(
    ("family", "option"),
    [
        pytest.param(*pair, marks=() if LISTED_OPTIONS.get(pair[0]) == pair[1] else pytest.mark.slow)
        for pair in OPTION_PAIRS
    ],
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


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "qwen2_moe"])
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
        (
            "qwen2_moe",
            (EP, "parallel.dp_replicate=4"),
            r"parallel\.ep = 2: .* x tp, and there are 1; .* divisor of 1",
        ),
        (
            "qwen3_moe",
            (EP, "parallel.tp=2"),
            r"parallel\.ep = 2, parallel\.tp = 2, .*: each .* the same tokens",
        ),
        ("odd", ("parallel.tp=2",), r"expert_size = 25; set it to a divisor of 25, or use parallel\.ep"),
        ("odd", (EP, *AXES["sp"]), ""),
    ):
        model = unflatten(architecture_values(configs[family]))
        base = {"model": model, "data": {"store": "unused", "seq_len": SEQ_LEN}}
        with pytest.raises(RecipeError, match=message) if message else nullcontext():
            checks.check_recipe(load(base=base, overrides=sets).recipe, World(size=4, local_size=4))
