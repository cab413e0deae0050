"""Folders of torch.distributed.checkpoint: what torch writes is read, and what is written here torch reads.

`.metadata` is a pickle, and items of bytes are others: nothing of either is run.
"""

import os
import pickle
import random
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_rows import meta_rows
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lt_ckpt import CheckpointError
from lt_ckpt.conversion import convert
from lt_ckpt.dcp.format import SafeReader, dcp_target, open_dcp
from lt_ckpt.meta_llama.names import dialect_key
from lt_model import ModelConfig, config_from_hf, config_to_hf, param_specs

CONFIG = ModelConfig(vocab_size=26, hidden_size=16, intermediate_size=20, n_heads=4, n_kv_heads=2, n_layers=2)
TIED = replace(CONFIG, tie_word_embeddings=True)
HF = config_to_hf(CONFIG)
GOLDEN = Path(__file__).parent / "data" / "dcp-torch-2.9"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]


def state(config=CONFIG, dtype=torch.float32, seed=0):
    made = {}
    for i, p in enumerate(param_specs(config)):
        generator = torch.Generator().manual_seed(100 * seed + i)
        made[p.name] = torch.randn(p.shape, generator=generator).to(dtype)
    return made


def in_dialect(tensors, dialect, config=CONFIG):
    """The same model under other names, and with Meta's order of rows."""
    if dialect == "hf":
        return dict(tensors)
    return {dialect_key(name, dialect): meta_rows(name, t, config).contiguous() for name, t in tensors.items()}


def save(folder, content, **more):
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder, **more), no_dist=True)
    return folder


def load(folder, content):
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    return content


