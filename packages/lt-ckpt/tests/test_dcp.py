import copy
import errno
import os
import pickle
import random
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lt_ckpt import CheckpointError, TensorSpec
from lt_ckpt.conversion import convert
from lt_ckpt.dcp.files import DcpWriter, locate_chunks, read_checksums
from lt_ckpt.dcp.format import dcp_target, open_dcp, read_metadata
from lt_ckpt.dcp.metadata import ChunkedTensor, DcpChunk, dump_metadata, parse_metadata
from lt_ckpt.files import finished_name
from lt_ckpt.meta_llama.names import dialect_key
from lt_ckpt.read_verification import check_range
from lt_ckpt.source import TensorReader
from lt_model import LlamaConfig, config_to_hf, param_specs

CONFIG = LlamaConfig(vocab_size=26, hidden_size=16, intermediate_size=20, n_heads=4, n_kv_heads=2, n_layers=2)
TIED = replace(CONFIG, tie_word_embeddings=True)
HF = config_to_hf(CONFIG)
GOLDEN = Path(__file__).parent / "data" / "dcp-torch-2.9"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]


def open_files():
    """Number of open files, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


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
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            n_heads = config.n_heads if "q_proj" in name else config.n_kv_heads
            rows, columns = tensor.shape
            tensor = tensor.view(n_heads, 2, rows // n_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        made[dialect_key(name, dialect)] = tensor.contiguous()
    return made


def save(folder, content, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder, **more), no_dist=True)
    return folder


def load(folder, content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(content, checkpoint_id=folder, no_dist=True)
    return content


def same(source, group, tensors):
    assert set(tensors) <= set(source.groups[group].specs)
    with TensorReader(source.root) as reader:
        for name, tensor in tensors.items():
            assert source.groups[group].specs[name].shape == tuple(tensor.shape)
            found = reader.read(source.groups[group], name)
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
    same(open_dcp(tmp_path, config=HF, prefix=prefix), "weights", tensors)
    with pytest.raises(CheckpointError, match="no embedding of a Llama"):
        open_dcp(tmp_path, config=HF, prefix="ema.")


def test_a_checkpoint_of_torch_2_9_is_read():
    """torchtitan's names, saved by torch 2.9.1 from two ranks with half of the rows each, of some an odd number."""
    config = LlamaConfig(vocab_size=13, hidden_size=12, intermediate_size=10, n_heads=2, n_kv_heads=1, n_layers=1)
    source = open_dcp(GOLDEN, config=config_to_hf(config))
    for group, more in {"weights": 0.0, "exp_avg": 0.5}.items():
        tensors = {
            p.name: (torch.arange(p.numel) + 1000.0 * i + more).reshape(p.shape)
            for i, p in enumerate(param_specs(config))
        }
        same(source, group, tensors)
    assert source.format_info == {"names": "titan", "prefix": "", "others": {"train_state": 1, "lr_scheduler": 1}}


def test_several_files_and_threads(tmp_path):
    tensors = state()
    save(tmp_path / "a", tensors, thread_count=2)
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 2
    same(open_dcp(tmp_path / "a", config=HF), "weights", tensors)
    save(tmp_path / "b", tensors, single_file_per_rank=False)
    assert len(list((tmp_path / "b").glob("*.distcp"))) == len(tensors)
    same(open_dcp(tmp_path / "b", config=HF), "weights", tensors)


def test_safetensors_inside(tmp_path):
    tensors = state(dtype=torch.bfloat16)
    save(tmp_path, tensors, serialization_format=SerializationFormat.SAFETENSORS)
    same(open_dcp(tmp_path, config=HF), "weights", tensors)
    [file] = tmp_path.glob("*.distcp")
    save_file({"other": torch.ones(9000)}, file)
    with pytest.raises(CheckpointError, match="is not in the file"):
        open_dcp(tmp_path, config=HF)


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


def test_moments_of_some_tensors_only_are_no_group(tmp_path):
    tensors = state()
    some = {name: {"exp_avg": tensor} for name, tensor in tensors.items() if "norm" not in name}
    save(tmp_path, {"model": tensors, "optimizer": {"state": some}})
    source = open_dcp(tmp_path, config=HF)
    assert set(source.groups) == {"weights"}
    assert source.format_info["others"] == {"optimizer": len(some)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"'model\.norm\.weight' is missing"),
        (lambda t: t.pop("lm_head.weight"), r"'lm_head\.weight' is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), "no embedding of a Llama"),
        (lambda t: t.update({"model.norm.weight": torch.ones(17)}), r"norm\.weight has shape \[17\]"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}), "q_proj.bias' is not a tensor"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}), "is not a tensor of this model"),
        (lambda t: t.update({"ema.model.embed_tokens.weight": torch.ones(1)}), "several models, behind '', 'ema.'"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, message):
    tensors = state()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(save(tmp_path, tensors), config=HF)


