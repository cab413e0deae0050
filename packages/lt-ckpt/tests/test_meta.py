import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_rows import meta_rows

from lt_ckpt import CheckpointError, open_source
from lt_ckpt.meta_llama.format import open_meta
from lt_ckpt.meta_llama.names import dialect_key, unpermute_rows
from lt_ckpt.stored_slices import StoredSlice, read_box
from lt_model import ModelConfig, config_to_hf, param_specs, preset

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    max_position_embeddings=4096,
    norm_eps=1e-5,
)
HF = config_to_hf(CONFIG)


def weights(config, dtype=torch.bfloat16):
    """Hugging Face's state dict, every element another one as far as the dtype can tell."""
    table = param_specs(replace(config, tie_word_embeddings=False))
    return {
        p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, p in enumerate(table)
    }


def save(folder, config, n_files, *, embedding_dim=0, params=None, dtype=torch.bfloat16, more=None):
    """A folder as Meta's, cut by torch; returns Hugging Face's state dict."""
    tensors = weights(config, dtype)
    tp_dims = {p.name: p.tp_dim for p in param_specs(replace(config, tie_word_embeddings=False))}
    tp_dims["model.embed_tokens.weight"] = embedding_dim
    for i in range(n_files):
        made = {}
        for name, tensor in tensors.items():
            whole, dim = meta_rows(name, tensor, config), tp_dims[name]
            made[dialect_key(name, "meta")] = whole if dim is None else whole.chunk(n_files, dim)[i].clone()
        made["rope.freqs"] = torch.ones(config.head_width // 2)
        torch.save({**made, **(more or {})}, folder / f"consolidated.{i:02d}.pth")
    said = {
        "dim": config.hidden_size,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": -1,
        "norm_eps": config.norm_eps,
        "multiple_of": 256,
    }
    (folder / "params.json").write_text(json.dumps({**said, **(params or {})}))
    return tensors


def check(source, tensors):
    assert list(source.weights.specs) == list(tensors)
    for name, tensor in tensors.items():
        assert source.weights.specs[name].shape == tuple(tensor.shape)
        found = source.read(name)
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(("n_files", "embedding_dim"), [(1, 0), (2, 0), (2, 1)])
def test_every_tensor_comes_back_in_the_order_of_hugging_face(tmp_path, n_files, embedding_dim):
    tensors = save(tmp_path, CONFIG, n_files, embedding_dim=embedding_dim)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(CheckpointError, match="has no model configuration"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    source = open_source(tmp_path)
    check(source, tensors)
    assert source.config == HF
    assert source.aux_files == {"tokenizer.model": b"pieces"}
    assert source.format_info == {"files": n_files, "embedding_cut": "columns" if embedding_dim else "rows"}
    assert (source.format, source.path, source.root) == ("meta", tmp_path, tmp_path)
    norm = source.weights.replicas.get("model.norm.weight", ())
    assert [stored.file for stored in norm] == [f"consolidated.{i:02d}.pth" for i in range(1, n_files)]


def test_a_given_configuration_is_compared(tmp_path):
    tensors = save(tmp_path, CONFIG, 2, params={"rope_theta": 10000.0})
    given_config = {**config_to_hf(CONFIG, bos_token_id=1, eos_token_id=2), "tie_word_embeddings": True}
    source = open_meta(tmp_path, config=given_config)
    check(source, tensors)
    assert source.config == given_config
    for field, value in {"n_heads": 8, "norm_eps": 1e-6, "rope_theta": 500000.0}.items():
        with pytest.raises(CheckpointError, match=f"params.json: {field} is .*the configuration says"):
            open_meta(tmp_path, config=config_to_hf(replace(CONFIG, **{field: value})))
    with pytest.raises(CheckpointError, match="layers"):
        open_meta(tmp_path, config=config_to_hf(replace(CONFIG, intermediate_size=44)))
    scaled = preset("llama3.2-1b").rope_scaling
    with pytest.raises(CheckpointError, match="use_scaled_rope is False"):
        open_meta(tmp_path, config=config_to_hf(replace(CONFIG, rope_scaling=scaled)))


def test_scaled_frequencies_and_more_layers_are_compared(tmp_path):
    tensors = save(tmp_path, CONFIG, 1, params={"use_scaled_rope": True, "rope_theta": 500000.0})
    scaled = replace(CONFIG, rope_theta=500000.0, rope_scaling=preset("llama3.2-1b").rope_scaling)
    check(open_meta(tmp_path, config=config_to_hf(scaled)), tensors)
    with pytest.raises(CheckpointError, match="use_scaled_rope is True"):
        open_meta(tmp_path, config=config_to_hf(replace(scaled, rope_scaling=None)))
    for n_layers, message in ((1, "not expected: layers.1"), (3, "missing: layers.2")):
        save(tmp_path, CONFIG, 1, params={"n_layers": n_layers})
        with pytest.raises(CheckpointError, match=message):
            open_meta(tmp_path, config=config_to_hf(replace(CONFIG, n_layers=n_layers)))


def test_folders_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="without a gap"):
        open_meta(tmp_path, config=HF)
    save(tmp_path, CONFIG, 2)
    (tmp_path / "consolidated.01.pth").rename(tmp_path / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match="without a gap"):
        open_meta(tmp_path, config=HF)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(CheckpointError, match="shape"):
        open_meta(tmp_path, config=HF)
    (tmp_path / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"params\.json"):
        open_meta(tmp_path, config=HF)
    with pytest.raises(CheckpointError, match="No such file"):
        open_meta(tmp_path / "none", config=HF)


def test_other_tensors_are_refused_by_name(tmp_path):
    save(tmp_path, CONFIG, 1, more={"layers.0.attention.wq.bias": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"not expected: layers\.0\.attention\.wq\.bias"):
        open_meta(tmp_path, config=HF)
    torch.save({"a": torch.ones(1)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="tok_embeddings"):
        open_meta(tmp_path, config=HF)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 19), st.integers(1, 20), st.integers(0, 3), st.integers(1, 4), st.sampled_from([2, 4, 10, 20]))
def test_a_chunk_of_any_rows_is_unpermuted(memory, row, n_rows, column, n_columns, head_dim):
    """Each part of a chunk has, at its strides, the elements that Hugging Face's matrix has there."""
    theirs = np.arange(20 * 8, dtype="<u4").reshape(20, 8)
    ours = theirs.reshape(-1, head_dim // 2, 2, 8).transpose(0, 2, 1, 3).reshape(20, 8)
    chunk = np.ascontiguousarray(theirs[row : row + n_rows, column : column + n_columns])
    (memory / "chunk").write_bytes(chunk.tobytes())
    stored = StoredSlice(file="chunk", byte_offset=0, offset=(row, column), shape=chunk.shape)
    parts = list(unpermute_rows(stored, head_dim, 4))
    for part in parts:
        box = part.offset, part.shape
        wanted = ours[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
        assert read_box(memory, parts, box, "U32", "x").tolist() == wanted.tolist()
    assert sum(part.shape[0] for part in parts) == chunk.shape[0]