def same(source, group, tensors):
    assert set(tensors) <= set(source.groups[group].specs)
    for name, tensor in tensors.items():
        assert source.groups[group].specs[name].shape == tuple(tensor.shape)
        found = source.read(name, group=group)
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("dialect", ["hf", "meta", "titan"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_we_read_what_torch_writes(tmp_path, dialect, prefix):
    tensors, moments = state(dtype=torch.bfloat16), [state(seed=1), state(seed=2)]
    named = in_dialect(tensors, dialect)
    first, second = (in_dialect(moment, dialect) for moment in moments)
    optimizer = {
        "state": {k: {"exp_avg": first[k], "exp_avg_sq": second[k], "step": torch.tensor(3.0)} for k in named},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
    }
    content = {"optimizer": optimizer, "dataloader": {"row": 3}, "step": 7}
    save(tmp_path, {**content, "model": named} if prefix else {**content, **named})
    source = open_dcp(tmp_path, config=HF)
    same(source, "weights", tensors)
    same(source, "exp_avg", moments[0])
    same(source, "exp_avg_sq", moments[1])
    assert list(source.weights.specs) == list(tensors)
    assert source.weights.specs["lm_head.weight"].dtype == "BF16"
    n = len(tensors)
    others = {"optimizer": n + 2, "dataloader": 1, "step": 1}
    assert source.format_info == {"names": dialect, "prefix": prefix, "others": others}
    assert (source.format, source.root, source.config) == ("dcp", tmp_path, HF)


def test_a_checkpoint_of_torch_2_9_is_read():
    """torchtitan's names, saved by torch 2.9.1 from two ranks with half of the rows each, of some an odd number."""
    config = ModelConfig(vocab_size=13, hidden_size=12, intermediate_size=10, n_heads=2, n_kv_heads=1, n_layers=1)
    source = open_dcp(GOLDEN, config=config_to_hf(config))
    for group, more in {"weights": 0.0, "exp_avg": 0.5}.items():
        tensors = {
            p.name: (torch.arange(p.numel) + 1000.0 * i + more).reshape(p.shape)
            for i, p in enumerate(param_specs(config))
        }
        same(source, group, tensors)
    assert source.format_info == {"names": "titan", "prefix": "", "others": {"train_state": 1, "lr_scheduler": 1}}


@pytest.mark.parametrize("dialect", ["titan", "titan, early"])
def test_experts_of_torchtitan_are_read(tmp_path, dialect):
    sizes = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 6, "mlp_only_layers": [1]}
    hf = {**HF, **sizes, "model_type": "qwen3_moe", "head_dim": 6}
    tensors, moments = state(config_from_hf(hf)), state(config_from_hf(hf), seed=1)
    names = {name: dialect_key(name, dialect) for name in tensors}
    theirs = [names[f"model.layers.0.mlp.experts.{x}_proj"].rpartition("experts.")[2] for x in ("gate", "down", "up")]
    assert theirs == (["w1_EFD", "w2_EDF", "w3_EFD"] if dialect == "titan" else ["w1", "w2", "w3"])
    assert names["model.layers.0.mlp.gate.weight"] == "layers.0.moe.router.gate.weight"
    optimizer = {names[name]: dict.fromkeys(("exp_avg", "exp_avg_sq"), moment) for name, moment in moments.items()}
    save(tmp_path, {**{names[name]: t for name, t in tensors.items()}, "optimizer": {"state": optimizer}})
    source = open_dcp(tmp_path, config=hf)
    assert source.format_info["names"] == dialect
    same(source, "weights", tensors)
    same(source, "exp_avg", moments)


def test_tied_models(tmp_path):
    tensors = state(TIED)
    save(tmp_path / "without", tensors)
    source = open_dcp(tmp_path / "without", config=config_to_hf(TIED))
    same(source, "weights", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    save(tmp_path / "with", both)
    source = open_dcp(tmp_path / "with", config=config_to_hf(TIED))
    same(source, "weights", both)
    places = source.weights.locations
    assert places["lm_head.weight"] != places["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing: model\.norm\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight.*set tie_word_embeddings to true"),
        (lambda t: t.pop("model.embed_tokens.weight"), "no embedding of a model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(17)}), r"norm\.weight has shape \[17\]"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}), "1 not expected: .*q_proj.bias"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}), "another model"),
        (lambda t: t.update({"ema.model.embed_tokens.weight": torch.ones(1)}), "several models, behind '', 'ema.'"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, message):
    tensors = state()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(save(tmp_path, tensors), config=HF)


def grid(shape, rng):
    """Cuts a shape into boxes by random lines, some of them without elements."""
    boxes = [((), ())]
    for size in shape:
        ends = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randrange(3)))})
        spans = list(pairwise(ends)) + ([(size, size)] if rng.random() < 0.2 else [])
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in spans]
    return boxes


def save_chunks(folder, tensors, rng):
    """A checkpoint as ranks with any slices write it."""
    folder.mkdir()
    written, places = {}, {}
    with ExitStack() as stack:
        opened = [stack.enter_context((folder / f"__{rank}_0.distcp").open("wb")) for rank in range(3)]
        for key, tensor in tensors.items():
            chunks = grid(tensor.shape, rng)
            for offset, shape in chunks:
                rank = rng.randrange(3)
                file, begin = opened[rank], opened[rank].tell()
                part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                torch.save(part.clone(), file)
                info = _StorageInfo(f"__{rank}_0.distcp", begin, file.tell() - begin)
                if part.numel():  # which torch does not list
                    places[MetadataIndex(key, torch.Size(offset))] = info
            kept = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks if 0 not in n]
            written[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, kept)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(written, None, places)))
    return folder


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["hf", "meta", "titan"]))
def test_chunks_of_any_ranks_are_read(memory, seed, dialect):
    rng = random.Random(seed)
    config = replace(CONFIG, n_layers=1)
    tensors = state(config)
    folder = Path(tempfile.mkdtemp(dir=memory)) / "x"
    save_chunks(folder, in_dialect(tensors, dialect), rng)
    source = open_dcp(folder, config=config_to_hf(config))
    same(source, "weights", tensors)
    name = "model.layers.0.self_attn.q_proj.weight"
    first, left = rng.randrange(16), rng.randrange(16)
    rows, columns = rng.randint(1, 16 - first), rng.randint(1, 16 - left)
    found = source.read(name, ((first, left), (rows, columns)))
    assert found.tobytes() == tensors[name].numpy()[first : first + rows, left : left + columns].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_reads_what_we_write(tmp_path, dtype):
    tensors = state(TIED, dtype=dtype)
    source = open_dcp(save(tmp_path / "a", in_dialect(tensors, "titan", TIED)), config=config_to_hf(TIED))
    reports = []
    convert(source, dcp_target(source), tmp_path / "b", progress=lambda *now: reports.append(now))
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert reports[-1][:2] == (sum(t.nbytes for t in both.values()),) * 2
    loaded = load(tmp_path / "b", {key: torch.zeros_like(tensor) for key, tensor in both.items()})
    dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    whole = torch.load(tmp_path / "b.pt", weights_only=True)
    for key, tensor in both.items():
        assert torch.equal(loaded[key], tensor)
        assert torch.equal(whole[key], tensor)
    again = open_dcp(tmp_path / "b", config=config_to_hf(TIED))
    assert again.format_info == {"names": "hf", "prefix": "", "others": {}}
    same(again, "weights", both)
    convert(source, dcp_target(source, dtype="F64"), tmp_path / "c")
    same(open_dcp(tmp_path / "c", config=config_to_hf(TIED)), "weights", {k: t.double() for k, t in both.items()})