def test_old_buffers_are_left_out(tmp_path):
    tensors = state()
    save(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    same(open_dcp(tmp_path, config=HF), "weights", tensors)


def grid(shape, rng):
    """Cuts a shape into boxes by random lines, some of them without elements."""
    boxes = [((), ())]
    for size in shape:
        ends = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randrange(3)))})
        spans = list(pairwise(ends)) + ([(size, size)] if rng.random() < 0.2 else [])
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in spans]
    return boxes


def save_chunks(folder, tensors, rng):
    """A checkpoint as ranks with any slices write it: chunks by torch.save, `.metadata` by us (torch reads it too)."""
    folder.mkdir()
    written = {}
    with ExitStack() as stack:
        opened = [stack.enter_context((folder / f"__{rank}_0.distcp").open("wb")) for rank in range(3)]
        for key, tensor in tensors.items():
            chunks = []
            for offset, shape in grid(tensor.shape, rng):
                rank = rng.randrange(3)
                file, begin = opened[rank], opened[rank].tell()
                part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                torch.save(part.clone(), file)
                chunks.append(DcpChunk((offset, shape), f"__{rank}_0.distcp", begin, file.tell() - begin))
            written[key] = ChunkedTensor(TensorSpec("F32", tuple(tensor.shape)), tuple(chunks))
    (folder / ".metadata").write_bytes(dump_metadata(written))
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_torch_reads_our_metadata_of_chunks(tmp_path, seed):
    rng, tensors = random.Random(seed), state()
    folder = save_chunks(tmp_path / "x", {**tensors, "scalar": torch.tensor(3.0)}, rng)
    empty = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    loaded = load(folder, {**empty, "scalar": torch.ones(())})
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    assert loaded["scalar"] == 3
    same(open_dcp(folder, config=HF), "weights", tensors)


@settings(max_examples=40, deadline=None)
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
    with TensorReader(folder) as reader:
        found = reader.read(source.weights, name, ((first, left), (rows, columns)))
    assert found.tobytes() == tensors[name].numpy()[first : first + rows, left : left + columns].tobytes()


def write(folder, tensors, metadata=None, block=777, **more):
    codes = {torch.float32: "F32", torch.bfloat16: "BF16"}
    specs = [(key, TensorSpec(codes[tensor.dtype], tuple(tensor.shape))) for key, tensor in tensors.items()]
    writer = DcpWriter(folder, specs, metadata or {}, **more)
    data = np.concatenate([t.reshape(-1).view(torch.uint8).numpy() for t in tensors.values() if t.numel()])
    try:
        for start in range(0, data.size, block):
            writer.append(data[start : start + block])
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_reads_what_we_write(tmp_path, dtype):
    tensors = {**state(dtype=dtype), "scalar": torch.tensor(2.0), "empty": torch.ones(0, 4)}
    for name, more in {"one": {}, "many": {"max_file_bytes": 3000}, "each": {"max_file_bytes": 1}}.items():
        folder = write(tmp_path / name, tensors, **more)
        loaded = load(folder, {key: torch.full_like(tensor, 9) for key, tensor in tensors.items()})
        assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
        torch_file = tmp_path / f"{name}.pt"
        dcp_to_torch_save(folder, torch_file)
        unflattened = torch.load(torch_file, weights_only=True)
        assert all(torch.equal(unflattened[key], tensor) for key, tensor in tensors.items())
        files = sorted(path.name for path in folder.iterdir())
        n_files = {"one": 1, "each": len(tensors)}.get(name, len(files) - 1)
        assert files == sorted([".metadata", *(f"__0_{i}.distcp" for i in range(n_files))])
        assert name == "one" or n_files > 2
    again = write(tmp_path / "again", tensors, block=10**9)
    assert (again / "__0_0.distcp").read_bytes() == (tmp_path / "one" / "__0_0.distcp").read_bytes()
    assert (again / ".metadata").read_bytes() == (tmp_path / "one" / ".metadata").read_bytes()


