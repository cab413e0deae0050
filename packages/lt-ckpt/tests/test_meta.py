import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.layout import shard_box
from lt_ckpt.meta_llama.format import meta_layout, open_meta
from lt_ckpt.meta_llama.names import dialect_key, unpermute_rows
from lt_ckpt.stored_slices import StoredSlice, read_box
from lt_model import LlamaConfig, ModelError, config_from_hf, config_to_hf, param_specs, preset

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    max_position_embeddings=4096,
    norm_eps=1e-5,
)


def weights(config, dtype=torch.bfloat16):
    """Hugging Face's state dict, every element another one as far as the dtype can tell."""
    table = param_specs(replace(config, tie_word_embeddings=False))
    return {
        p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, p in enumerate(table)
    }


def meta_of(name, tensor, config):
    """What Meta's file has: the inverse of `permute` in transformers' convert_llama_weights_to_hf.py."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    n_heads = config.n_heads if "q_proj" in name else config.n_kv_heads
    rows, columns = tensor.shape
    return tensor.view(n_heads, 2, rows // n_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def permute(w, n_heads, dim1, dim2):
    """The formula of that script, in the direction in which it is used."""
    return w.view(n_heads, dim1 // n_heads // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2)


def save(folder, config, n_files, *, embedding_dim=0, params=None, dtype=torch.bfloat16, more=None):
    """A folder as Meta's, cut by torch; returns Hugging Face's state dict."""
    tensors = weights(config, dtype)
    tp_dims = {p.name: p.tp_dim for p in param_specs(replace(config, tie_word_embeddings=False))}
    tp_dims["model.embed_tokens.weight"] = embedding_dim
    for i in range(n_files):
        made = {}
        for name, tensor in tensors.items():
            whole, dim = meta_of(name, tensor, config), tp_dims[name]
            made[dialect_key(name, "meta")] = whole if dim is None else whole.chunk(n_files, dim)[i].clone()
        made["rope.freqs"] = torch.ones(config.head_dim // 2)
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


def test_the_reference_formula_undoes_what_the_test_makes():
    for name, tensor in weights(CONFIG).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            n_heads = CONFIG.n_heads if "q_proj" in name else CONFIG.n_kv_heads
            assert torch.equal(permute(meta_of(name, tensor, CONFIG), n_heads, *tensor.shape), tensor)
            assert not torch.equal(meta_of(name, tensor, CONFIG), tensor)


@pytest.mark.parametrize(("n_files", "embedding_dim"), [(1, 0), (2, 0), (2, 1)])
def test_every_tensor_comes_back_in_the_order_of_hugging_face(tmp_path, n_files, embedding_dim):
    tensors = save(tmp_path, CONFIG, n_files, embedding_dim=embedding_dim)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    source = open_meta(tmp_path)
    check(source, tensors)
    assert config_from_hf(source.config) == CONFIG
    assert source.config["torch_dtype"] == "bfloat16"
    assert source.aux_files == {"tokenizer.model": b"pieces"}
    assert source.format_info == {"files": n_files, "embedding_cut": "columns" if embedding_dim else "rows"}
    assert (source.format, source.path, source.root) == ("meta", tmp_path, tmp_path)
    norm = source.weights.replicas.get("model.norm.weight", ())
    assert [stored.file for stored in norm] == [f"consolidated.{i:02d}.pth" for i in range(1, n_files)]


def test_any_rows_of_a_turned_matrix_can_be_read(tmp_path):
    tensors = save(tmp_path, CONFIG, 2)
    source = open_meta(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    wanted = tensors[name].view(torch.int16).numpy()
    for first, last in ((0, 1), (3, 4), (5, 27), (31, 32), (15, 17)):
        for left, right in ((0, 32), (7, 9)):
            found = source.read(name, ((first, left), (last - first, right - left)))
            assert found.tobytes() == wanted[first:last, left:right].tobytes()


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


def test_scaled_frequencies_need_the_configuration(tmp_path):
    tensors = save(tmp_path, CONFIG, 1, params={"use_scaled_rope": True, "rope_theta": 500000.0})
    with pytest.raises(CheckpointError, match=r"use_scaled_rope is set.*--config"):
        open_meta(tmp_path)
    scaled = replace(CONFIG, rope_theta=500000.0, rope_scaling=preset("llama3.2-1b").rope_scaling)
    check(open_meta(tmp_path, config=config_to_hf(scaled)), tensors)
    with pytest.raises(CheckpointError, match="use_scaled_rope is True"):
        open_meta(tmp_path, config=config_to_hf(replace(scaled, rope_scaling=None)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": None}, "'dim' must be int"),
        ({"n_heads": "4"}, "'n_heads' must be int"),
        ({"n_heads": 5}, "not a multiple"),
        ({"n_layers": 0}, "n_layers"),
        ({"n_layers": 3}, "layers.2"),
        ({"n_layers": 1}, "not expected: layers.1"),
        ({"vocab_size": 47}, "vocab_size is 47, the embedding has 48 rows"),
        ({"n_kv_heads": 1}, "split into 2 files|shape"),
        ({"norm_eps": -1}, "norm_eps"),
        ({"max_seq_len": "x"}, "max_position_embeddings"),
    ],
)
def test_params_that_do_not_fit_are_refused(tmp_path, params, message):
    save(tmp_path, CONFIG, 2, params=params)
    with pytest.raises(CheckpointError, match=message):
        open_meta(tmp_path)


def test_folders_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="without a gap"):
        open_meta(tmp_path)
    save(tmp_path, CONFIG, 2)
    (tmp_path / "consolidated.01.pth").rename(tmp_path / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match="without a gap"):
        open_meta(tmp_path)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(CheckpointError, match="shape"):
        open_meta(tmp_path)
    (tmp_path / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"params\.json"):
        open_meta(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        open_meta(tmp_path / "none")


def test_other_tensors_are_refused_by_name(tmp_path):
    save(tmp_path, CONFIG, 1, more={"layers.0.attention.wq.bias": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"not expected: layers\.0\.attention\.wq\.bias"):
        open_meta(tmp_path)
    torch.save({"a": torch.ones(1)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="tok_embeddings"):
        open_meta(tmp_path)


@pytest.mark.parametrize(
    ("name", "n_files"), [("llama2-7b", 1), ("llama2-13b", 2), ("llama2-70b", 8), ("llama3-70b", 8)]
)
def test_the_layouts_of_real_models(name, n_files):
    config = replace(preset(name), n_layers=1)
    layout = meta_layout(config, n_files, embedding_dim=0 if name.startswith("llama3") else 1)
    layout.check({p.name: p.shape for p in param_specs(config)})
    assert [file.path for file in layout.files] == [f"consolidated.{i:02d}.pth" for i in range(n_files)]
    assert sum(1 for _ in layout) == n_files * 12
    shapes = {tensor.key: tensor.shape for tensor in layout.files[-1].tensors}
    assert shapes["layers.0.attention.wk.weight"] == (
        config.n_kv_heads * config.head_dim // n_files,
        config.hidden_size,
    )
    assert shapes["layers.0.attention.wo.weight"] == (config.hidden_size, config.hidden_size // n_files)


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(CheckpointError, match="8 key/value heads cannot be split into 16 files"):
        meta_layout(preset("llama3-70b"), 16)
    with pytest.raises((CheckpointError, ModelError)):
        shard_box((5, 4), 0, 0, 2, "x")


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
