"""The selection bias: fp32 in every dtype; it moves once per step, by the tokens of training, not in a skipped one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lt_model import Decoder, config_from_hf, init_model
from lt_model.feed_forward import MoE, Router

ROWS, SEQ_LEN, VOCAB, RATE = 4, 16, 61, 0.25
CONFIG = config_from_hf(
    {
        **{"model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        **{"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "max_position_embeddings": 16,
        },
        **{"moe_intermediate_size": 24},
    }
)
BIASES = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]


def test_a_router_keeps_its_bias_in_fp32():
    """Where bfloat16 has 0.6, 0.601 is 0.6 too: a bias would not move."""
    router = Router(CONFIG)
    router.e_score_correction_bias.fill_(0.601)
    values = router.e_score_correction_bias.clone()
    for cast in (router.bfloat16, router.double, lambda: router.to(torch.float16)):
        cast()
        assert router.weight.dtype != torch.float32
        assert torch.equal(router.e_score_correction_bias, values)
    with torch.device("meta"):
        model = Decoder(CONFIG).to(torch.bfloat16)
    model.to_empty(device="cpu")
    init_model(model, 0)
    assert all(torch.equal(model.get_buffer(name), torch.zeros(8)) for name in BIASES)


def test_the_bias_chooses_and_weights_nothing():
    """By the formula, one token after the other; also that only the best groups take part."""
    router = Router(CONFIG).double()
    router.e_score_correction_bias.copy_(torch.linspace(-0.6, 0.6, 8)[torch.randperm(8)])
    x = torch.randn(50, 32, dtype=torch.float64) * 3
    weights, experts, *_ = router(x)
    assert len(set(map(frozenset, experts.tolist()))) > 1
    for token in range(50):
        scores = torch.sigmoid(router.weight @ x[token])
        biased = (scores + router.e_score_correction_bias).tolist()
        sums = [sum(sorted(biased[first : first + 2])[-2:]) for first in range(0, 8, 2)]
        groups = sorted(range(4), key=lambda group: -sums[group])[:2]
        wanted = sorted((e for e in range(8) if e // 2 in groups), key=lambda expert: -biased[expert])[:3]
        assert experts[token].tolist() == wanted
        torch.testing.assert_close(weights[token], 2.5 * scores[wanted] / scores[wanted].sum())


def counts_of(weights, batch):
    """Tokens with a label by layer and expert, as a model with these weights chooses."""
    model, counts = Decoder(CONFIG).double(), torch.zeros(2, 8)
    model.load_state_dict(weights)
    mixtures = [block.mlp for block in model.model.layers if isinstance(block.mlp, MoE)]
    for index, moe in enumerate(mixtures):
        moe.gate.register_forward_hook(lambda module, args, output, index=index: chosen.__setitem__(index, output[1]))
    for ids, labels, positions, docs in zip(
        batch.input_ids, batch.labels, batch.position_ids, batch.doc_ids, strict=True
    ):
        chosen: dict[int, torch.Tensor] = {}
        ids_BT, positions_BT, docs_BT = (torch.from_numpy(one.astype(np.int64)) for one in (ids, positions, docs))
        model(ids_BT, position_ids_BT=positions_BT, doc_ids_BT=docs_BT)
        for index, experts in chosen.items():
            counts[index] += torch.bincount(experts[torch.from_numpy(labels.flatten()) != -100].flatten(), minlength=8)
    return counts


@pytest.mark.parametrize("sets", [(), ("engine.gpu.activation_checkpointing=full",), ("engine.gpu.dtype=bfloat16",)])
def test_a_step_moves_the_biases_once_by_the_tokens_of_training(sets):
    pytest.importorskip("lt_trainer_gpu", reason="the engine for GPUs moves the biases, and it is not installed")
    from lt_test_helpers import layouts
    from lt_trainer.config.model_section import architecture_values
    from lt_trainer.config.section import unflatten

    model = unflatten(architecture_values(CONFIG))
    sets = (f"moe.bias_update_rate={RATE}", "optimizer.weight_decay=0.5", *sets)
    engine = layouts.open_engine(*sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)

    def weights():
        found = {}
        for one in engine.state().shards:
            if one.group == "weights":
                dtype = np.float32 if one.dtype == "F32" else np.float64
                found[one.name] = torch.from_numpy(one.bytes().view(dtype).reshape(one.shape).copy())
        assert all(found[name].dtype == torch.float32 for name in BIASES)
        return found

    before, wanted, n_idle = weights(), torch.zeros(2, 8), 0
    for batch in layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB):
        part = layouts.rank_batch(batch, engine, 2)
        if "engine.gpu.dtype=bfloat16" not in sets:  # where two scores may round to one
            counts = counts_of(before, part)
            moves = RATE * torch.sign(counts.mean(1, keepdim=True) - counts)
            wanted += moves - moves.mean(1, keepdim=True)
        engine.validate([part])
        engine.score(part)
        (metrics,) = engine.fetch_metrics([engine.step(part, 1e-2)])
        if "engine.gpu.dtype=bfloat16" not in sets:
            assert metrics.experts.idle == tuple((counts == 0).sum(1).tolist())
            n_idle += sum(metrics.experts.idle)
        before = weights()
        engine.step(replace(part, valid_tokens=0), 1e-2)  # its loss is not finite
        after = weights()
        assert all(torch.equal(after[name], before[name]) for name in before)
    found = torch.stack([after[name] for name in BIASES])
    assert found.abs().max() > 0
    if "engine.gpu.dtype=bfloat16" not in sets:
        torch.testing.assert_close(found, wanted)
        assert n_idle > 0, "experts without tokens must be among them"
    engine.close()


def test_a_rollback_restores_the_bias_and_the_steps_after_it(tmp_path):
    """In bfloat16, into the engine whose biases have moved on: the saved bits in fp32, and the same numbers again."""
    pytest.importorskip("lt_trainer_gpu", reason="the engine for GPUs moves the biases, and it is not installed")
    from lt_ckpt import Checkpoint
    from lt_test_helpers import layouts
    from lt_trainer.config.model_section import architecture_values
    from lt_trainer.config.section import unflatten

    model, sets = unflatten(architecture_values(CONFIG)), ("engine.gpu.dtype=bfloat16", "moe.bias_update_rate=0.001")
    engine = layouts.open_engine(*sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    parts = [layouts.rank_batch(one, engine, 2) for one in layouts.global_batches(4, rows=4, seq_len=16, vocab=VOCAB)]

    def biases():
        return {one.name: one.bytes().copy().view(np.float32) for one in engine.state().shards if one.name in BIASES}

    def train(steps):
        return engine.fetch_metrics([engine.step(one, 1e-2) for one in steps]), biases()

    saved = train(parts[:2])[1]
    checkpoint = Checkpoint.open(layouts.save_checkpoint(engine, str(tmp_path), step=2))
    assert all(np.array_equal(checkpoint.read("weights", name).view(np.float32), saved[name]) for name in BIASES)
    assert all(checkpoint.specs("weights")[name].dtype == "F32" and saved[name].any() for name in BIASES)
    first = train(parts[2:])
    assert all(not np.array_equal(first[1][name], saved[name]) for name in BIASES)
    engine.restore(checkpoint)
    assert all(np.array_equal(found, saved[name]) for name, found in biases().items())
    again = train(parts[2:])
    assert [(one.loss, one.grad_norm) for one in again[0]] == [(one.loss, one.grad_norm) for one in first[0]]
    assert all(np.array_equal(again[1][name], first[1][name]) for name in BIASES)
    engine.close()


def test_files_keep_the_bias_wide_and_layers_for_further_tokens_are_not_read(tmp_path):
    formats = pytest.importorskip("lt_ckpt.formats", reason="lt-ckpt converts files, and it is not installed")
    transformers = pytest.importorskip("transformers")
    from family_models import make_config, make_model
    from safetensors.torch import load_file, save_file

    model = make_model(make_config("deepseek_v3, yarn, groups")).float()
    biases = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("correction_bias")}
    assert len(biases) == 3
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    further = {"model.layers.4.mlp.gate.weight": torch.ones(8, 48), "model.layers.4.eh_proj.weight": torch.ones(48, 96)}
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    source = formats.open_source(tmp_path / "theirs")
    (sentence,) = source.fallbacks
    assert sentence.endswith("layers from number 4 on, which predict further tokens, are not read")
    for kind in ("lt", "hf"):
        formats.convert_checkpoint(source, tmp_path / kind, formats.ConvertOptions(format=kind, dtype="BF16"))
        source = formats.open_source(tmp_path / kind)
        for name, spec in source.weights.specs.items():
            assert spec.dtype == ("F32" if name in biases else "BF16"), name
            if name in biases:
                assert source.read(name).tobytes() == biases[name].numpy().tobytes()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(exported.state_dict()[name], biases[name]) for name in biases)