def test_our_metadata_says_what_torchs_says(tmp_path):
    tensors = state()
    theirs = pickle.loads((save(tmp_path / "a", tensors) / ".metadata").read_bytes())
    ours = pickle.loads((write(tmp_path / "b", tensors) / ".metadata").read_bytes())
    assert ours.version == theirs.version
    assert ours.planner_data == theirs.planner_data
    for key, item in theirs.state_dict_metadata.items():
        # Newer versions of torch also note strides, which mean nothing for what is stored.
        properties = replace(item.properties, strides=None) if hasattr(item.properties, "strides") else item.properties
        assert ours.state_dict_metadata[key] == replace(item, properties=properties)
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert type(ours.storage_meta) is type(theirs.storage_meta)


def test_metadata_texts_lie_beside(tmp_path):
    folder = write(tmp_path / "x", state(), {"step": "3"})
    assert (folder / "metadata.json").read_text() == '{\n  "step": "3"\n}\n'
    same(open_dcp(folder, config=HF), "weights", state())


def test_conversion_into_a_folder_and_back(tmp_path):
    tensors = state(TIED, dtype=torch.bfloat16)
    source = open_dcp(save(tmp_path / "a", in_dialect(tensors, "titan", TIED)), config=config_to_hf(TIED))
    reports = []
    convert(
        source,
        dcp_target(source, max_file_bytes=2000),
        tmp_path / "b",
        progress=lambda *now: reports.append(now),
    )
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    loaded = load(tmp_path / "b", {key: torch.zeros_like(tensor) for key, tensor in both.items()})
    assert all(torch.equal(loaded[key], tensor) for key, tensor in both.items())
    again = open_dcp(tmp_path / "b", config=config_to_hf(TIED))
    assert again.format_info == {"names": "hf", "prefix": "", "others": {}}
    same(again, "weights", both)
    assert reports[-1][:2] == (sum(2 * t.numel() for t in both.values()),) * 2
    convert(source, dcp_target(source, dtype="F32"), tmp_path / "c")
    same(open_dcp(tmp_path / "c", config=config_to_hf(TIED)), "weights", {k: t.float() for k, t in both.items()})


def test_the_marker_comes_last_and_everything_is_on_the_disk(tmp_path, calls, monkeypatch):
    folder = tmp_path / "x"
    with calls.recording(monkeypatch):
        write(folder, state(), max_file_bytes=2000)
    log = [(name, finished_name(Path(what).name)) for name, what in calls.log]
    marker = log.index(("open", ".metadata"))
    n_files = len(list(folder.glob("*.distcp")))
    assert n_files > 2
    for i in range(n_files):
        file = f"__0_{i}.distcp"
        assert max(i for i, entry in enumerate(log) if entry == ("write", file)) < log.index(("fsync", file)) < marker
    assert log.index(("fsync", "x")) < marker
    assert log[-1] in (("fsync", "x"), ("close", "x"))
    rename = next(i for i, (name, _) in enumerate(log) if name == "rename")
    assert log.index(("fsync", ".metadata")) < rename


def test_a_writer_that_fails_leaves_no_marker_and_no_descriptor(tmp_path):
    before = open_files()
    a_few = [("a", TensorSpec("F32", (2,))), ("b", TensorSpec("F32", (1,)))]
    writer = DcpWriter(tmp_path / "a", a_few, {})
    with pytest.raises(AssertionError, match="more bytes"):
        writer.append(np.zeros(13, np.uint8))
    writer.abort()
    writer = DcpWriter(tmp_path / "b", a_few, {})
    writer.append(np.zeros(8, np.uint8))
    with pytest.raises(AssertionError, match="b is incomplete"):
        writer.close()
    writer.abort()
    assert not list(tmp_path.glob("*/.metadata"))
    assert open_files() == before


def test_every_failing_call_is_told(fast_path, calls, monkeypatch, writing):
    tensors = {"none": torch.ones(0), "a": torch.ones(40, 5), "b": torch.ones(3), "c": torch.ones(2, 2)}
    with calls.recording(monkeypatch):
        write(fast_path / "good", tensors, max_file_bytes=1500)
    log = list(calls.log)
    rename = next(i for i, (name, _) in enumerate(log) if name == "rename")
    assert len([what for name, what in log if name == "fsync"]) == 8  # parent, four files, folder, marker, folder
    before = open_files()
    for i, (name, _) in enumerate(log):
        folder = fast_path / f"bad-{i}"
        with calls.recording(monkeypatch, fail_at=i, error=errno.EIO):
            if name == "fcntl":
                continue
            with pytest.raises(OSError, match="Input/output error"):
                write(folder, tensors, max_file_bytes=1500)
        assert (folder / ".metadata").exists() == (i > rename), log[i]
        assert open_files() == before, log[i]
    with calls.recording(monkeypatch, fail_at=-1, short_writes=True):
        write(fast_path / "short", tensors, max_file_bytes=1500)
    for path in (fast_path / "good").iterdir():
        assert (fast_path / "short" / path.name).read_bytes() == path.read_bytes()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile(metadata, evil):
    """Name → a `.metadata` that torch would run."""
    yield "planner_data", replace(metadata, planner_data=evil)
    yield "storage_meta", replace(metadata, storage_meta=replace(metadata.storage_meta, checkpoint_id=evil))
    yield "version", replace(metadata, version=evil)
    for name in ("state_dict_metadata", "storage_data"):
        changed = copy.copy(getattr(metadata, name))
        changed[next(iter(changed))] = evil
        yield f"{name} value", replace(metadata, **{name: changed})
    tensor = copy.deepcopy(metadata.state_dict_metadata["model.norm.weight"])
    tensor.chunks.append(evil)
    items = {**metadata.state_dict_metadata, "model.norm.weight": tensor}
    yield "chunks", replace(metadata, state_dict_metadata=items)
    yield "everything", evil


