"""Losses that balance experts: by the formula from the logits of routers, in one graph, the same with recomputation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lt_trainer_gpu", reason="the engine for GPUs adds these losses, and it is not installed")

from lt_model import Decoder, ModelConfig, config_from_hf
from lt_model.describe import alignment_warnings
from lt_model.feed_forward import MoE
from lt_test_helpers import layouts
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load, model_config
from lt_trainer.config.section import unflatten
from lt_trainer.config.sections import MoeOptions, Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.balancing import Balance, BalancedRouter
from lt_trainer_gpu.checks import DeviceFacts, check_device, check_recipe

ROWS, SEQ_LEN, VOCAB = 4, 16, 61
CONFIG = config_from_hf(
    {
        **{"model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_only_layers": [1]},
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": SEQ_LEN},
    }
)
SIGMOID = config_from_hf(
    {
        **{"model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        **{"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24},
    }
)
AUX, ROW_AUX, Z = 0.3, 0.2, 0.05
LOSSES = (f"moe.aux_loss={AUX}", f"moe.sequence_aux_loss={ROW_AUX}", f"moe.router_z_loss={Z}")


def train(
    *sets: str, config: ModelConfig = CONFIG, micro_batch_size: int = 2
) -> tuple[Any, Any, dict[str, torch.Tensor], Any]:
    """A step by the engine: the batch's part in micro-batches, weights before it, gradients, metrics."""
    model = unflatten(architecture_values(config))
    engine = layouts.open_engine(*sets, "optimizer.grad_clip=0", model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    (batch,) = layouts.global_batches(1, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    part = layouts.rank_batch(batch, engine, micro_batch_size)
    groups = {"weights": {}, "exp_avg": {}}
    for step in range(2):
        for shard in engine.state().shards:
            if (shard.group == "weights") == (step == 0) and shard.group in groups and shard.dtype == "F64":
                values = torch.from_numpy(shard.bytes().view(np.float64).reshape(shard.shape).copy())
                groups[shard.group][shard.name] = values
        if step == 0:
            engine.validate([part])  # counts nothing
            engine.score(part)
            (metrics,) = engine.fetch_metrics([engine.step(part, 0.0)])
    engine.close()
    return part, groups["weights"], {name: 10 * moment for name, moment in groups["exp_avg"].items()}, metrics


def balancing_loss(logits: torch.Tensor, is_sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices of tokens as ones, E / K * sum(f * P), and the logits."""
    chosen = torch.nn.functional.one_hot(logits.topk(2).indices, 6).sum(1).double()
    scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if is_sigmoid else logits.softmax(1)
    return chosen, 6 / 2 * (chosen.mean(0) * scores.mean(0)).sum(), logits


def by_formula(
    config: ModelConfig, part: Any, weights: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Gradients of the step's loss, busiest over mean expert, and auxiliary losses, from the inputs of routers."""
    model, is_sigmoid = Decoder(config).double(), config.router_score == "sigmoid"
    model.load_state_dict(weights, strict=False)  # the selection bias, which is zeros, is not trained
    inputs: list[torch.Tensor] = []
    mixtures = [block.mlp for block in model.model.layers if isinstance(block.mlp, MoE)]
    for moe in mixtures:
        moe.gate.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    total, counts, aux_losses = torch.zeros((), dtype=torch.float64), [0] * len(mixtures), [0.0] * len(mixtures)
    for ids, labels, positions, docs in zip(part.input_ids, part.labels, part.position_ids, part.doc_ids, strict=True):
        inputs.clear()
        arrays = (torch.from_numpy(one.astype(np.int64)) for one in (ids, labels, positions, docs))
        ids_BT, labels_BT, positions_BT, docs_BT = arrays
        loss = model(ids_BT, labels_BT=labels_BT, position_ids_BT=positions_BT, doc_ids_BT=docs_BT)
        total = total + loss / part.valid_tokens
        for index, (moe, x_ND) in enumerate(zip(mixtures, inputs, strict=True)):
            logits_BTE = (x_ND @ moe.gate.weight.T).unflatten(0, labels_BT.shape)
            chosen, aux, logits = balancing_loss(logits_BTE[labels_BT != -100], is_sigmoid)
            rows = [
                balancing_loss(row[own != -100], is_sigmoid)[1] for row, own in zip(logits_BTE, labels_BT, strict=True)
            ]
            losses = AUX * aux + ROW_AUX * sum(rows) / len(rows) + Z * logits.logsumexp(1).square().mean()
            total = total + losses / len(part.input_ids)
            counts[index] = counts[index] + chosen.sum(0)
            aux_losses[index] += aux.item() / len(part.input_ids)
    total.backward()
    loads = [(one.max() / one.mean()).item() for one in counts]
    return {name: parameter.grad for name, parameter in model.named_parameters()}, loads, aux_losses


@pytest.mark.parametrize(
    ("config", "checkpointing"),
    [(CONFIG, "none"), (CONFIG, "selective"), (CONFIG, "full"), (SIGMOID, "none")],
    ids=["softmax", "selective", "full", "sigmoid"],
)
def test_the_losses_are_those_of_the_formula(config: ModelConfig, checkpointing: str) -> None:
    sets = (*LOSSES, f"engine.gpu.activation_checkpointing={checkpointing}")
    part, weights, gradients, metrics = train(*sets, config=config)
    wanted, loads, aux_losses = by_formula(config, part, weights)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        largest = wanted[name].abs().max()
        assert ((gradient - wanted[name]).abs().max() / largest).item() < 1e-10, name
    assert metrics.experts.load == pytest.approx(loads, rel=1e-6)
    assert metrics.experts.aux_loss == pytest.approx(aux_losses, rel=1e-6)
    assert metrics.experts.idle == (0, 0)


def test_without_weights_the_losses_change_nothing() -> None:
    (_, _, off, metrics), (_, _, on, _) = train("moe.aux_loss=0"), train(*LOSSES)
    assert metrics.experts.aux_loss[0] > 0.9
    assert not torch.equal(off["model.layers.0.mlp.gate.weight"], on["model.layers.0.mlp.gate.weight"])
    _, _, also_off, _ = train("moe.aux_loss=0", "engine.gpu.activation_checkpointing=full")
    assert all(torch.equal(off[name], also_off[name]) for name in off)


def test_a_balanced_router_is_one_graph_for_all_micro_batches() -> None:
    moe, graphs = MoE(CONFIG), []
    moe.gate.__class__ = BalancedRouter
    moe.gate.balance = Balance(options=MoeOptions(sequence_aux_loss=0.1))
    moe.gate.load = torch.zeros(7, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, backend=lambda module, inputs: graphs.append(module) or module)
    for n_micro_batches in (1, 2, 3):
        labels = torch.randint(-100, -95, (2, 8))
        moe.gate.balance.begin_pass(labels, n_micro_batches)
        compiled(torch.randn(2, 8, 32)).sum().backward()
        assert moe.gate.load.grad[:-1].sum() == 2 * (labels != -100).sum()
        moe.gate.load.grad = None
    assert len(graphs) == 1


def test_a_model_without_experts_refuses_their_options() -> None:
    recipe = load(
        base={"data": {"synthetic": True}, "model": {"vocab_size": 64}}, overrides=["moe.aux_loss=0.1"]
    ).recipe
    with pytest.raises(RecipeError, match=r"moe.aux_loss = 0.1.*: this model has no experts; remove it"):
        model_config(recipe, 64)


def test_widths_that_the_grouped_kernel_does_not_take_are_refused_on_a_gpu() -> None:
    base = {"data": {"synthetic": True, "seq_len": 64}, "model": {"vocab_size": 64, "preset": "tiny-30m-a9m"}}
    facts = DeviceFacts(type="cuda", torch_version="2.15.0")

    def recipe(*sets: str) -> Recipe:
        return load(base=base, overrides=["model.n_heads=2", "model.n_kv_heads=2", *sets]).recipe

    narrow = recipe("parallel.tp=4", "parallel.ep=2", "model.hidden_size=252")
    check_device(narrow, DeviceFacts(type="cpu", torch_version="2.15.0"))
    check_device(narrow, replace(facts, dtype="float32"))
    with pytest.raises(RecipeError, match=r"^model.hidden_size = 252: .* in bfloat16 of 8; set .* multiple of 8$"):
        check_device(narrow, facts)
    problem = r"^parallel.tp = 32, parallel.ep = 1: a rank has 12 of expert_size = 384.*or use parallel.ep$"
    with pytest.raises(RecipeError, match=problem):
        check_device(recipe("parallel.tp=32"), facts)
    check_device(recipe("parallel.tp=32", "parallel.ep=2"), facts)


def test_an_unused_width_does_not_limit_tensor_parallelism() -> None:
    """All layers of tiny-30m-a9m are experts: an intermediate size is in none of them."""
    base = {"data": {"synthetic": True, "seq_len": 64}, "model": {"vocab_size": 64, "preset": "tiny-30m-a9m"}}
    recipe = load(base=base, overrides=["parallel.tp=2", "model.intermediate_size=1023"]).recipe
    check_recipe(recipe, World(size=2, local_size=2))
    assert [text for text in alignment_warnings(model_config(recipe, 64)) if "1023" in text] == []
