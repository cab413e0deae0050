"""Any model, any two formats, any cut: there and back is the same bits, and nothing but the format differs."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lt_ckpt.comparison import compare, find_replica_mismatches
from lt_ckpt.formats import FORMATS, ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig, config_to_hf, param_specs

HEAD = "lm_head.weight"


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    group = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * group
    head_dim = draw(st.sampled_from([2, 4]))
    return ModelConfig(
        vocab_size=8 * draw(st.integers(1, 5)),
        hidden_size=heads * head_dim,
        intermediate_size=8 * draw(st.integers(1, 4)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        n_layers=draw(st.integers(1, 5)),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def cuts(draw: st.DrawFn, config: ModelConfig) -> NxdOptions:
    """A cut that the model admits, of every kind."""
    pp = draw(st.integers(1, config.n_layers))
    chunks = draw(st.integers(1, config.n_layers // pp))
    common: dict[str, Any] = {"pp": pp, "virtual_pp": chunks, "xser": draw(st.booleans())}
    common["layout"] = draw(st.sampled_from(["v1", "v2"]))
    if common["layout"] == "v2" and draw(st.booleans()):
        common["tag"] = "step_3"
    grouped = [
        (config.n_kv_heads * m, m)
        for m in (1, 2, 4)
        if config.n_heads % (config.n_kv_heads * m) == 0 and config.n_kv_heads * m <= 8
    ]
    kinds = ["separate", "gqa", "gqa_fused"] + (["coalesced"] if config.n_heads == config.n_kv_heads else [])
    qkv = draw(st.sampled_from(kinds))
    if qkv in ("gqa", "gqa_fused"):
        tp, m = draw(st.sampled_from(grouped))
        return NxdOptions(tp=tp, kv_size_multiplier=m, qkv=qkv, **common)
    tp = draw(st.sampled_from([t for t in (1, 2, 4) if config.n_kv_heads % t == 0]))
    return NxdOptions(tp=tp, qkv=qkv, **common)


def write_hf(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(1)
    folder.mkdir()
    weights = {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in param_specs(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = config_to_hf(config, bos_token_id=None, eos_token_id=None, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def made(source: Path, out: Path, kind: str, config: Path, cut: NxdOptions) -> Path:
    opened = open_source(source, config=config if needs_config(source) else None)
    convert_checkpoint(opened, out, ConvertOptions(format=kind, nxd=cut, max_shard_bytes=700))
    return out


def needs_config(path: Path) -> bool:
    return path.is_file() or not ((path / "config.json").is_file() or list(path.glob("step-*/COMMIT")))


def assert_equal(a: Path, b: Path, config: Path) -> None:
    left, right = (open_source(path, config=config if needs_config(path) else None) for path in (a, b))
    found = list(compare(left, right))
    assert [c.name for c in found if not c.is_equal] == []
    assert len({c.name for c in found} - {HEAD}) >= len(left.weights.specs) - 1
    assert [c.dtypes for c in found if c.dtypes[0] != c.dtypes[1]] == []
    assert list(find_replica_mismatches(right)) == []


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMATS, 2)))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_there_and_back_is_the_same_bits(first: str, second: str, data: st.DataObject) -> None:
    config = data.draw(models())
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16, torch.float64]))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = write_hf(root / "hf", config, dtype)
        a = made(start, root / ("a.pt" if first == "pt" else "a"), first, start, data.draw(cuts(config)))
        b = made(a, root / ("b.pt" if second == "pt" else "b"), second, start, data.draw(cuts(config)))
        back = made(b, root / ("c.pt" if first == "pt" else "c"), first, start, data.draw(cuts(config)))
        for path in (a, b, back):
            assert_equal(start, path, start)


SHAPE: dict[str, Any] = {"vocab_size": 24, "hidden_size": 24, "intermediate_size": 8, "n_heads": 12, "n_kv_heads": 2}
