"""The nxd backend's decoder in float64 on the host against lt-model's: logits and the gradient of every parameter.

It has forms of its own for devices that compile lazily: norm and softmax in a wide dtype, rotary tables from the host.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lt_ckpt.nxd.options import NxdOptions, Qkv
from lt_model import Decoder, ModelConfig, init_model
from lt_trainer_neuron.nxd.attention import eager_attention
from lt_trainer_neuron.nxd.layers import LayerFactory
from lt_trainer_neuron.nxd.llama import NxdPipelineStage

WIDE = torch.float64
DOC_IDS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
POSITIONS = torch.tensor([[*range(5), *range(4), *range(3)], list(range(12))])


def nxd_name(name: str, qkv: Qkv) -> tuple[str, int]:
    """Return the key of the nxd tensor that has a tensor of the model, and its place in there."""
    for place, which in enumerate("qkv"):
        if qkv != "separate" and f"{which}_proj" in name:
            weight = "weight_qkv" if qkv == "gqa_fused" else f"weight_{which}"
            return name.replace(f"{which}_proj.weight", f"qkv_proj.{weight}"), place * (qkv == "gqa_fused")
    for place, which in enumerate(("gate", "up")):
        if f"{which}_proj" in name:
            return name.replace(f"{which}_proj", "gate_up_proj"), place
    return name, 0


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole-rows", "documents"])
@pytest.mark.parametrize(("qkv", "kv_heads"), [("separate", 4), ("gqa", 2), ("gqa_fused", 2)])
def test_logits_and_gradients_are_those_of_lt_model(qkv: Qkv, kv_heads: int, documents: bool, recompute: bool) -> None:
    config = ModelConfig(
        vocab_size=41, hidden_size=32, intermediate_size=24, n_heads=4, n_kv_heads=kv_heads, n_layers=2
    )
    model = Decoder(config, attention="reference").to(WIDE)
    init_model(model, seed=3)
    stage = NxdPipelineStage(
        config,
        NxdOptions(qkv=qkv),
        LayerFactory(WIDE),
        eager_attention(WIDE),
        layer_indices=range(2),
        is_first=True,
        is_last=True,
        dtype=WIDE,
        upcast_dtype=WIDE,
        recompute=(lambda *call: checkpoint(*call, use_reentrant=False)) if recompute else None,
    ).to_empty(device="cpu")
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts.setdefault(nxd_name(name, qkv)[0], []).append(name)
    parts = {key: sorted(names, key=lambda name: nxd_name(name, qkv)[1]) for key, names in parts.items()}
    theirs, named = dict(model.named_parameters()), dict(stage.named_parameters())
    assert parts.keys() == named.keys()
    with torch.no_grad():
        for key, names in parts.items():
            named[key].copy_(torch.cat([theirs[name] for name in names]))
    ids = torch.arange(24).view(2, 12) * 7 % 41
    upstream = torch.randn(2, 12, 41, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    expected = model(ids, position_ids_BT=POSITIONS, doc_ids_BT=DOC_IDS if documents else None)
    found = stage(ids, POSITIONS, DOC_IDS if documents else None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected.backward(upstream)
    found.backward(upstream)
    for key, names in parts.items():
        gradient = torch.cat([theirs[name].grad for name in names])  # type: ignore[misc]
        assert ((named[key].grad - gradient).norm() / gradient.norm()).item() <= 1e-12, key
