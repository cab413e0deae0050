import dataclasses
import math

import pytest

from lt_model import (
    PRESETS,
    ModelConfig,
    ModelError,
    config_to_hf,
    flops_per_token,
    n_parameters,
    param_specs,
    preset,
)
from lt_model.config import LayerKind
from lt_model.costs import attention_flops_per_token, memory_bytes
from lt_model.describe import alignment_warnings

# Published or computed from the published shapes by transformers (sum over state_dict of a model on the meta device).
COUNTS = {
    "tiny-2m": 2_295_552,
    "tiny-5m": 4_951_296,
    "litespark-default": 134_769_408,
    "llama-160m": 162_417_408,
    "llama-1b": 1_100_048_384,
    "llama-30b": 32_528_943_616,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "pythia-1b": 1_011_781_632,
    "pythia-160m": 162_322_944,
    "gemma3-1b": 999_885_952,
    "smollm3-3b": 3_075_098_624,
    "olmo2-7b": 7_298_617_344,
    "olmo2-1b": 1_484_916_736,
    "qwen3-8b": 8_190_735_360,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-0.6b": 596_049_920,
    "tiny-30m-a9m": 30_043_776,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_108_544,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_counts_are_exact(name):
    assert n_parameters(PRESETS[name]) == COUNTS[name]


# What no count of parameters shows, from the config.json of each maker: theta, positions, factor of the stretching.
POSITIONS = {
    "llama-160m": (10000.0, 2048, None),
    "llama-1b": (10000.0, 2048, None),
    "llama2-7b": (10000.0, 4096, None),
    "llama2-13b": (10000.0, 4096, None),
    "llama2-70b": (10000.0, 4096, None),
    "llama3-8b": (500000.0, 8192, None),
    "llama3-70b": (500000.0, 8192, None),
    "llama3.2-1b": (500000.0, 131072, 32.0),
    "llama3.2-3b": (500000.0, 131072, 32.0),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_presets_turn_positions_as_their_makers_do(name):
    config = PRESETS[name]
    scaling = config.rope_scaling
    assert (config.rope_theta, config.max_position_embeddings, scaling and scaling.factor) == POSITIONS[name]
    if scaling:
        limits = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings)
        assert limits == (1.0, 4.0, 8192)
    assert config.norm_eps == 1e-5
    assert config.head_width in (64, 128)


@pytest.mark.parametrize("name", ["litespark-default", "llama-1b", "llama3-8b", "llama3.2-1b", "llama3.2-3b"])
def test_table_has_the_names_and_shapes_of_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config_to_hf(PRESETS[name])))
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in param_specs(PRESETS[name])} == shapes


def test_whole_table_of_a_small_model():
    config = ModelConfig(vocab_size=10, hidden_size=8, intermediate_size=12, n_heads=4, n_kv_heads=2, n_layers=2)
    residual = 0.02 / math.sqrt(4)
    block = [
        ("self_attn.q_proj", (8, 8), "matrix", "q_proj", 0, True, 0.02, True),
        ("self_attn.k_proj", (4, 8), "matrix", "k_proj", 0, True, 0.02, False),
        ("self_attn.v_proj", (4, 8), "matrix", "v_proj", 0, True, 0.02, True),
        ("self_attn.o_proj", (8, 8), "matrix", "o_proj", 1, True, residual, False),
        ("mlp.gate_proj", (12, 8), "matrix", "gate_proj", 0, True, 0.02, True),
        ("mlp.up_proj", (12, 8), "matrix", "up_proj", 0, True, 0.02, False),
        ("mlp.down_proj", (8, 12), "matrix", "down_proj", 1, True, residual, True),
        ("input_layernorm", (8,), "norm", "input_layernorm", None, False, "ones", False),
        ("post_attention_layernorm", (8,), "norm", "post_attention_layernorm", None, False, "ones", False),
    ]
    expected = [
        ("model.embed_tokens.weight", (10, 8), None, "embed", "embedding", "embed_tokens", 0, False, 0.02, False),
        *(
            (f"model.layers.{layer}.{name}.weight", shape, layer, "block", *rest)
            for layer in (0, 1)
            for name, shape, *rest in block
        ),
        ("model.norm.weight", (8,), None, "final", "norm", "norm", None, False, "ones", False),
        ("lm_head.weight", (10, 8), None, "final", "head", "lm_head", 0, True, 0.02, False),
    ]
    columns = ["name", "shape", "layer", "role", "type", "kind", "tp_dim", "decay", "init", "is_saved", "is_trained"]
    assert [tuple(getattr(one, column) for column in columns) for one in param_specs(config)] == [
        (*row, True) for row in expected
    ]
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert param_specs(tied) == param_specs(config)[:-1]


