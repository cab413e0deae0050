"""Little models of every family on each axis of the mesh, against one process, in float64.

Biases, norms of queries and keys, windows, scales and caps each have a rule of their own on some axis. The default run
draws a quarter of the pairs, another one each day; the slow set trains all. Ranks train all models one after the other.
"""

import datetime
from typing import Any

import pytest

from lt_model import config_from_hf
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, assemble, assert_near
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.section import unflatten
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import engine as engine_module

STEPS, ROWS, SEQ_LEN, VOCAB = 2, 4, 32, 61
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
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
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
    "full": ("engine.gpu.activation_checkpointing=full",),
}
PAIRS = [(family, axis) for family in CONFIGS for axis in AXES]
TODAY = datetime.date.today().toordinal()
DRAWN = {pair for number, pair in enumerate(PAIRS) if (number * 7 + TODAY) % 5 == 0}


def train(axis: tuple[str, ...], families: list[str]) -> dict[str, tuple[list[float], list[Any], list[Any]]]:
    """In a rank: losses, momentum after the first step (the gradients) and last weights of each family."""
    found = {}
    for family in families:
        model = unflatten(architecture_values(CONFIGS[family]))
        sets = (*axis, "optimizer.name=muon", "optimizer.lr_scale.norm=3", "optimizer.weight_decay=0.3")
        engine = layouts.open_engine(*sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
        engine_module.init_process_group = lambda *_: None  # the ranks have met
        losses: list[float] = []
        moments: list[StateSlice] = []
        for step, batch in enumerate(layouts.global_batches(STEPS, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)):
            part = layouts.rank_batch(batch, engine, 1)
            metrics = engine.fetch_metrics([engine.step(part, layouts.learning_rate_at(step))])
            losses += [one.loss for one in metrics]
            shards = (shard for shard in engine.state().shards if shard.group in ("momentum", "exp_avg"))
            moments = moments or layouts.copy_slices(shards)
        weights = layouts.copy_slices(shard for shard in engine.state().shards if shard.group == "weights")
        found[family] = (losses, moments, weights)
    return found


def compare(ranks: Any, pairs: set[tuple[str, str]]) -> None:
    families = [family for family in CONFIGS if any(family == one for one, _ in pairs)]
    (alone,) = ranks.run(train, (), families, ranks=1)
    for axis, sets in AXES.items():
        own = [family for family in families if (family, axis) in pairs]
        results = ranks.run(train, sets, own, ranks=2) if own else []
        for family in own:
            losses, moments, weights = alone[family]
            for rank in results:
                assert rank[family][0] == pytest.approx(losses, rel=1e-12), (family, axis)
            assert_near(assemble(rank[family][1] for rank in results), assemble([moments]), 1e-10)
            assert_near(assemble(rank[family][2] for rank in results), assemble([weights]), 1e-9)


def test_families_train_on_an_axis_as_in_one_process(ranks) -> None:
    compare(ranks, DRAWN)


@pytest.mark.slow
def test_every_family_trains_on_every_axis_as_in_one_process(ranks) -> None:
    compare(ranks, set(PAIRS))


def test_what_an_attention_lacks_is_refused_with_the_field() -> None:
    from lt_trainer.config.recipe import load
    from lt_trainer.engine import World
    from lt_trainer_gpu.spec import SPEC

    base = {"model": unflatten(architecture_values(CONFIGS["gemma2"])), "data": {"store": "unused", "seq_len": 32}}
    recipe = load(base=base, overrides=["engine.gpu.attention=sdpa", "batch.global_batch_size=8"]).recipe
    with pytest.raises(RecipeError, match=r"attention_softcap = 5\.0 of family = 'gemma2' is not .*attention = sdpa"):
        SPEC.check(recipe, World(size=2, local_size=2))