class Runs:
    """Pickled so that whoever reads it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    folder, ran = save(tmp_path / "x", {**state(), "train_state": 7}), tmp_path / "ran"
    metadata = SafeReader(folder).read_metadata()
    evil = pickle.dumps(Runs(ran))
    # An item of bytes that is another pickle: nobody looks into it.
    [info] = [place for index, place in metadata.storage_data.items() if index.fqn == "train_state"]
    with (folder / info.relative_path).open("r+b") as file:
        file.seek(info.offset)
        file.write(evil[: info.length].ljust(info.length, b"."))
    source = open_dcp(folder, config=HF)
    assert source.format_info["others"] == {"train_state": 1}
    same(source, "weights", state())
    for raw in (evil, pickle.dumps({"x": Runs(ran)}, 2), pickle.dumps(getattr)):
        (folder / ".metadata").write_bytes(raw)
        with pytest.raises(
            CheckpointError, match=r"refers to (posix|builtins)\.\w+, which no checkpoint of torch does"
        ):
            open_dcp(folder, config=HF)
    assert not ran.exists()
    pickle.loads(evil)
    assert ran.exists(), "not hostile, so the test shows nothing"


def change_metadata(folder, change):
    metadata = SafeReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def places(metadata):
    return [info for index, info in metadata.storage_data.items() if index.fqn == "model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(places(m)[0], "relative_path", "../outside.distcp"), "leads out of its folder"),
        (lambda m: setattr(places(m)[0], "relative_path", "/etc/passwd"), "leads out of its folder"),
        (lambda m: setattr(places(m)[0], "relative_path", "other.distcp"), "No such file"),
        (lambda m: setattr(places(m)[0], "offset", 10**9), "torch cannot read it"),
        (lambda m: setattr(places(m)[0], "length", 100), "torch cannot read it"),
        (lambda m: m.storage_data.clear(), "does not say where its chunk"),
        (lambda m: m.state_dict_metadata["model.norm.weight"].chunks.pop(), "no slice at all"),
        (lambda m: setattr(m.state_dict_metadata["model.norm.weight"], "size", torch.Size([17])), r"shape \[17\]"),
    ],
)
def test_metadata_that_is_not_true_is_refused(tmp_path, change, message):
    folder = save(tmp_path / "x", state())
    torch.save(torch.ones(16), tmp_path / "outside.distcp")
    change_metadata(folder, change)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(folder, config=HF)


@pytest.mark.parametrize("raw", [b"", b"\x80\x02garbage", pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused(tmp_path, raw):
    folder = save(tmp_path / "x", state())
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_dcp(folder, config=HF)
