import json

import pytest

from lt_model import PRESETS, ModelError, RopeScaling, config_from_hf, config_to_hf
from lt_model.hf import check_not_quantized, read_config

SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# meta-llama/Llama-3.2-1B, as written by transformers 4.45, and the same model as 5.x writes it.
LLAMA_32_1B_V4 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", **SCALING},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_32_1B_V5 = {
    **{name: value for name, value in LLAMA_32_1B_V4.items() if not name.startswith("rope_")},
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING},
}
# meta-llama/Llama-2-7b-hf, first upload: no n_kv_heads, head_dim or rope_theta.
LLAMA_2_7B_OLD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}


def test_files_of_transformers_4_and_5_give_the_preset():
    from lt_model import preset

    assert config_from_hf(LLAMA_32_1B_V4) == preset("llama3.2-1b")
    assert config_from_hf(LLAMA_32_1B_V5) == preset("llama3.2-1b")
    assert config_from_hf(LLAMA_2_7B_OLD) == preset("llama2-7b")


def test_round_trip(config):
    values = json.loads(json.dumps(config_to_hf(config, bos_token_id=1, eos_token_id=[2, 3], dtype="bfloat16")))
    assert config_from_hf(values) == config
    assert (values["bos_token_id"], values["eos_token_id"], values["torch_dtype"]) == (1, [2, 3], "bfloat16")


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_either_spelling_of_rope_is_enough(config, spelling):
    values = config_to_hf(config)
    if spelling == "rope_parameters":
        del values["rope_theta"], values["rope_scaling"]
    else:
        del values["rope_parameters"]
    assert config_from_hf(values) == config


def test_transformers_reads_what_we_write(config):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig.from_dict(config_to_hf(config, bos_token_id=1, eos_token_id=2))
    assert theirs.num_key_value_heads == config.n_kv_heads
    assert theirs.intermediate_size == config.intermediate_size
    assert theirs.rms_norm_eps == config.norm_eps
    assert theirs.tie_word_embeddings is config.tie_word_embeddings
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    scaling = config.rope_scaling
    assert theirs.rope_parameters["rope_type"] == ("llama3" if scaling else "default")
    if scaling:
        assert config.to_dict()["rope_scaling"].items() <= theirs.rope_parameters.items()


def test_we_read_what_transformers_writes(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig.from_dict(config_to_hf(config)).save_pretrained(tmp_path)
    assert read_config(tmp_path) == config
    assert read_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "falcon"}, "model_type = 'falcon'"),
        ({"model_type": None}, "model_type = None"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"attention_bias": 1}, "qkv_bias = 1"),
        ({"head_dim": 127}, "head_dim = 127 is odd"),
        ({"is_causal": False}, "is_causal = false of llama is not supported"),
        ({"is_causal": None}, "is_causal = null: transformers takes that for false"),
        (
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings = 8192: at the top level it is 4096",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": None}},
            "truncate = null: transformers takes",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling of llama: rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of llama: factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling of llama: low_freq_factor is missing"),
        ({"rope_scaling": [8.0]}, "rope_scaling = .* must be a table"),
        ({"rope_scaling": {**SCALING, "rope_type": "llama3", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "disagree"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **SCALING}}, "disagree"),
    ],
)
def test_what_we_do_not_compute_is_refused_with_the_source(changes, message):
    with pytest.raises(ModelError, match=rf"^dir/config\.json: .*{message}|^dir/config\.json: {message}"):
        config_from_hf({**LLAMA_32_1B_V4, **changes}, "dir/config.json")


def test_models_with_parts_name_the_text_model():
    sizes = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    message = r"^config\.json: model_type = 'gemma3': .* text_config is of type gemma3_text, which lt"
    with pytest.raises(ModelError, match=message):
        config_from_hf(sizes)
    with pytest.raises(ModelError, match="text_config is of type qwen3_5_text, unknown too; the families are llama"):
        config_from_hf({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}})


def test_kimi_k2_is_deepseek_v3():
    values = config_to_hf(PRESETS["deepseek-v3"])
    yarn = {**values["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0}
    values |= {"rope_parameters": None, "rope_scaling": yarn}
    config = config_from_hf({**values, "model_type": "kimi_k2"})
    assert config == config_from_hf(values)
    assert (config.rope_scaling.beta_fast, config.rope_scaling.beta_slow) == (1.0, 1.0)
    with pytest.raises(ModelError, match="model_type = 'kimi_k2': unknown"):
        config_from_hf({**values, "model_type": "kimi_k2", "architectures": ["KimiForCausalLM"]})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "fp8"}, r"quantized \(fp8\) weights .*FineGrainedFP8Config\(dequantize=True\)"),
        ({"quant_method": "mxfp4"}, r"quantized \(mxfp4\) weights .*Mxfp4Config\(dequantize=True\)"),
        ({"bits": 4, "ignore": ["lm_head"]}, "quantized weights are not read; take the model's bf16 files; for random"),
    ],
)
def test_quantized_weights_are_refused_and_their_shape_is_read(table, message):
    values = {**LLAMA_32_1B_V4, "quantization_config": table}
    assert config_from_hf(values) == config_from_hf(LLAMA_32_1B_V4)
    with pytest.raises(ModelError, match=f"^dir/config.json: quantization_config: {message}"):
        check_not_quantized(values, "dir/config.json")


def test_older_names_and_missing_lengths_are_read_as_transformers_reads_them():
    scaling = {"type": "llama3", **{k: v for k, v in SCALING.items() if k != "original_max_position_embeddings"}}
    config = config_from_hf({**LLAMA_32_1B_V4, "rope_scaling": scaling})
    assert config.rope_scaling == RopeScaling(**{**SCALING, "original_max_position_embeddings": 131072})
    assert config_from_hf({**LLAMA_2_7B_OLD, "rms_norm_eps": None}).norm_eps == 1e-6


def test_where_a_file_is_silent_transformers_defaults_hold():
    transformers = pytest.importorskip("transformers")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    silent = {"model_type": "llama", **{name: LLAMA_2_7B_OLD[name] for name in sizes}}
    ours, theirs = config_from_hf(silent), transformers.LlamaConfig.from_dict(silent)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert (ours.rope_theta, ours.rope_scaling) == (10000.0, None)


def test_token_ids_and_dtype_are_checked(gqa_config):
    with pytest.raises(ModelError, match="bos_token_id = 101: outside the vocabulary of 101"):
        config_to_hf(gqa_config, bos_token_id=101)
    with pytest.raises(ModelError, match="eos_token_id = -1"):
        config_to_hf(gqa_config, eos_token_id=[3, -1])
    with pytest.raises(ModelError, match="dtype = 'bf16'"):
        config_to_hf(gqa_config, dtype="bf16")


def test_files_that_cannot_be_read_name_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"none\.json: cannot be read: No such file"):
        read_config(tmp_path / "none.json")
    for content in (b"{", b"\xff\xfe\x00", b"[" * 10**6):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json: not a JSON file"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_config(tmp_path)
