import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    ConvertOptions,
    begin_save,
    commit_save,
    convert_checkpoint,
    laid_out_files,
    open_source,
    write_rank_files,
)
from lt_model import ModelConfig, param_specs

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
ADDED = [{"id": 60, "content": "<|bos|>", "special": True, **FLAGS}]
MODEL = {"type": "BPE", "vocab": {"<|eos|>": 61, "a": 0}, "merges": []}
ABOUT = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
TOKENIZER = {
    "tokenizer.json": json.dumps({"version": "1.0", "added_tokens": ADDED, "model": MODEL}).encode(),
    "tokenizer_config.json": json.dumps(ABOUT).encode(),
}


def config(**changes):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
    return ModelConfig(**{**shape, **changes})


def save_model(toy, root, model, *, tokenizer=TOKENIZER, leave_out=()):
    """Random weights, cut by rows over two ranks."""
    rng = np.random.default_rng(3)
    weights = {p.name: (rng.standard_normal(p.shape) * 0.1).astype("<f4") for p in param_specs(model)}
    state = {("weights", name): ("F32", value) for name, value in weights.items() if name not in leave_out}
    tmp = begin_save(root, step=7, world_size=2)
    for rank in range(2):
        write_rank_files(tmp, rank=rank, shards=toy.shards(state, rank, 2))
    meta = CheckpointMetadata(step=7, model=model.to_dict(), tokenizer_files=tokenizer)
    return Checkpoint.open(commit_save(tmp, world_size=2, metadata=meta)), weights


def export_hf(checkpoint, out, *, progress=None, **options):
    return convert_checkpoint(
        open_source(checkpoint.path), out, ConvertOptions(format="hf", **options), progress=progress
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000, 1])
def test_transformers_loads_exactly_our_weights(tmp_path, toy, tied, max_shard_bytes, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(laid_out_files, "BLOCK_BYTES", 4 * 100)
    checkpoint, weights = save_model(toy, tmp_path / "ck", config(tie_word_embeddings=tied))
    seen = []
    out = export_hf(
        checkpoint,
        tmp_path / "hf",
        max_shard_bytes=max_shard_bytes,
        progress=lambda done, total, unit: seen.append((done, total, unit)),
    )
    model, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = model.state_dict()
    assert ("lm_head.weight" in weights) == (not tied)
    for name, value in weights.items():
        assert loaded[name].dtype == torch.float32
        assert (loaded[name].numpy() == value).all()
    assert model.config.tie_word_embeddings == tied
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (60, 61)
    total = sum(value.nbytes for value in weights.values())
    assert seen[-1] == (total, total, "bytes")
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER["tokenizer.json"]
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if max_shard_bytes == 5 * 10**9:
        assert files == ["model.safetensors"]
        assert not (out / "model.safetensors.index.json").exists()
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert index["metadata"]["total_size"] == total
        assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        assert len(files) == (len(weights) if max_shard_bytes == 1 else len(files))
        for file in files:
            held = load_file(out / file)
            assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= max_shard_bytes


def test_what_cannot_be_right_is_refused_before_a_byte_is_written(tmp_path, toy):
    missing, _ = save_model(toy, tmp_path / "a", config(), leave_out=["model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"1 missing: model\.norm\.weight"):
        export_hf(missing, tmp_path / "hf")
    good, _ = save_model(toy, tmp_path / "b", config())
    with pytest.raises(CheckpointError, match="x: no such tensor"):
        open_source(good.path).read("x")
    with pytest.raises(CheckpointError, match="does not lie in"):
        open_source(good.path).read("model.norm.weight", ((33,), (1,)))
    with pytest.raises(CheckpointError, match="unknown checkpoint format"):
        open_source(tmp_path)
    for dtype, message in (("I64", "cannot cast F32 to I64"), ("bf16", "cannot cast F32 to bf16|not known")):
        with pytest.raises(CheckpointError, match=message):
            export_hf(good, tmp_path / "hf", dtype=dtype)
    lost = {**TOKENIZER, "tokenizer_config.json": b'{"bos_token": "<nowhere>"}'}
    odd, _ = save_model(toy, tmp_path / "c", config(), tokenizer=lost)
    with pytest.raises(CheckpointError, match=r"bos_token: .*<nowhere>"):
        export_hf(odd, tmp_path / "hf")
    tmp = begin_save(tmp_path / "d", step=0, world_size=1)
    write_rank_files(tmp, rank=0, shards=[])
    with pytest.raises(CheckpointError, match="has no model configuration"):
        export_hf(Checkpoint.open(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=0))), tmp_path / "hf")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"model.norm.weight": "../../etc/passwd.safetensors"}), "leads out of its folder"),
        (lambda m: m.update({"model.norm.weight": "/etc/passwd"}), "leads out of its folder"),
        (lambda m: m.update({"model.norm.weight": 7}), "is no file name"),
        (lambda m: m.update({"more": m["model.norm.weight"]}), "disagree about tensor 'more'"),
        (lambda m: m.pop("model.norm.weight"), r"disagree about tensor 'model\.norm\.weight'"),
        (lambda m: m.update({"more": "model-9.safetensors"}), "No such file"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, toy, change, message):
    out = export_hf(save_model(toy, tmp_path / "ck", config())[0], tmp_path / "hf", max_shard_bytes=20_000)
    (out / "SHA256SUMS").unlink()
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    change(index["weight_map"])
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        open_source(out)
