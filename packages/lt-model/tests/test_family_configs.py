"""Random shapes of every family through config.json: ours both ways, and transformers' own reading of what we write."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lt_model import PRESETS, ModelConfig, ModelError, RopeScaling, config_from_hf, config_to_hf
from lt_model.config import CHOICES, LayerKind
from lt_model.families import COMMON_IGNORED, COMMON_REQUIRED, FAMILIES

transformers = pytest.importorskip("transformers")

SCALINGS = st.one_of(
    st.none(),
    st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1, 40)),
    st.builds(
        RopeScaling,
        kind=st.just("llama3"),
        factor=st.floats(1, 40),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 9),
        original_max_position_embeddings=st.integers(1, 9999),
    ),
    st.builds(
        RopeScaling,
        kind=st.just("yarn"),
        factor=st.floats(1, 40),
        beta_slow=st.floats(0.5, 2),
        beta_fast=st.floats(3, 40),
        truncate=st.booleans(),
        magnitude=st.sampled_from([0.0, 1.0, 1.3]),
        original_max_position_embeddings=st.integers(1, 9999),
    ),
)
VALUES = {
    "tie_word_embeddings": st.booleans(),
    "parallel_residual": st.booleans(),
    "qkv_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "activation": st.sampled_from(CHOICES["activation"]),
    "norm_eps": st.floats(1e-7, 1e-2),
    "init_std": st.floats(1e-4, 1),
    "embed_scale": st.floats(0.1, 20),
    "residual_scale": st.floats(0.1, 20),
    "logits_divisor": st.floats(0.1, 20),
    "attention_softcap": st.one_of(st.just(0.0), st.floats(1, 90)),
    "logits_softcap": st.one_of(st.just(0.0), st.floats(1, 90)),
    "rotary_fraction": st.sampled_from([0.25, 0.5, 1.0]),
    "rope_scaling": SCALINGS,
    "normalize_top_k": st.booleans(),
    "router_aux_loss_coef": st.floats(1e-3, 1),
    "glu_limit": st.floats(0.1, 20),
}
"""Field to values; those that neither a key nor a rule of the family sets are left out."""


@st.composite
def configs(draw, family, largest=9, largest_vocabulary=300000):
    """A model of the family; what `ModelConfig` refuses is drawn again."""
    sizes = st.integers(1, largest)
    row = FAMILIES[family]
    fields = {name: draw(values) for name, values in VALUES.items() if name in row.keys or name in row.other_fields}
    fields["rope_scaling"] = draw(SCALINGS)
    if "o_bias" in row.keys:
        fields["o_bias"] = fields["qkv_bias"]
    is_latent = "kv_rank" in row.keys
    if is_latent:
        fields |= {name: draw(sizes) for name in ("kv_rank", "nope_width", "value_width")}
        fields |= {"rope_width": 2 * draw(sizes), "q_rank": draw(sizes) - 1, "expert_scale": draw(st.floats(0.1, 9))}
    n_kv_heads, n_layers, width = draw(sizes), draw(sizes), 2 * draw(sizes)
    n_heads = n_kv_heads * (draw(sizes) if "n_kv_heads" in row.keys and not is_latent else 1)
    head_dim = width if "head_dim" in row.keys and draw(st.booleans()) else 0
    hidden_size = draw(sizes) * (n_heads if row.has_whole_heads else 1) if head_dim else n_heads * width
    window = draw(st.sampled_from([0, 1, 7, 4096])) if row.sliding else 0
    slides = draw(st.lists(st.booleans(), min_size=n_layers, max_size=n_layers)) if window else [False] * n_layers
    if row.sliding == "all":
        slides = [window > 0] * n_layers
    ropes = draw(st.lists(st.booleans(), min_size=n_layers, max_size=n_layers))
    kinds = zip(slides, ropes if row.sliding == "nope" else [True] * n_layers, strict=True)
    if "attention_scale" in row.keys:
        number = draw(st.integers(1, 999))
        fields["attention_scale"] = number**-0.5 if "query_pre_attn_scalar" in row.keys.values() else number / 7
    experts = [draw(st.booleans()) if row.dense_layers else True for _ in range(n_layers)]
    experts = experts if "n_experts" in row.keys else [False] * n_layers
    inner = draw(sizes)
    if any(experts):
        fields |= {"experts_per_token": draw(sizes), "expert_size": draw(sizes) if row.dense_layers else inner}
        fields |= {"n_experts": fields["experts_per_token"] - 1 + draw(sizes)}
        fields |= {"shared_expert_size": draw(sizes)} if "shared_expert_size" in row.keys else {}
        if is_latent:
            experts = sorted(experts)
            fields["shared_expert_size"] *= fields["expert_size"]
            fields["n_groups"], n_each = draw(sizes), 1 + draw(sizes)
            fields["n_experts"] = fields["n_groups"] * n_each
            fields["top_groups"] = draw(st.integers(1, fields["n_groups"]))
            fields["experts_per_token"] = draw(st.integers(1, fields["top_groups"] * n_each))
    mixed = zip(kinds, experts, strict=True)
    fields |= {"layers": tuple(LayerKind(sliding=slide, rope=rope, experts=one) for (slide, rope), one in mixed)}
    fields |= {"sliding_window": window if any(slides) else 0}
    fields |= {"sliding_rope_theta": draw(st.floats(10, 1e7)) if row.has_two_ropes and any(slides) else 0.0}
    try:
        return ModelConfig(
            **{**fields, **row.fixed},
            family=family,
            vocab_size=draw(st.integers(1, largest_vocabulary)),
            hidden_size=hidden_size,
            intermediate_size=inner,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            n_layers=n_layers,
            head_dim=head_dim,
            max_position_embeddings=draw(st.integers(1, 999999)),
            rope_theta=draw(st.floats(10, 1e7)),
        )
    except ModelError:
        assume(False)
        raise


def compared(values, family):
    """What of transformers' to_dict decides the model."""
    return {key: value for key, value in values.items() if key not in COMMON_IGNORED | FAMILIES[family].ignored}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_shape_of_a_family_is_written_and_read(family, data):
    config = data.draw(configs(family))
    written = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(written) == config
    theirs = transformers.AutoConfig.for_model(**{k: v for k, v in written.items() if k != "architectures"})
    assert config_from_hf(theirs.to_dict()) == config
    assert theirs.pad_token_id is None  # a default of 128004 is outside of most vocabularies
    again = type(theirs).from_dict(config_to_hf(config_from_hf(theirs.to_dict())))
    assert compared(again.to_dict(), family) == compared(theirs.to_dict(), family)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def assert_same_logits(config):
    torch = pytest.importorskip("torch")
    from family_models import NoFloat32, make_model, our_tensors

    from lt_model import Decoder

    written = json.loads(json.dumps(config_to_hf(config)))
    ids = torch.arange(12)[None] % config.vocab_size
    with NoFloat32(), torch.no_grad():
        theirs = make_model(transformers.CONFIG_MAPPING[config.family].from_dict(written))
        wanted = theirs(input_ids=ids, use_cache=False).logits
    ours = Decoder(config_from_hf(written)).double()
    ours.load_state_dict(our_tensors(theirs.state_dict(), config), strict=not config.tie_word_embeddings)
    if config.tie_word_embeddings:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_gives_the_logits_of_transformers(family, data):
    assert_same_logits(data.draw(configs(family, largest=3, largest_vocabulary=50)))


