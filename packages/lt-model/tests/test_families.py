"""Every family against transformers' own modules in float64: logits, every gradient, configurations, generation."""

import json
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from family_models import CASES, SHAPE, NoFloat32, make_config, make_model, our_tensors  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lt_model import (  # noqa: E402  # noqa: E402
    PRESETS,
    Decoder,
    ModelConfig,
    ModelError,
    config_from_hf,
    config_to_hf,
    generate,
    generate_batch,
    linear_label_scores,
    param_specs,
    preset,
)
from lt_model.config import LayerKind  # noqa: E402
from lt_model.decoder import KVCache  # noqa: E402
from lt_model.families import COMMON_IGNORED, COMMON_REQUIRED, DROPOUTS, FAMILIES  # noqa: E402
from lt_model.hf import check_trainable  # noqa: E402

N_ROWS, N_TOKENS = 2, 40
DEEPSEEK = {
    **{"family": "deepseek_v3", "kv_rank": 512, "nope_width": 64, "rope_width": 64, "value_width": 64},
    **{"n_experts": 8, "experts_per_token": 3, "expert_size": 32, "shared_expert_size": 32},
    **{"router_score": "sigmoid", "selection_bias": True, "layers": (LayerKind(experts=True),)},
}
GPT_OSS = {
    **{"family": "gpt_oss", "sinks": True, "expert_bias": True, "normalize_top_k": True, "glu_limit": 7.0},
    **{"head_dim": 64, "n_experts": 8, "experts_per_token": 3, "expert_size": 2072, "sliding_window": 8},
    **{"layers": (LayerKind(sliding=True, experts=True), LayerKind(experts=True))},
}
FAMILY_CASES = {family: case for case, (family, _) in CASES.items()}


def relative(ours, theirs):
    """max|difference| / max|reference|; a zero tensor must be zero in both."""
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    return difference / largest if largest else difference


def our_model(theirs, config, attention="auto"):
    """Our model with the weights of transformers', checked against the parameter table."""
    with torch.device("meta"):
        ours = Decoder(config, attention=attention)
    trained = [(spec.name, spec.shape) for spec in param_specs(config) if spec.is_trained]
    assert [(name, tuple(p.shape)) for name, p in ours.named_parameters()] == trained
    buffers = [(spec.name, spec.shape) for spec in param_specs(config) if not spec.is_trained]
    assert [(name, tuple(p.shape)) for name, p in ours.named_buffers()] == buffers
    state = {name: tensor.detach().clone() for name, tensor in our_tensors(theirs.state_dict(), config).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    ours.load_state_dict(state, assign=True)
    ours.requires_grad_()
    if config.tie_word_embeddings:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    return ours


def batch():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SHAPE["vocab_size"], (N_ROWS, N_TOKENS), generator=generator) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_transformers(case):
    """The chunked loss and the logits, by the default attention and by the formula; scores and greedy generation."""
    ids, labels = batch()
    with NoFloat32():
        theirs = make_model(make_config(case))
        logits = theirs(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
    assert logits.dtype == torch.float64
    config = config_from_hf(theirs.config.to_dict())
    wanted = our_tensors({name: p.grad for name, p in (*theirs.named_parameters(), *theirs.named_buffers())}, config)
    for attention in ("auto", "reference"):
        ours = our_model(theirs, config, attention)
        assert relative(ours(ids), logits) < 1e-12
        found = ours(ids, labels_BT=labels)
        assert abs(found.item() / loss.item() - 1) < 1e-12
        found.backward()
        worst = {name: relative(p.grad, wanted[name]) for name, p in ours.named_parameters()}
        assert max(worst.values()) < 1e-10, max(worst.items(), key=lambda item: item[1])
    ours = our_model(theirs, config)
    scores = linear_label_scores(ours.hidden_states(ids), ours.lm_head.weight, labels, softcap=config.logits_softcap)
    assert relative(scores.log_probs, logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]) < 1e-11
    prompt = ids[0, :11].tolist()  # beyond a window while it generates
    new = generate(ours, prompt, max_new_tokens=8, temperature=0)
    for count in range(8):
        assert ours(torch.tensor([prompt + new[:count]]))[0, -1].argmax() == new[count]


