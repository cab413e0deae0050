"""The nxd backend's decoder in float64 on the host against lt-model's: logits and the gradient of every parameter.

It has forms of its own for devices that compile lazily: norm and softmax in a wide dtype, rotary tables from the host.
All dense families take part; documents, recomputation and NxD's kinds of attention layers are spread over them.
"""

import pytest
import torch
from dense_families import MODELS
from torch.utils.checkpoint import checkpoint

from lt_ckpt.nxd.layout import rank_rules
from lt_ckpt.nxd.options import NxdOptions
from lt_model import Decoder, init_model
from lt_trainer_neuron.nxd.attention import eager_attention
from lt_trainer_neuron.nxd.decoder import NxdPipelineStage
from lt_trainer_neuron.nxd.layers import LayerFactory

WIDE, RNG = torch.float64, torch.Generator().manual_seed(0)
DOC_IDS = torch.tensor([[0] * 5 + [1] * 12 + [-1] * 3, [0] * 20])
POSITIONS = torch.tensor([[*range(5), *range(12), *range(3)], list(range(20))])


@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients_are_those_of_lt_model(family: str) -> None:
    config, index = MODELS[family], list(MODELS).index(family)
    model = Decoder(config, attention="reference").to(WIDE)
    init_model(model, seed=3)
    with torch.no_grad():
        for tensor in model.parameters():  # no bias is zero, and no norm does nothing
            tensor.add_(torch.randn(tensor.shape, dtype=WIDE, generator=RNG), alpha=0.1)
    options = NxdOptions(qkv=("separate", "gqa", "gqa_fused")[index % 3], kv_size_multiplier=1)
    stage = NxdPipelineStage(
        config,
        options,
        LayerFactory(WIDE, WIDE),
        eager_attention(WIDE, config.attention_softcap),
        layer_indices=range(config.n_layers),
        is_first=True,
        is_last=True,
        recompute=(lambda *call: checkpoint(*call, use_reentrant=False)) if index % 2 else None,
    ).to_empty(device="cpu")
    theirs, named = dict(model.named_parameters(remove_duplicate=False)), dict(stage.named_parameters())
    parts = {
        prefix + rule.key: [prefix + part for part in rule.names or (rule.key,)]
        for prefix, rule in rank_rules(config, options, 0)
    }
    assert parts.keys() == named.keys()
    with torch.no_grad():
        for key, names in parts.items():
            named[key].copy_(torch.cat([theirs[name] for name in names]))
    if config.tie_word_embeddings:
        stage.lm_head.weight = stage.model.embed_tokens.weight
        del parts["lm_head.weight"]
    ids = torch.arange(40).view(2, 20) * 7 % 41
    upstream = torch.randn(2, 20, config.vocab_size, dtype=WIDE, generator=RNG)
    documents = DOC_IDS if index % 4 < 3 else None
    expected = model(ids, position_ids_BT=POSITIONS, doc_ids_BT=documents)
    found = stage(ids, POSITIONS, documents)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    expected.backward(upstream)
    found.backward(upstream)
    for key, names in parts.items():
        gradient = torch.cat([theirs[name].grad for name in names])  # type: ignore[misc]
        assert ((named[key].grad - gradient).norm() / gradient.norm()).item() <= 1e-12, key