LATENT = {"kv_rank": 4, "nope_width": 4, "rope_width": 2, "value_width": 6}


@pytest.mark.parametrize(
    "family", [name for name, row in FAMILIES.items() if row.dense_layers or row.sliding == "pattern"]
)
def test_a_model_without_experts_or_windows_is_written_with_valid_sizes_for_them(family):
    row = FAMILIES[family]
    fields = {**row.fixed, **(LATENT if family == "deepseek_v3" else {})}
    if family == "gpt_oss":  # which has no layers without experts
        fields |= {"n_experts": 4, "experts_per_token": 2, "expert_size": 9, "glu_limit": 7.0}
        fields["layers"] = (LayerKind(experts=True),)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 9, "n_heads": 2, "n_kv_heads": 2, "n_layers": 3}
    config = ModelConfig(**sizes, **fields, family=family)
    written = config_to_hf(config)
    assert config_from_hf(written) == config
    unread = (
        "first_k_dense_replace",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
    )
    if family == "deepseek_v3":
        assert [written[key] for key in unread] == [3, 1, 1, 1, 1]
    if row.sliding == "pattern":
        assert written["sliding_window"] == config.max_position_embeddings
    assert_same_logits(config)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_scale_that_no_whole_number_gives_is_refused(family):
    """transformers has the whole number query_pre_attn_scalar, of which the scale is 1 / sqrt."""
    fields = {**FAMILIES[family].fixed, "family": family, "vocab_size": 9}
    assert config_to_hf(ModelConfig(**fields, attention_scale=168**-0.5))["query_pre_attn_scalar"] == 168
    for scale in (0.3, 1e300, 1e-300):
        with pytest.raises(
            ModelError, match=rf"attention_scale = {re.escape(str(scale))}: family = '{family}' has 1 / sqrt"
        ):
            ModelConfig(**fields, attention_scale=scale)
    values = {**config_to_hf(PRESETS["gemma3-1b"]), "model_type": family, "query_pre_attn_scalar": 20.5}
    with pytest.raises(ModelError, match=r"query_pre_attn_scalar = 20\.5: must be a whole number"):
        config_from_hf(values)


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.has_whole_heads])
def test_where_transformers_divides_the_width_by_the_heads_it_must_divide(family):
    fields = {
        **FAMILIES[family].fixed,
        "family": family,
        "vocab_size": 9,
        "head_dim": 64,
        "n_heads": 7,
        "n_kv_heads": 7,
    }
    with pytest.raises(ModelError, match="hidden_size = 768 is not a multiple of n_heads = 7"):
        ModelConfig(**fields)


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "families.md"
WORDS = {
    ("norm", "layer"): "LayerNorm",
    ("norm", "rms_plus_one"): r"1 \+ w",
    ("norm_place", "post"): "norms after",
    ("norm_place", "both"): "norms .*before and after",
    ("qk_norm", "head"): "norm of each head",
    ("qk_norm", "full"): "norm of all heads",
    ("gated", False): "no gate",
    ("qkv_bias", True): "biases",
    ("parallel_residual", True): "parallel residual",
    ("embed_scale", 0.0): "scales",
    ("rope_scaling", None): "unscaled",
    ("sinks", True): "sinks",
    ("expert_bias", True): "router and experts",
}
"""What the page says of a field of a row that has one value or is a key: each family's line must have it."""