def test_metadata_with_code_is_refused_and_not_run(tmp_path):
    folder = save(tmp_path / "x", state())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for protocol in (2, 4, 5):
        for i, (name, changed) in enumerate(hostile(metadata, Evil(made := tmp_path / "made"))):
            made.unlink(missing_ok=True)
            data = pickle.dumps(changed, protocol)
            (folder / ".metadata").write_bytes(data)
            with pytest.raises(CheckpointError, match=r"'posix\.system'.*nothing of the file was executed"):
                open_dcp(folder, config=HF)
            assert not made.exists()
            pickle.loads(data)
            assert made.exists(), f"{i} {name}: not hostile, so the test shows nothing"


def changed_metadata(folder, change):
    """Loads `.metadata` as torch does, lets `change` spoil it, and writes it back."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    result = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if result is None else result))


def set_info(**fields):
    def change(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == "model.norm.weight")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


def set_chunk(**fields):
    def change(metadata):
        chunk = metadata.state_dict_metadata["model.norm.weight"].chunks[0]
        for name, value in fields.items():
            setattr(chunk, name, value)

    return change


def set_tensor(**fields):
    def change(metadata):
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["model.norm.weight"], name, value)

    return change


def set_dtype(dtype):
    def change(metadata):
        metadata.state_dict_metadata["model.norm.weight"].properties.dtype = dtype

    return change


def twice(metadata):
    metadata.state_dict_metadata["model.norm.weight"].chunks *= 2


def without_place(metadata):
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "model.norm.weight"}


Size = torch.Size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_info(relative_path="../x/__0_0.distcp"), "not a file of this folder"),
        (set_info(relative_path="/etc/passwd"), "not a file of this folder"),
        (set_info(relative_path=".."), "not a file of this folder"),
        (set_info(relative_path=""), "not a file of this folder"),
        (set_info(relative_path=7), "not a file of this folder"),
        (set_info(relative_path="__9_0.distcp"), "No such file"),
        (set_info(relative_path=".metadata", offset=0, length=64), "norm.weight: neither a file of torch nor"),
        (set_info(offset=-1), "an invalid position"),
        (set_info(length=True), "an invalid position"),
        (set_info(offset=2**62), "expected at bytes"),
        (set_info(length=10**9), "expected at bytes"),
        (set_info(length=100), "norm.weight: "),
        (set_info(length=0), "norm.weight: is not a torch.save file"),
        (set_info(offset=1), "norm.weight: is not a torch.save file"),
        (set_info(offset=0), "norm.weight: holds F32|not from the same save|its end is not"),
        (set_info(transform_descriptors=["zstd"]), "with an extension"),
        (set_chunk(offsets=Size([1])), "does not lie in"),
        (set_chunk(offsets=Size([0, 0])), "does not lie in"),
        (set_chunk(offsets=Size([-1])), "shape, stride or offset"),
        (set_chunk(sizes=Size([17])), "does not lie in"),
        (set_chunk(sizes=Size([15])), "the slices hold 15 of 16"),
        (set_chunk(sizes=(16,)), "a tuple instead of a TorchSize"),
        (set_chunk(sizes=Size([0])), "no slice at all"),
        (set_tensor(size=Size([17])), "the slices hold 16 of 17"),
        (set_tensor(chunks=[]), "no slice at all"),
        (set_tensor(chunks=()), "a tuple instead of a list"),
        (set_tensor(chunks=[3]), "a int instead of a ChunkStorageMetadata"),
        (set_tensor(properties=None), "has no properties"),
        (set_dtype(torch.bfloat16), r"holds F32 \[16\], .metadata says BF16"),
        (set_dtype(torch.complex64), "torch.complex64"),
        (set_dtype(None), "has no dtype"),
        (twice, "two slices overlap"),
        (without_place, "has no position; the checkpoint is incomplete"),
        (lambda m: replace(m, storage_data=None), "a NoneType instead of a dict"),
        (lambda m: replace(m, state_dict_metadata=[]), "a list instead of a dict"),
        (lambda m: replace(m, state_dict_metadata={3: None}), "a key of type int"),
        (lambda m: {"a": 1}, "a dict instead of a Metadata"),
        (lambda m: m.storage_meta, "instead of a Metadata"),
        (lambda m: replace(m, storage_data={"a": 1}), "a str instead of a MetadataIndex"),
    ],
)
def test_metadata_that_lies_is_refused(tmp_path, change, message):
    folder = save(tmp_path / "x", state())
    changed_metadata(folder, change)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(folder, config=HF)


def test_broken_folders_are_refused(tmp_path):
    tensors = state()
    folder = save(tmp_path / "x", tensors)
    [file] = folder.glob("*.distcp")
    raw, marker = file.read_bytes(), (folder / ".metadata").read_bytes()
    for cut in (1, 60, len(raw) // 2, len(raw)):
        file.write_bytes(raw[: len(raw) - cut])
        with pytest.raises(CheckpointError, match="truncated"):
            open_dcp(folder, config=HF)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_dcp(folder, config=HF)
    file.write_bytes(raw)
    for cut in (1, 20, len(marker) // 2, len(marker)):
        (folder / ".metadata").write_bytes(marker[: len(marker) - cut])
        with pytest.raises(CheckpointError, match=r"\.metadata: "):
            open_dcp(folder, config=HF)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_dcp(folder, config=HF)


def check_all(folder, tensors):
    for path in folder.glob("*.distcp"):
        for stored in read_checksums(folder, tensors, path.name):
            check_range(path, stored, lambda n_bytes: None)


def test_every_flipped_bit_of_a_chunk_is_found(memory):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    for folder in (save(memory / "flips-theirs", tensors), write(memory / "flips-ours", tensors)):
        metadata = read_metadata(folder)
        check_all(folder, metadata.tensors)
        [file] = folder.glob("*.distcp")
        raw = file.read_bytes()
        for [stored] in locate_chunks(folder, metadata.tensors).values():
            for bit in range(8 * stored.shape[0]):
                flipped = bytearray(raw)
                flipped[stored.byte_offset + bit // 8] ^= 1 << bit % 8
                file.write_bytes(flipped)
                with pytest.raises(CheckpointError, match=r"distcp: the bytes of [ab]: record 'data/0' differ"):
                    check_all(folder, metadata.tensors)
        file.write_bytes(raw[:-1])
        with pytest.raises(CheckpointError, match="truncated"):
            check_all(folder, metadata.tensors)
    inside = save(memory / "flips-safetensors", tensors, serialization_format=SerializationFormat.SAFETENSORS)
    assert read_checksums(inside, read_metadata(inside).tensors, "__0_0.distcp") == ()


def test_files_of_two_saves_are_told_apart_by_shape(tmp_path):
    folder = save(tmp_path / "a", {"a": torch.ones(4, 2), "b": torch.ones(2, 4)})
    changed_metadata(folder, swap)
    with pytest.raises(CheckpointError, match="not from the same save"):
        locate_chunks(folder, read_metadata(folder).tensors)


def swap(metadata):
    a, b = metadata.storage_data
    metadata.storage_data[a], metadata.storage_data[b] = metadata.storage_data[b], metadata.storage_data[a]


def test_a_chunk_that_is_no_tensor_is_refused(tmp_path):
    folder = save(tmp_path / "x", state())
    changed_metadata(folder, set_info(relative_path="__1_0.distcp", offset=0))
    torch.save({"a": torch.ones(16)}, folder / "__1_0.distcp")
    changed_metadata(folder, set_info(length=(folder / "__1_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match="holds a dict instead of a tensor"):
        open_dcp(folder, config=HF)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_damaged_metadata_is_refused_or_still_consistent(memory, rng):
    folder = memory / "fuzz-dcp"
    if not folder.exists():
        save(folder, {"a": torch.ones(4, 2), "b": torch.ones(3)})
    raw = bytearray((folder / ".metadata").read_bytes())
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    try:
        metadata = parse_metadata(bytes(raw), "x")
    except CheckpointError:
        return
    assert all(isinstance(tensor.spec, TensorSpec) for tensor in metadata.tensors.values())