def test_gemma_in_bfloat16_is_rounded_as_in_transformers():
    """The scale of the embeddings is a bfloat16 number, and 1 + w of a norm is not."""
    ids, seen = batch()[0], []
    theirs = make_model(make_config("gemma2, softcaps")).bfloat16()
    ours = our_model(theirs, config_from_hf(theirs.config.to_dict()))
    ours.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        first, *_ = theirs(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        ours(ids)
        normed = ours.blocks[0].input_layernorm(first), theirs.model.layers[0].input_layernorm(first)
    assert torch.equal(seen[0], first)
    assert (normed[0] == normed[1]).double().mean() > 0.99  # sums of squares are rounded in another order


@pytest.mark.parametrize("case", CASES)
def test_generation_with_a_cache_is_that_of_transformers(case):
    """Logits of tokens that continue a cache, in parts of any length; greedy, a batch of prompts of several lengths."""
    ids, _ = batch()
    prompts = [ids[row, :length].tolist() for row, length in ((0, 5), (1, 17))]
    with NoFloat32():
        theirs = make_model(make_config(case))
        logits = theirs(input_ids=ids, use_cache=False).logits
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
        whole = [theirs.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    ours = our_model(theirs, config_from_hf(theirs.config.to_dict()))
    caches = [KVCache(N_TOKENS) for _ in range(ours.config.n_layers)]
    with torch.no_grad():
        for first, end in pairwise((0, 11, 12, 13, 30, N_TOKENS)):
            found = ours.logits(ours.hidden_states(ids[:, first:end], caches=caches))
            assert relative(found, logits[:, first:end]) < 1e-12
    new_ids = generate_batch(
        ours, prompts, max_new_tokens=6, temperature=0, seeds=range(2), is_finished=lambda row, new_ids: False
    )
    assert [prompt + new for prompt, new in zip(prompts, new_ids, strict=True)] == whole


@pytest.mark.parametrize("case", ["mistral, window 7, head 16", "gemma2, softcaps", "olmo3, yarn in full layers"])
@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa", "split"])
def test_windows_stay_within_documents(case, attention):
    config = config_from_hf(make_config(case).to_dict())
    if attention in ("sdpa", "split") and config.attention_softcap:
        with pytest.raises(
            ModelError, match=r"attention_softcap = 5\.0 .* by attention = '\w+' \(take auto, reference"
        ):
            Decoder(config, attention=attention)
        return
    ids, _ = batch()
    with NoFloat32():
        ours = our_model(make_model(make_config(case)), config, attention)
    doc_ids = torch.tensor([[0] * 22 + [1] * 18, [0] * 40])
    whole = ours(ids, doc_ids_BT=doc_ids, position_ids_BT=torch.arange(40).expand(2, -1))
    apart = ours(ids[:1, 22:], position_ids_BT=torch.arange(22, 40)[None])
    torch.testing.assert_close(whole[:1, 22:], apart, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(whole[1:], ours(ids[1:]), rtol=1e-11, atol=1e-11)
    changed = ids.clone()
    changed[1, 0] = (ids[1, 0] + 1) % 101
    reach = 1 + config.n_layers * (config.sliding_window - 1)
    if not any(not kind.sliding for kind in config.layers) and reach < 40:
        assert torch.equal(ours(changed)[1, reach:], ours(ids)[1, reach:])
    assert not torch.equal(ours(changed)[1, reach - 1], ours(ids)[1, reach - 1])


@pytest.mark.parametrize("window", [0, 1, 3, 9, 40])
def test_masks_of_kernels_for_gpus_have_the_window_of_the_dense_one(window):
    """What flex and flash-attn are given, without the kernels: pairs that are seen, and how far back."""
    from lt_model.documents import DocumentBoundaries, varlen_metadata
    from lt_model.flex import flex_mask
    from lt_model.sdpa import document_bias

    doc_ids = torch.tensor([[0] * 7 + [1] * 13, [0] * 20])
    boundaries, cpu = DocumentBoundaries.from_doc_ids(doc_ids), torch.device("cpu")
    wanted = document_bias(boundaries, cpu, torch.float64, window)[:, 0] == 0
    rows, queries, keys = torch.meshgrid(torch.arange(2), torch.arange(20), torch.arange(20), indexing="ij")
    assert torch.equal(flex_mask(boundaries, cpu, window).mask_mod(rows, torch.zeros(()), queries, keys), wanted)
    furthest = (queries - keys)[wanted].max().item()
    options = varlen_metadata(boundaries, cpu, window).kernel_options
    if window:
        assert options == {"window_size": (window - 1, 0)}
        assert furthest == min(window, 20) - 1
    else:
        assert options == {}


def test_a_window_costs_time_linear_in_the_row():
    """On a CPU, 8 windows take 8 calls of w queries over at most 2 w keys: FLOPs at T = 8 w and at 16 w."""
    from torch.utils.flop_counter import FlopCounterMode

    from lt_model.attention import BACKENDS

    def flops(n_tokens):
        backend = BACKENDS["auto"]
        q, k = torch.randn(1, n_tokens, 2, 8), torch.randn(1, n_tokens, 1, 8)
        mask = backend.make_mask(None, q.device, q.dtype, 16, (1, n_tokens, n_tokens))
        with FlopCounterMode(display=False) as counter:
            backend.attend(q, k, k, mask)
        return counter.get_total_flops()

    if not flops(128):
        pytest.skip(f"torch {torch.__version__} counts no FLOPs of a CPU's fused attention")
    assert flops(256) / flops(128) < 2.2


@pytest.mark.parametrize(
    "case", [case for case, (family, _) in CASES.items() if "n_experts" not in FAMILIES[family].keys]
)
def test_costs_are_what_torch_counts(case):
    """Parameters and FLOPs as `lt model show` prints them; rows shorter than every window, torch counts no experts."""
    from torch.utils.flop_counter import FlopCounterMode

    from lt_model.describe import describe_model, format_description

    config, n_tokens = config_from_hf(make_config(case).to_dict()), 5
    model = Decoder(config, attention="reference").double()
    ids = torch.arange(2 * n_tokens).view(2, n_tokens)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    facts = describe_model(config, seq_len=n_tokens)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    small = sum(spec.numel for spec in param_specs(config) if spec.type in ("norm", "bias") and spec.is_trained)
    counted = counter.get_total_flops() / ids.numel()
    assert counted == pytest.approx(facts["flops_per_token"]["full"] - 6 * small, rel=1e-12)
    assert f"family                   {config.family}" in format_description(config, seq_len=n_tokens)


@pytest.mark.parametrize("case", CASES)
def test_configurations_are_read_and_written_as_transformers_does(case):
    theirs = make_config(case)
    config = config_from_hf(theirs.to_dict())
    written = config_to_hf(config)
    assert config_from_hf(json.loads(json.dumps(written))) == config
    again = type(theirs).from_dict(dict(written))
    assert config_from_hf(again.to_dict()) == config
    keys = type(theirs)().to_dict().keys() - COMMON_IGNORED - FAMILIES[config.family].ignored
    keys -= set() if config.sliding_window else {"max_window_layers"}
    ours, want = ({key: one.to_dict()[key] or None for key in keys} for one in (again, theirs))
    for rope in (ours["rope_parameters"], want["rope_parameters"]):
        for one in (rope.get("full_attention", rope), rope.get("sliding_attention", rope)):
            for name in ("truncate", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale"):
                one.pop(name, None)
            one.pop("attention_factor", None)  # where mscale has another spelling
            one.setdefault("partial_rotary_factor", 1.0)
    assert ours == want
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    old = {k: v for k, v in written.items() if k not in ("rope_parameters", "layer_types", "no_rope_layers")}
    if config.family == "olmo3":  # transformers 5 gives an old rope_theta to the full layers only, 4.57 to all
        with pytest.raises(ModelError, match=r"rope_theta = 100\.0 of olmo3: versions of transformers differ"):
            config_from_hf(old)
        return
    assert config_from_hf(old) == config
    assert config_from_hf(type(theirs).from_dict(dict(old)).to_dict()) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(family):
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    silent = {"model_type": family, **{key: SHAPE[key] for key in sizes}, "num_hidden_layers": 30}
    row = FAMILIES[family]
    counts = {"n_experts": 16, "experts_per_token": 4}
    silent |= {row.keys[name]: count for name, count in counts.items() if name in row.keys}
    silent |= {key: 24 for name, key in row.keys.items() if name in ("expert_size", "shared_expert_size")}
    silent |= {"num_key_value_heads": 32} if "kv_rank" in row.keys else {}  # as many as heads
    silent["intermediate_size"] = silent.get("intermediate_size", 72)
    silent |= {"num_attention_heads": 32, "hidden_size": 512}  # a multiple of every default of num_key_value_heads
    want = transformers.AutoConfig.for_model(**silent).to_dict()
    if "head_dim" not in row.keys:
        want.pop("head_dim", None)
    assert config_from_hf(silent) == config_from_hf(want)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_stands_in_one_list(family):
    row, theirs = FAMILIES[family], transformers.AutoConfig.for_model(family)
    lists = {
        "read": row.read_keys,
        "ignored": COMMON_IGNORED | row.ignored,
        "required": {*COMMON_REQUIRED, *row.required, *DROPOUTS},
    }
    found = {key: [name for name, keys in lists.items() if key in keys] for key in theirs.to_dict()}
    assert {key: names for key, names in found.items() if len(names) != 1} == {}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models_that_transformers_builds(name):
    config = PRESETS[name]
    assert config_from_hf(config_to_hf(config)) == config
    with torch.device("meta"):
        theirs = getattr(transformers, FAMILIES[config.family].architecture)(
            transformers.AutoConfig.for_model(**{k: v for k, v in config_to_hf(config).items() if k != "architectures"})
        )
    trained = sum(spec.numel for spec in param_specs(config) if spec.is_trained)
    assert sum(p.numel() for p in theirs.parameters()) == trained


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "of llama: rope_type = 'longrope' is not supported",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is not supported"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv = 8.0 of llama is not supported"),
        ("gpt_oss, window 6", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 of gpt_oss is not supported"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("llama", {"model_type": "falcon"}, "model_type = 'falcon': unknown; the families are llama, mistral"),
        ("phi3, partial", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling = .*family = 'phi3'"),
        ("gemma2, softcaps", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true of gemma2"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = 0: family = 'gemma3_text' cannot do without"),
        ("qwen2, window from layer 2", {"layer_types": ["full_attention"]}, "layer_types = .* must be 4 of full"),
    ],
)
def test_what_is_not_supported_is_named_with_its_family(case, changes, message):
    values = {**config_to_hf(config_from_hf(make_config(case).to_dict())), "rope_scaling": None, **changes}
    if "rope_parameters" not in changes:
        del values["rope_parameters"]
    with pytest.raises(ModelError, match=f"^dir/config.json: .*{message}"):
        config_from_hf(values, "dir/config.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "head"}, "qk_norm = 'head': a model of family = 'llama' has 'none'"),
        ({"family": "qwen2", "qkv_bias": False}, "qkv_bias = False: a model of family = 'qwen2' has True"),
        ({"family": "gpt"}, "family = 'gpt': not one of llama, mistral"),
        ({"qkv_bias": True}, "o_bias and qkv_bias differ|qkv_bias and o_bias differ"),
        ({"sliding_window": 4}, "sliding_window = 4: no layer of this model has a window"),
        ({"layers": (LayerKind(rope=False),)}, "layers = .* have rotary positions"),
        ({"layers": ()}, "must be LayerKinds"),
        ({"family": "mistral", "rotary_fraction": 0.5}, "rotary_fraction = 0.5: a model of family = 'mistral'"),
        ({"family": "phi3", "rotary_fraction": 0.02}, "it must be an even number"),
        (
            {"family": "olmo2", "qk_norm": "full", "norm_place": "post", "head_dim": 32},
            "head_dim = 32: family = 'olmo2'",
        ),
        (DEEPSEEK | {"n_kv_heads": 6}, "n_kv_heads = 6: latent attention has as many as n_heads = 12"),
        (DEEPSEEK | {"rope_width": 3}, "rope_width = 3: 3 of a head's 67 numbers"),
        (DEEPSEEK | {"value_width": 0}, "value_width = 0: must be at least 1 for kv_rank = 512"),
        (DEEPSEEK | {"kv_rank": 0, "head_dim": 64}, "nope_width = 64: must be 0 for kv_rank = 0"),
        (DEEPSEEK | {"n_groups": 3}, "n_groups = 3: n_experts = 8 must be equal groups of at least 2"),
        (DEEPSEEK | {"n_groups": 8}, "n_groups = 8: n_experts = 8 must be equal groups of at least 2"),
        (DEEPSEEK | {"n_groups": 4}, "top_groups = 1: must be at most n_groups = 4, and have experts_per_token = 3"),
        (DEEPSEEK | {"shared_expert_size": 40}, "shared_expert_size = 40: must be a multiple of expert_size = 32"),
        (DEEPSEEK | {"layers": (LayerKind(experts=True), LayerKind())}, "those without experts are the first"),
        (
            DEEPSEEK | {"router_score": "softmax"},
            "router_score = 'softmax': a model of family = 'deepseek_v3' has 'sig",
        ),
        (GPT_OSS | {"glu_limit": 0.0}, "glu_limit = 0.0: family = 'gpt_oss' clamps its experts"),
        (GPT_OSS | {"layers": (LayerKind(sliding=True, experts=True), LayerKind())}, "'gpt_oss' are all alike"),
        (GPT_OSS | {"expert_bias": False}, "expert_bias = False: a model of family = 'gpt_oss' has True"),
        ({"sinks": True}, "sinks = True: a model of family = 'llama' has False"),
        ({"logits_softcap": -1.0}, "logits_softcap = -1.0: must be a finite number greater than 0"),
    ],
)
def test_what_a_family_cannot_express_is_refused_when_the_config_is_made(fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig(**{"vocab_size": 100, **fields})


def test_dropout_is_refused_for_training_alone():
    values = {**config_to_hf(PRESETS["pythia-160m"]), "hidden_dropout": 0.1, "classifier_dropout": 0.1}
    assert config_from_hf(values) == PRESETS["pythia-160m"]
    with pytest.raises(ModelError, match=r"hidden_dropout = 0\.1: lt trains without dropout; .* hidden_dropout = 0 as"):
        check_trainable(values)
    check_trainable({**values, "hidden_dropout": 0.0})


def test_more_layers_repeat_a_pattern_and_plain_lists_are_refused():
    deeper = preset("smollm3-3b", n_layers=41)
    assert [index for index in range(41) if deeper.rope(index) is None] == list(range(3, 41, 4))
    assert all(preset("smollm3-3b", n_layers=3).rope(index) for index in range(3))
    assert [preset("gemma3-1b", n_layers=8).window(index) for index in range(8)] == [512] * 5 + [0] + [512] * 2
    assert preset("gemma3-1b", n_layers=2).layers == (LayerKind(sliding=True),)
    config = config_from_hf(make_config("qwen2, window from layer 2").to_dict())
    assert [config.window(index) for index in range(4)] == [0, 0, 5, 5]
    from lt_model.presets import override

    with pytest.raises(ModelError, match="n_layers = 6: the model lists the kinds of its 4 layers one by one"):
        override(config, n_layers=6)
    for n_layers in (2, 40):
        wanted = [False] + [True] * (n_layers - 1)
        moonlight = preset("moonlight-16b-a3b", n_layers=n_layers)
        assert [moonlight.layer(index).experts for index in range(n_layers)] == wanted
    assert override(PRESETS["qwen3-8b"], hidden_size=2048).head_width == 128
    assert override(PRESETS["llama3-8b"], hidden_size=2048).head_width == 64


def test_optimizer_decay_role_and_std_of_every_kind_of_tensor():
    """What the table says of each family's tensors; `pytest -s` prints it."""
    pytest.importorskip("lt_trainer")
    from lt_trainer.optimizers.muon import MUON
    from lt_trainer.optimizers.spec import ROLES

    configs = {family: config_from_hf(make_config(case).to_dict()) for family, case in FAMILY_CASES.items()}
    lines = {}
    for family, config in configs.items():
        for spec in param_specs(config):
            init = spec.init if isinstance(spec.init, str) else f"{spec.init:.4f}"
            optimizer, decay = MUON.for_params([spec]).name, "decay" if spec.decay else "-"
            name = f"{spec.kind}.{spec.name.rpartition('.')[2]}"
            lines.setdefault(f"{name}: {optimizer} {decay} {ROLES[spec.type]} {init}", set()).add(family)
    print("\n".join(f"{line:<70} {', '.join(sorted(families))}" for line, families in sorted(lines.items())))  # noqa: T201

    def families(is_so):
        return {family for family, config in configs.items() if is_so(config)}

    def std(config, is_deep=False):
        return f"{config.init_std / (2 * config.n_layers) ** 0.5 if is_deep else config.init_std:.4f}"

    found = {}
    for line, owners in lines.items():
        name, _, rest = line.partition(": ")
        for family in owners:
            found.setdefault(name, {}).setdefault(family, set()).add(rest)
    for name in ("q_proj", "k_proj", "v_proj"):
        plain = {f: c for f, c in configs.items() if not c.kv_rank}
        assert found[f"{name}.weight"] == {f: {f"muon decay matrices {std(c)}"} for f, c in plain.items()}
    latents = [found[f"{name}.weight"] for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    assert latents == [{"deepseek_v3": {"muon decay matrices 0.0200"}}] * 4
    assert found["o_proj.weight"] == {
        f: {f"muon decay matrices {std(c, is_deep=c.norm_place == 'pre')}"} for f, c in configs.items()
    }
    for name, is_deep in (("up_proj", False), ("down_proj", True)):  # of feed-forward layers and of experts
        lines = {f: {f"muon decay matrices {std(c, is_deep and c.norm_place == 'pre')}"} for f, c in configs.items()}
        assert found[f"{name}.weight"] == {
            f: one for f, one in lines.items() if f not in ("mixtral", "olmoe", "gpt_oss")
        }
        assert found[f"{name}.{name}"] == {f: one for f, one in lines.items() if configs[f].has_experts}
    router = "adamw decay matrices 0.0200"
    assert found["gate.weight"] == {f: {router} for f in families(lambda config: config.has_experts)}
    assert found["shared_expert_gate.weight"] == {"qwen2_moe": {router}}
    assert found["embed_tokens.weight"] == {f: {f"adamw - embedding {std(c)}"} for f, c in configs.items()}
    assert found["lm_head.weight"] == {
        f: {f"adamw decay head {std(c)}"} for f, c in configs.items() if not c.tie_word_embeddings
    }
    plus_one = families(lambda config: config.norm == "rms_plus_one")
    assert plus_one == {"gemma2", "gemma3_text"}
    for name in found:
        if name.endswith("norm.weight"):
            assert found[name] == {f: {f"adamw - norm {'zeros' if f in plus_one else 'ones'}"} for f in found[name]}
        if name.endswith(".bias"):
            assert found[name] == {family: {"adamw - norm zeros"} for family in found[name]}
    assert found["q_norm.weight"].keys() == families(lambda config: config.qk_norm != "none")
    assert found["input_layernorm.bias"].keys() == families(lambda config: config.norm == "layer")
    assert found["q_proj.bias"].keys() == families(lambda config: config.qkv_bias and not config.kv_rank)
