"""Every key of config.json in every family: our model follows transformers' in what it reads and in what it ignores.

A file is varied in one key; then our logits must be those of transformers' own model, or the file is refused. A forward
pass of transformers is made only where the configuration changed in something that its model reads.
"""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from family_models import YARN, NoFloat32, make_model, our_tensors  # noqa: E402

from lt_model import Decoder, ModelError, config_from_hf  # noqa: E402
from lt_model.families import FAMILIES  # noqa: E402
from lt_model.rope_keys import FULL, SLIDING  # noqa: E402

IDS = torch.randint(0, 23, (1, 20), generator=torch.Generator().manual_seed(1))
SIZES = {
    **{"vocab_size": 23, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "pad_token_id": None},
}
WINDOW = {"sliding_window": 5}
LAST = {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}
GEMMA = {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0}
FEW = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8},
    **{"v_head_dim": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 2},
}
OWN = {
    **{"mistral": WINDOW, "qwen2": LAST, "qwen3": {**LAST, "head_dim": 8}, "smollm3": LAST, "olmo3": WINDOW},
    **{"gemma2": {**GEMMA, "attn_logit_softcapping": 5.0}, "gemma3_text": {**GEMMA, "sliding_window_pattern": 2}},
    **{
        "phi3": {**WINDOW, "partial_rotary_factor": 0.5},
        "starcoder2": WINDOW,
        "mixtral": {**FEW, **WINDOW, "head_dim": 8},
    },
    **{"olmoe": FEW, "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 40}},
    **{"qwen3_moe": {**QWEN, "head_dim": 8}, "deepseek_v3": LATENT, "gpt_oss": {**FEW, **WINDOW, "head_dim": 8}},
}
TYPES = [SLIDING, FULL, FULL, SLIDING]
KEYS = """
[true, false, null] attention_bias is_causal mlp_bias norm_topk_prob qkv_bias rope_interleave tie_word_embeddings
[true, false, null] use_bias use_bidirectional_attention use_sliding_window use_parallel_residual qk_layernorm
[true, false, null] parallel_attn scale_attn_weights use_cache seq_aux tie_last_hidden_states
[true] is_decoder is_encoder_decoder output_router_logits use_qk_norm alibi
[0.1, null] rms_norm_eps layer_norm_eps norm_epsilon clip_qkv logit_scale mscale
[0.4, null] attn_logit_softcapping final_logit_softcapping attention_multiplier embedding_multiplier
[0.4, null] residual_multiplier logits_scaling router_jitter_noise embedding_dropout classifier_dropout
[0.4, null] initializer_range router_aux_loss_coef routed_scaling_factor swiglu_alpha swiglu_limit aux_loss_alpha
[0.5] attention_dropout hidden_dropout embd_pdrop resid_pdrop residual_dropout
[30.0, null] rope_theta rope_local_base_freq rotary_emb_base rope_ratio
[0.25, 1.0, null] rotary_pct partial_rotary_factor
["gelu", "gelu_pytorch_tanh", "silu", "relu", null] hidden_act hidden_activation
[1, 3, 4, null] first_k_dense_replace max_window_layers num_key_value_heads
[1, 2, null] topk_group moe_layer_freq num_experts_per_tok num_mtp_layers
[2, 3, null] sliding_window_pattern _sliding_window_pattern n_group n_shared_experts decoder_sparse_step
[2, null] no_rope_layer_interval pretraining_tp ep_size
[3] num_hidden_layers bos_token_id eos_token_id pad_token_id
[3, null] sliding_window chunk_size_feed_forward
[4, null] qk_nope_head_dim qk_rope_head_dim qk_head_dim attention_chunk_size
[5, null] num_experts num_local_experts v_head_dim kv_lora_rank q_lora_rank
[8, null] moe_intermediate_size shared_expert_intermediate_size query_pre_attn_scalar
[16, 12, null] n_routed_experts head_dim
[16, 100, null] original_max_position_embeddings max_position_embeddings
[48] hidden_size vocab_size intermediate_size num_nextn_predict_layers
[8] num_attention_heads
[[1, 0, 1, 0], null] no_rope_layers
[[1], [0, 1, 2, 3], null] mlp_only_layers
[{"1": {"rms_norm_eps": 0.1}}, null] per_layer_config
["softmax", "greedy", null] scoring_func topk_method
["bfloat16", "linear"] torch_dtype rope_type
"""
"""Values to keys: those of the families, and what other models have."""
ROPE_KEYS = """
[2.0, 1] factor
[4.0, 0.5, null] beta_fast
[1.0, null] beta_slow
[true, false, null] truncate
[1.3, 0, null] attention_factor
[0.6, null] mscale mscale_all_dim partial_rotary_factor
[30.0] rope_theta low_freq_factor high_freq_factor
[100, 32.0] original_max_position_embeddings
["linear", "default", "llama3", "dynamic"] rope_type type
"""


def parse(text):
    lines = [line.rpartition("] ") for line in text.strip().splitlines()]
    return {key: json.loads(f"{values}]") for values, _, keys in lines for key in keys.split()}


VALUES = {**parse(KEYS), "layer_types": [[FULL] * 4, [SLIDING] * 4, TYPES[::-1], None]}
ROPE_VALUES = parse(ROPE_KEYS)
PLAIN = {"rope_type": "default", "rope_theta": 30.0}
TABLES = (None, {}, {"rope_type": "default"}, PLAIN, {FULL: PLAIN, SLIDING: PLAIN}, {FULL: PLAIN}, {SLIDING: PLAIN})


def files(family):
    """The old spelling and the new one, which names the layers' types; scaled where the family can be."""
    row = FAMILIES[family]
    sizes = {"model_type": family, **SIZES, **OWN.get(family, {})}
    theta = 500000.0 if family == "olmo3" else 100.0
    scaling = {"rope_type": "default"} if "rope_scaling" in row.fixed else {**YARN, "rope_theta": theta}
    old = {**sizes, row.theta_key: theta}
    if "rope_scaling" not in row.fixed:
        old["rope_scaling"] = {key: value for key, value in scaling.items() if key != "rope_theta"}
    new = {**sizes, "rope_parameters": scaling}
    if row.has_two_ropes:
        new["rope_parameters"] = {FULL: scaling, SLIDING: {"rope_type": "default", "rope_theta": 50.0}}
    if "layer_types" in row.read_keys and row.sliding:
        new["layer_types"] = TYPES
    return {"rope_scaling": old, "rope_parameters": new}


def variants(file, table):
    words = ("",) if table == "rope_scaling" else ("rope", "rotary", "layer", "sliding", "position", "head_dim")
    for key in file.keys() | VALUES.keys():  # the rest of the two files is the same
        if not any(word in key for word in words):
            continue
        if key != "model_type":
            yield f"without {key}", {name: value for name, value in file.items() if name != key}
        for value in VALUES.get(key, ()):
            yield f"{key} = {value}", {**file, key: value}
    for value in TABLES:
        yield f"{table} = {value}", {**file, table: value}
    places = [(table,), *((table, kind) for kind in (FULL, SLIDING) if kind in file.get(table, {}))]
    for place in places:
        for key, values in ROPE_VALUES.items():
            for value in values:
                changed = copy.deepcopy(file)
                inner = changed
                for name in place:
                    inner = inner.setdefault(name, {})
                inner[key] = value
                yield f"{'.'.join(place)}: {key} = {value}", changed


def read_attributes(config):
    """Return transformers' logits and the attributes of its configuration that building and running it read."""
    found, cls = set(), type(config)

    class Watched(cls):
        def __getattribute__(self, name):
            found.add(cls.attribute_map.get(name, name))
            return super().__getattribute__(name)

    config.__class__ = Watched
    logits = logits_of(config)[1]
    return logits, found


def logits_of(config):
    with NoFloat32():
        model = make_model(config)
        with torch.no_grad():
            return model, model(input_ids=IDS, use_cache=False).logits


def our_logits(model, config):
    ours = Decoder(config).double()
    ours.load_state_dict(our_tensors(model.state_dict(), config), strict=not config.tie_word_embeddings)
    if config.tie_word_embeddings:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    with torch.no_grad():
        return ours(IDS)


def is_close(ours, theirs):
    return ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def make_theirs(values):
    """Return transformers' configuration of a file; None where it refuses it."""
    cls = transformers.CONFIG_MAPPING[values["model_type"]]
    try:
        return cls.from_dict(json.loads(json.dumps(values)))
    except Exception:  # noqa: BLE001 (errors of any class)
        return None


def read_ours(values):
    try:
        return config_from_hf(values)
    except ModelError:
        return None


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_means_what_it_means_to_transformers(family, table):
    file = files(family)[table]
    base = make_theirs(file)
    attributes = dict(vars(base))
    base_logits, read = read_attributes(base)
    our_base = config_from_hf(file)
    wrong = [] if is_close(our_logits(logits_of(make_theirs(file))[0], our_base), base_logits) else ["the file itself"]
    for name, values in variants(file, table):
        theirs = make_theirs(values)
        ours = read_ours(values)
        if ours is None or theirs is None:
            continue
        changed = {key for key in attributes.keys() | vars(theirs) if attributes.get(key) != vars(theirs).get(key)}
        if ours == our_base and not changed & read:
            continue
        try:
            model, logits = logits_of(theirs)
        except Exception:  # noqa: BLE001 (as above)
            continue
        try:
            is_same = is_close(base_logits if ours == our_base else our_logits(model, ours), logits)
        except (KeyError, RuntimeError):  # other tensors
            is_same = False
        wrong += [] if is_same else [name]
    assert wrong == []