def lines_of_the_page():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {family: [cell.strip() for cell in cells.split("|")] for family, cells in rows}


def test_the_page_has_a_line_for_each_family():
    assert list(lines_of_the_page()) == list(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_the_row_says(family):
    row, lines = FAMILIES[family], lines_of_the_page()
    text, presets, initial, since = lines[family]
    whole = re.sub(r"as (\w+)", lambda other: lines[other[1]][0] + " " + other[0], text)
    own = {name: key for name, key in row.own_keys.items() if key is not None}
    words = [word for (name, value), word in WORDS.items() if row.fixed.get(name, "none") == value]
    words += ["window"] * bool(row.sliding) + ["part of a head"] * bool(row.partial_key) + ["fused"] * bool(row.fused)
    words += ["caps"] * ("attention_softcap" in own) + ["head width"] * ("head_dim" in own and family != "llama")
    words += ["bias"] * ("use_bias" in own.values()) + ["scales"] * ("attention_scale" in own)
    words += ["parallel residual"] * ("parallel_residual" in own) + ["gelu"] * ("gelu" in str(row.defaults))
    words += [f"{row.period - 1} of {row.period}|every {row.period}(th|nd)"] * (row.period > 1)
    for word in words:
        assert re.search(word, whole), word
    assert since == row.since
    theirs = transformers.AutoConfig.for_model(family)
    rule = "flat" if row.fixed.get("norm_place", "pre") != "pre" else "depth"
    assert initial == f"{theirs.initializer_range}; {rule}"
    named = [name for name, config in PRESETS.items() if config.family == family]
    assert presets == (str(len(named)) if family == "llama" else ", ".join(named))
    assert all(f"`{key}`" in PAGE.read_text() for key in (*row.required, *COMMON_REQUIRED))
