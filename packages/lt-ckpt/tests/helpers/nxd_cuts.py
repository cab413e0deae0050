"""Models of hypothesis, and cuts of NxD that a model admits, of every kind."""

from typing import Any

from hypothesis import strategies as st

from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return ModelConfig(
        vocab_size=24 * draw(st.integers(1, 2)),
        hidden_size=heads * draw(st.sampled_from([2, 4])),
        intermediate_size=24 * draw(st.integers(1, 2)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        n_layers=draw(st.integers(1, 5)),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def cuts(draw: st.DrawFn, config: ModelConfig) -> NxdOptions:
    pp = draw(st.integers(1, config.n_layers))
    chunks = draw(st.integers(1, config.n_layers // pp))
    common: dict[str, Any] = {"pp": pp, "virtual_pp": chunks, "xser": draw(st.booleans())}
    common["layout"] = draw(st.sampled_from(["v1", "v2"]))
    if common["layout"] == "v2" and draw(st.booleans()):
        common["tag"] = "step_3"
    heads, kv_heads = config.n_heads, config.n_kv_heads
    grouped = [(kv_heads * m, m) for m in (1, 2, 4) if heads % (kv_heads * m) == 0 and kv_heads * m <= 8]
    kinds = ["separate", "gqa", "gqa_fused"] + (["coalesced"] if heads == kv_heads else [])
    qkv = draw(st.sampled_from(kinds))
    if qkv in ("gqa", "gqa_fused"):
        tp, m = draw(st.sampled_from(grouped))
        return NxdOptions(tp=tp, kv_size_multiplier=m, qkv=qkv, **common)
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4) if kv_heads % t == 0]))
    return NxdOptions(tp=tp, qkv=qkv, **common)


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ModelConfig, NxdOptions]:
    config = draw(models())
    return config, draw(cuts(config))
