"""Experts: the grouped product against a loop, one graph for all loads, costs of what a token uses, bad shapes."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from lt_model import ModelConfig, ModelError, flops_per_token, n_parameters, param_specs  # noqa: E402
from lt_model.config import LayerKind  # noqa: E402
from lt_model.costs import n_compute_parameters  # noqa: E402
from lt_model.feed_forward import MoE  # noqa: E402
from lt_model.grouped_product import grouped_product, has_grouped_kernel  # noqa: E402

SHAPE = {"vocab_size": 64, "hidden_size": 32, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "intermediate_size": 48}
EXPERTS = {"n_experts": 6, "experts_per_token": 2, "expert_size": 48, "layers": (LayerKind(experts=True),)}
OLMOE = {**SHAPE, **EXPERTS, "family": "olmoe", "qk_norm": "full"}
needs_kernel = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch before 2.10 has no grouped_mm")


@needs_kernel
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_grouped_kernel_is_the_loop(dtype, bound, monkeypatch):
    """Forward and backward, with experts that have no rows, at the start, in the middle and at the end."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(40, 32, generator=generator), torch.randn(6, 16, 32, generator=generator)
    upstream, ends = torch.randn(40, 16, generator=generator), torch.tensor([0, 7, 7, 30, 40, 40], dtype=torch.int32)
    assert has_grouped_kernel(weights.to(dtype)) == (dtype == torch.float32)  # a CPU takes the loop in bfloat16
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr("lt_model.grouped_product.has_grouped_kernel", lambda *_, has=has_kernel: has)
        x, w = (one.to(dtype).requires_grad_() for one in (rows, weights))
        y = grouped_product(x, w, ends)
        y.backward(upstream.to(dtype))
        found.append((y, x.grad, w.grad))
    for ours, loop in zip(*found, strict=True):
        assert ours.shape == loop.shape
        assert ((ours - loop).abs().max() / loop.abs().max()).item() < bound
    assert all(found[0][2][expert].abs().max() == 0 for expert in (0, 2, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_are_computed_by_their_best_experts(dtype):
    """Against one token and expert after the other: the weights are scores of the softmax over all experts."""
    moe = MoE(ModelConfig(**OLMOE)).to(dtype)
    x = torch.randn(2, 9, 32, dtype=dtype)
    wanted = torch.zeros_like(x)
    for place in ((row, column) for row in range(2) for column in range(9)):
        scores = (moe.gate.weight @ x[place]).softmax(0)
        for expert in scores.argsort(descending=True)[:2].tolist():
            gate, up, down = (w[expert] for w in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj))
            wanted[place] += scores[expert] * (down @ (F.silu(gate @ x[place]) * (up @ x[place])))
    torch.testing.assert_close(moe(x), wanted)


def test_scores_and_sums_are_in_float32_where_the_weights_are_bfloat16():
    """Bfloat16 would take two scores for one; the sum of a token's experts is rounded once."""
    moe = MoE(ModelConfig(**OLMOE)).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    weights, experts, scores, _ = moe.gate(x)
    torch.testing.assert_close(scores, (x.float() @ moe.gate.weight.float().T).softmax(1), rtol=1e-5, atol=0)
    outputs = torch.stack([moe.experts(x, torch.arange(6).ge(one).int() * 64) for one in range(6)])
    chosen = outputs[experts, torch.arange(64)[:, None]].float()
    wanted = torch.bmm(weights[:, None], chosen)[:, 0].bfloat16()
    assert (moe(x) == wanted).double().mean() > 0.99


def test_a_block_is_one_graph_for_all_loads():
    """Fullgraph, and no recompilation as experts get other numbers of rows; gradients are those of eager code."""
    moe = MoE(ModelConfig(**OLMOE))
    graphs: list[object] = []
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, backend=lambda module, inputs: graphs.append(module) or module)
    for scale in (0.0, 1.0, 30.0):
        x = torch.randn(2, 8, 32) * scale
        a, b = (x.clone().requires_grad_() for _ in range(2))
        moe(a).sum().backward()
        wanted = [p.grad.clone() for p in moe.parameters()]
        moe.zero_grad()
        compiled(b).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        for parameter, grad in zip(moe.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        moe.zero_grad()
    assert len(graphs) == 1


def test_costs_count_the_experts_of_a_token():
    config = ModelConfig(**OLMOE)
    rows = param_specs(config)
    experts = sum(row.numel for row in rows if row.type == "experts")
    assert experts == 2 * 3 * 6 * 48 * 32
    used = n_parameters(config) - 64 * 32 - experts + experts // 3
    assert n_compute_parameters(config) == used
    assert flops_per_token(config, 16) == 6 * used + 12 * 2 * 32 * 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_experts": 1}, "experts_per_token = 2: there are n_experts = 1"),
        ({"experts_per_token": 0}, "experts_per_token = 0: must be at least 1 for n_experts = 6"),
        ({"expert_size": 0, "intermediate_size": 48}, "expert_size = 0: must be at least 1 for n_experts = 6"),
        ({"n_experts": 0}, "n_experts = 0: a layer of this model has experts; change layers"),
        ({"layers": (LayerKind(),)}, "n_experts = 6: no layer of this model has experts; change layers"),
        ({"layers": (LayerKind(), LayerKind(experts=True))}, "the layers of family = 'olmoe' are all alike"),
        ({"expert_size": 40}, "differ: family = 'olmoe' has one setting for them"),
        ({"shared_expert_size": 8}, "shared_expert_size = 8: a model of family = 'olmoe' has 0"),
        ({"family": "llama", "qk_norm": "none"}, "n_experts = 6: a model of family = 'llama' has 0"),
        ({"shared_expert_gate": True}, "shared_expert_gate = True: there is no shared expert"),
        ({"n_experts": True}, "n_experts = True: must be a whole number"),
    ],
)
def test_experts_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig(**{**OLMOE, **fields})