def test_presets_take_overrides_and_name_near_misses():
    assert preset("llama3-8b", n_layers=4).n_layers == 4
    assert preset("llama3-8b") == PRESETS["llama3-8b"]
    with pytest.raises(ModelError, match="preset 'lama3-8b': unknown; did you mean 'llama3-8b'"):
        preset("lama3-8b")
    with pytest.raises(ModelError, match="preset 'tiny-2m': unknown field 'depth'"):
        preset("tiny-2m", depth=3)
    with pytest.raises(ModelError, match="n_kv_heads = 3"):
        preset("tiny-2m", n_kv_heads=3)


def test_flops_are_six_per_multiplied_weight_plus_attention():
    config = PRESETS["llama3-8b"]
    weights = COUNTS["llama3-8b"] - 128256 * 4096
    assert flops_per_token(config, 8192, "full") == 6 * weights + 12 * 32 * 4096 * 8192
    assert flops_per_token(config, 8192, "causal") == 6 * weights + 6 * 32 * 4096 * 8192
    tied = PRESETS["llama3.2-1b"]  # the tied embedding is multiplied as the head
    assert flops_per_token(tied, 1, "full") == 6 * COUNTS["llama3.2-1b"] + 12 * 16 * 2048


@pytest.mark.parametrize(("window", "length"), [(7, 64), (64, 64), (64, 32), (1024, 4096)])
def test_a_window_costs_the_keys_that_a_token_sees_on_average(window, length):
    """Less w / 2T keys than in the mask, as a row without a window counts T / 2 and not (T + 1) / 2."""
    layers = (LayerKind(sliding=True), LayerKind(sliding=True), LayerKind())
    fields = {"sliding_rope_theta": 1e4, "qk_norm": "full", "norm_place": "post", "family": "olmo3"}
    config = ModelConfig(vocab_size=8, n_layers=6, layers=layers, sliding_window=window, **fields)
    per_key = 12 * config.n_heads * config.head_width
    seen = {w: sum(min(t, w) for t in range(1, length + 1)) / length for w in (window, length)}
    for convention, keys in (("full", {w: min(w, length) for w in seen}), ("causal", seen)):
        found = attention_flops_per_token(config, length, convention) / per_key
        wanted = 4 * keys[window] + 2 * keys[length]
        if convention == "causal":
            wanted -= (4 * min(window, length) + 2 * length) / (2 * length)
        assert found == pytest.approx(wanted, abs=1)


def test_flops_match_what_torch_counts():
    torch = pytest.importorskip("torch")
    from plain_loss import cross_entropy_sum
    from torch.utils.flop_counter import FlopCounterMode

    from lt_model import Decoder

    config = preset("tiny-2m")
    n_rows, seq_len = 2, 96
    model = Decoder(config, attention="reference")
    ids = torch.zeros(n_rows, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(ids), ids).backward()
    norms = sum(parameter.numel for parameter in param_specs(config) if parameter.type == "norm")
    counted = counter.get_total_flops() / (n_rows * seq_len)
    by_formula = flops_per_token(config, seq_len, "full") - 6 * norms
    assert counted == by_formula


def test_cost_arguments_are_checked():
    with pytest.raises(ModelError, match="seq_len = 0"):
        flops_per_token(PRESETS["tiny-2m"], 0)
    with pytest.raises(ModelError, match="convention = 'half'"):
        flops_per_token(PRESETS["tiny-2m"], 8, "half")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="micro_batch_size = 0"):
        memory_bytes(PRESETS["tiny-2m"], micro_batch_size=0, seq_len=8)


def test_memory_by_part():
    n = COUNTS["tiny-2m"]
    found = memory_bytes(PRESETS["tiny-2m"], micro_batch_size=3, seq_len=100)
    assert found == {"params": 4 * n, "grads": 4 * n, "moments": 8 * n, "logits": 4915200}


def test_sizes_that_are_no_multiple_of_64_are_named():
    (warning,) = alignment_warnings(PRESETS["litespark-default"])
    assert warning.startswith("intermediate_size = 2072 is not a multiple of 64")
    assert "2048 or 2112" in warning
    odd = ModelConfig(vocab_size=32003, hidden_size=768, intermediate_size=2048)
    (warning,) = alignment_warnings(odd)
    assert warning.startswith("vocab_size = 32003")
    assert "pad_vocab_to_multiple_of" in warning
    (warning,) = alignment_warnings(preset("qwen3-30b-a3b", expert_size=500))
    assert warning.startswith("expert_size = 500")
    assert [name for name, config in PRESETS.items() if alignment_warnings(config)] == ["litespark-default"]
    assert alignment_warnings(PRESETS["tiny-5m"]) == alignment_warnings(PRESETS["llama3-8b"]) == []
