import errno
import io
import os
import random
import struct
import warnings
import zipfile
from collections import OrderedDict
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError, TensorSpec
from lt_ckpt.copy_plan import StoredSlice
from lt_ckpt.read_verification import check_range
from lt_ckpt.source import TensorGroup, TensorReader
from lt_ckpt.torchfile.crc import crc32 as chosen_crc32
from lt_ckpt.torchfile.file import (
    StreamedTensor,
    TorchWriter,
    iter_tensors,
    load_pt,
    read_checksums,
    read_custom_metadata,
    read_state_dict,
    write_pt,
)
from lt_ckpt.torchfile.pickle_writer import Call, Global, PersistentId, dumps
from lt_ckpt.torchfile.safe_globals import (
    TENSOR_REFERENCE,
    TORCH_DTYPES,
    TensorReference,
    TorchDtype,
    TorchSize,
    TorchTensor,
    make_tensor_node,
)
from lt_ckpt.torchfile.stored_zip import CACHE_BYTES, StoredZip, read_zip
from lt_ckpt.torchfile.zip_writer import StoredZipWriter

CODES = {getattr(torch, name): code for code, name in TORCH_DTYPES.items()}


def open_files():
    """Number of open files, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def filled(seed, dtype, shape):
    """A tensor of random bits (a bool of random truths)."""
    code, rng = CODES[dtype], np.random.default_rng(seed)
    data = rng.integers(0, 2 if code == "BOOL" else 256, TensorSpec(code, tuple(shape)).n_bytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)


def state_dict():
    """Every dtype, empty and 0-dim tensors, and more tensors than one opcode's worth of memo numbers."""
    tensors = OrderedDict(
        (f"of.{name}", filled(i, getattr(torch, name), (i, 3))) for i, name in enumerate(TORCH_DTYPES.values())
    )
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    for i in range(120):
        tensors[f"layer.{i}.weight"] = filled(i, torch.bfloat16, (i % 5, 2))
    return tensors


def specs(tensors):
    return [(name, TensorSpec(CODES[t.dtype], tuple(t.shape))) for name, t in tensors.items()]


def write(path, tensors, block=None, metadata=None):
    writer = TorchWriter(path, specs(tensors), metadata or {})
    everything = np.concatenate([raw_bytes(t) for t in tensors.values()] or [np.empty(0, np.uint8)])
    step = block or max(1, everything.size)
    for start in range(0, everything.size, step):
        writer.append(everything[start : start + step])
    writer.close()
    return path


def bits(path, held):
    """Reads a tensor as conversions do."""
    zeros = (0,) * len(held.spec.shape)
    stored = StoredSlice(
        file=path.name,
        byte_offset=held.byte_offset,
        offset=zeros,
        shape=held.spec.shape,
        array_shape=held.array_shape,
        array_offset=held.array_offset,
        transposed=held.transposed,
    )
    with TensorReader(path.parent) as reader:
        return reader.read(TensorGroup(specs={"x": held.spec}, locations={"x": (stored,)}), "x").tobytes()


def same(path, held, tensors):
    assert list(held) == list(tensors)
    for name, tensor in tensors.items():
        assert held[name].spec == TensorSpec(CODES[tensor.dtype], tuple(tensor.shape)), name
        assert bits(path, held[name]) == raw_bytes(tensor).tobytes(), name


def loads_equal(loaded, tensors):
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].stride() == tensor.stride()
        assert raw_bytes(loaded[name]).tobytes() == raw_bytes(tensor).tobytes(), name


def check_all(path):
    for stored in read_checksums(path):
        check_range(path, stored, lambda n_bytes: None)


def test_torch_reads_what_we_write(tmp_path):
    tensors = state_dict()
    path = write(tmp_path / "x.pt", tensors, metadata={"step": "7", "ä": "ö"})
    loaded = torch.load(path, weights_only=True)
    assert type(loaded) is OrderedDict
    loads_equal(loaded, tensors)
    loads_equal(torch.load(path, weights_only=True, mmap=True), tensors)
    loads_equal(torch.load(io.BytesIO(path.read_bytes()), weights_only=True), tensors)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        begins = [info.header_offset + 30 + len(info.filename) + len_extra(path, info) for info in archive.infolist()]
    assert {begin % 64 for begin in begins} == {0}
    assert read_custom_metadata(path) == {"step": "7", "ä": "ö"}
    check_all(path)
    same(path, read_state_dict(path), tensors)


def len_extra(path, info):
    with path.open("rb") as file:
        file.seek(info.header_offset + 28)
        return struct.unpack("<H", file.read(2))[0]


def test_the_file_is_the_one_that_torch_writes(tmp_path):
    tensors = state_dict()
    torch.save(tensors, tmp_path / "archive.pt")
    theirs = (tmp_path / "archive.pt").read_bytes()
    ours = write(tmp_path / "ours.pt", tensors).read_bytes()
    assert len(ours) == len(theirs)
    with zipfile.ZipFile(io.BytesIO(theirs)) as a, zipfile.ZipFile(io.BytesIO(ours)) as b:
        assert a.namelist() == b.namelist()
        number = b.getinfo("archive/.data/serialization_id")
        for name in a.namelist()[:-1]:
            assert a.read(name) == b.read(name), name
    # All else is equal too, but for that record's forty digits and its checksum, here and in the directory.
    tail = ours.index(b"PK\1\2", number.header_offset)
    assert ours[: number.header_offset] == theirs[: number.header_offset]
    different = [i for i in range(number.header_offset, len(ours)) if ours[i] != theirs[i]]
    assert len([i for i in different if i < tail]) <= 44
    assert len([i for i in different if i >= tail]) <= 4


def test_offsets_that_torch_computes_without_reading_are_right(tmp_path):
    tensors = state_dict()
    path = write(tmp_path / "x.pt", tensors)
    options = torch.utils.serialization.config.load
    options.calculate_storage_offsets = True
    try:
        loads_equal(torch.load(path, weights_only=True, mmap=True), tensors)
    finally:
        options.calculate_storage_offsets = False


@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
def test_blocks_of_any_size_make_the_same_bytes(tmp_path, block):
    tensors = {name: tensor for i, (name, tensor) in enumerate(state_dict().items()) if i < 20}
    wanted = write(tmp_path / "whole.pt", tensors).read_bytes()
    assert write(tmp_path / f"{block}.pt", tensors, block).read_bytes() == wanted


def test_a_file_without_tensors(tmp_path):
    path = write(tmp_path / "x.pt", {})
    assert torch.load(path, weights_only=True) == {}
    with pytest.raises(CheckpointError, match="no tensors at the top"):
        read_state_dict(path)


def test_the_lengths_are_the_callers_to_keep(tmp_path):
    a_few = [("a", TensorSpec("F32", (2,))), ("b", TensorSpec("F32", (1,)))]
    with pytest.raises(AssertionError, match="are missing"):
        TorchWriter(tmp_path / "a", a_few, {}).close()
    writer = TorchWriter(tmp_path / "b", a_few, {})
    with pytest.raises(AssertionError, match="more bytes"):
        writer.append(np.zeros(13, np.uint8))
    writer.abort()
    with pytest.raises(FileExistsError):
        TorchWriter(tmp_path / "b", a_few, {})


def test_a_writer_gives_its_descriptor_back(tmp_path):
    before = open_files()
    TorchWriter(tmp_path / "a", [("a", TensorSpec("F32", (2,)))], {}).abort()
    with pytest.raises(AssertionError):
        TorchWriter(tmp_path / "b", [("a", TensorSpec("F32", (2,)))], {}).close()
    with pytest.raises(TypeError):
        TorchWriter.from_tree(tmp_path / "c", {"a": object()})
    with pytest.raises(CheckpointError):
        load_pt(tmp_path / "a")
    assert open_files() == before


def test_close_puts_the_file_on_the_disk(tmp_path, calls, monkeypatch):
    with calls.recording(monkeypatch):
        write(tmp_path / "x.pt", {"a": torch.ones(3)})
    names = [name for name, what in calls.log if what == str(tmp_path / "x.pt")]
    assert names[0] == "open"
    assert names[-3:] == ["write", "fsync", "close"]


def test_every_failing_call_is_told(fast_path, calls, monkeypatch, writing):
    tree = {"text": "x" * 70_000, "a": np.arange(300, dtype="<f4"), "b": [np.ones(3, "<f8")]}
    with calls.recording(monkeypatch):
        write_pt(fast_path / "good", tree)
    log = list(calls.log)
    before = open_files()
    for i, (name, _) in enumerate(log):
        if name == "fcntl":
            continue
        with (
            calls.recording(monkeypatch, fail_at=i, error=errno.EIO),
            pytest.raises(CheckpointError, match="writing failed: Input/output error"),
        ):
            write_pt(fast_path / f"bad-{i}", tree)
        assert open_files() == before, log[i]
    with calls.recording(monkeypatch, fail_at=-1, short_writes=True):
        write_pt(fast_path / "short", tree)
    assert (fast_path / "short").read_bytes() == (fast_path / "good").read_bytes()
    assert torch.load(fast_path / "short", weights_only=True)["a"].tolist() == list(range(300))


def test_we_read_what_torch_writes(tmp_path):
    tensors = state_dict()
    path = tmp_path / "x.pt"
    for value in (tensors, dict(tensors)):
        torch.save(value, path)
        same(path, read_state_dict(path), tensors)
    for protocol in (3, 4, 5):
        torch.save(tensors, path, pickle_protocol=protocol)
        same(path, read_state_dict(path), tensors)
    check_all(path)
    assert read_custom_metadata(path) == {}


class Marked(torch.Tensor):
    pass


def test_views_parameters_and_shared_storages(tmp_path):
    base = filled(3, torch.float32, (12, 10))
    module = torch.nn.Linear(3, 4)
    module.weight.tensor_model_parallel = True
    tagged = torch.ones(3)
    tagged.note = "x"
    tensors = {
        "rows": base[2:5],
        "columns": base[:, 3:7],
        "box": base[1:4, 8:],
        "transposed": base.t(),
        "box of it": base.t()[2:5, 4:],
        "vector": base.reshape(-1)[7:20],
        "one column": base[:, 9:],
        "itself": base,
        "parameter": module.weight,
        "buffer": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "tagged": tagged,
    }
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    same(path, read_state_dict(path), {name: tensor.detach() for name, tensor in tensors.items()})
    torch.save(module.state_dict(), path)
    same(path, read_state_dict(path), {name: tensor.detach() for name, tensor in module.state_dict().items()})
    assert path.stat().st_size < 4000
    for name, tensor in {"steps": base[::2, ::2], "expanded": torch.ones(1, 3).expand(4, 3)}.items():
        torch.save({"good": base, "deep": [{name: tensor}]}, path)
        with pytest.raises(CheckpointError, match=rf"x\.pt: deep\.0\.{name}: its strides"):
            load_pt(path)


def test_the_state_dict_may_stand_under_a_key(tmp_path):
    path, model = tmp_path / "x.pt", {"a": torch.ones(2)}
    for key in ("model", "state_dict", "model_state_dict", "module"):
        torch.save({key: model, "epoch": 3, "optimizer": {"lr": 0.1}}, path)
        same(path, read_state_dict(path), model)
        same(path, read_state_dict(path, key=key), model)
    torch.save({"model": model, "module": model, "net": model}, path)
    with pytest.raises(CheckpointError, match=r"several of .* \(its dictionaries: 'model', 'module', 'net'\)"):
        read_state_dict(path)
    same(path, read_state_dict(path, key="net"), model)
    with pytest.raises(CheckpointError, match="no dictionary under 'none'"):
        read_state_dict(path, key="none")
    torch.save([1], path)
    with pytest.raises(CheckpointError, match="holds a list"):
        read_state_dict(path)
    torch.save({**model, "step": 3, 4: torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="'step' is not a tensor but a int"):
        read_state_dict(path)
    same(path, read_state_dict(path, strict=False), model)


TREE = {
    "state": {0: {"step": 3, "exp_avg": np.arange(6, dtype="<f4").reshape(2, 3)}, 1: {"exp_avg": np.ones((), "<f8")}},
    "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0, 1], "none": None, "on": True, "name": "ä"}],
    "dtype": TorchDtype("BF16"),
    "shape": TorchSize((2, 3)),
    "bytes": b"\0\xff",
    "empty": b"",
    "large": [-1, 2**40, -(2**70), 70_000, ()],
    "flags": np.array([True, False]),
}


def plain(value):
    """A loaded tree with arrays in place of torch's tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(plain(item) for item in value) if type(value) in (list, tuple) else value


def test_trees_of_plain_values(tmp_path):
    path = tmp_path / "x.pt"
    write_pt(path, TREE)
    loaded = torch.load(path, weights_only=True)
    assert type(loaded["shape"]) is torch.Size
    assert plain(loaded) == {**plain(TREE), "dtype": torch.bfloat16, "shape": torch.Size((2, 3))}
    ours = load_pt(path)
    tensors = {".".join(map(str, keys)): tensor for keys, tensor in iter_tensors(ours)}
    assert list(tensors) == ["state.0.exp_avg", "state.1.exp_avg", "flags"]
    assert bits(path, tensors["state.0.exp_avg"].stored_array) == TREE["state"][0]["exp_avg"].tobytes()
    ours["state"][0]["exp_avg"] = TREE["state"][0]["exp_avg"]
    ours["state"][1]["exp_avg"] = TREE["state"][1]["exp_avg"]
    ours["flags"] = TREE["flags"]
    assert plain(ours) == plain(TREE)
    assert (type(ours["shape"]), type(ours["dtype"])) == (TorchSize, TorchDtype)
    with pytest.raises(CheckpointError, match="already exists"):
        write_pt(path, TREE)
    torch.save(loaded, path)
    again = load_pt(path)
    assert (again["param_groups"], again["large"], again["empty"]) == (ours["param_groups"], ours["large"], b"")


def test_tensors_may_come_in_blocks_when_their_turn_is_there(tmp_path):
    order = []

    def blocks(name, values):
        def parts():
            order.append(name)
            yield from (values[:1], values[1:])

        return StreamedTensor(TensorSpec("BF16", (3,)), parts)

    values = np.arange(3, dtype="<u2")
    write_pt(tmp_path / "x.pt", [blocks("a", values), {"b": blocks("b", values + 9)}], {"made": "here"})
    assert order == ["a", "b"]
    first, second = torch.load(tmp_path / "x.pt", weights_only=True)
    assert first.view(torch.int16).tolist() == [0, 1, 2]
    assert second["b"].view(torch.int16).tolist() == [9, 10, 11]
    assert read_custom_metadata(tmp_path / "x.pt") == {"made": "here"}
    for wrong in (object(), np.array(["x"]), {1, 2}, TorchTensor):
        with pytest.raises(TypeError):
            write_pt(tmp_path / "y.pt", [wrong])
        assert not (tmp_path / "y.pt").exists()


class Reference:
    pass


def test_references_of_torch_xla(tmp_path):
    reference = TensorReference()
    reference.tid = 300
    write_pt(tmp_path / "x.pt", OrderedDict(a=reference))
    with torch.serialization.safe_globals([(Reference, ".".join(TENSOR_REFERENCE))]):
        loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (type(loaded["a"]), loaded["a"].tid) == (Reference, 300)
    assert load_pt(tmp_path / "x.pt")["a"].tid == 300


def archive(path, records, **more):
    """A zip file as Python makes it; its records are stored where nothing else is said."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", **more) as made:
        warnings.simplefilter("ignore")  # a duplicate name
        for name, data in records:
            made.writestr(name, data)
    return path


PICKLE = dumps({"a": make_tensor_node("0", TensorSpec("F32", (2,)))})
GOOD = [("x/data.pkl", PICKLE), ("x/data/0", b"12345678"), ("x/version", b"3")]


def swapped(records, name, data):
    return [(n, data if n == name else d) for n, d in records]


def pickled(data):
    return swapped(GOOD, "x/data.pkl", data)


def storage(kind="FloatStorage", key="0", n=2, tag="storage", module="torch"):
    return PersistentId((tag, Global(module, kind), key, "cpu", n))


def view_of(reference, offset=0, size=(2,), stride=(1,), name="_rebuild_tensor_v2", *more):
    hooks = Call(Global("collections", "OrderedDict"))
    return dumps({"a": Call(Global("torch._utils", name), (reference, offset, size, stride, False, hooks, *more))})


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "0 folders"),
        (GOOD[1:], "TorchScript or other"),
        ([*GOOD, ("x/constants.pkl", b"")], "TorchScript or other"),
        ([*GOOD, ("x/byteorder", b"big")], "not little-endian"),
        ([*GOOD, ("x/../../etc/passwd", b"")], "an invalid name"),
        ([*GOOD, ("/x/a", b"")], "an invalid name"),
        ([*GOOD, ("x", b"")], "an invalid name"),
        ([*GOOD, ("x/a\nb", b"")], "an invalid name"),
        ([*GOOD, ("x/" + "a" * 511, b"")], "an invalid name"),
        ([*GOOD, ("y/a", b"")], "2 folders"),
        ([*GOOD, ("x/data/0", b"87654321")], "occurs twice"),
        (swapped(GOOD, "x/data/0", b"1234567"), "should have 2 elements, its record has 7 bytes"),
        (swapped(GOOD, "x/data/0", b"123456789"), "its record has 9 bytes"),
        (pickled(view_of(storage(n=3))), "should have 3 elements"),
        (pickled(view_of(storage(key="1"))), "storage '1' is missing"),
        (pickled(view_of(storage(key="../data.pkl"))), "storage '../data.pkl' is missing"),
        (pickled(view_of(storage(tag="module"))), "persistent id that is not a storage"),
        (pickled(view_of(storage(n=-1))), "persistent id that is not a storage"),
        (pickled(view_of(storage(n=True))), "persistent id that is not a storage"),
        (pickled(view_of(storage(kind="float32"))), "persistent id that is not a storage"),
        (pickled(view_of(storage(key=0))), "persistent id that is not a storage"),
        (pickled(view_of(PersistentId("0"))), "persistent id that is not a storage"),
        (pickled(view_of(PersistentId(("storage",)))), "persistent id that is not a storage"),
        (pickled(view_of(storage(kind="ComplexFloatStorage", n=1))), "torch.ComplexFloatStorage"),
        (pickled(view_of(storage(kind="UntypedStorage", n=8, module="torch.storage"))),
         "tensor without a storage"),
        (pickled(view_of(None)), "tensor without a storage"),
        (pickled(view_of(storage(), offset=1)), "x: a: its element 2 lies outside of its storage"),
        (pickled(view_of(storage(), offset=-1)), "tensor without a storage"),
        (pickled(view_of(storage(), size=(3,))), "a: its element 2 lies outside"),
        (pickled(view_of(storage(), size=(2**40,), stride=(0,))), "a: its strides"),
        (pickled(view_of(storage(), stride=())), "a: its shape, strides and offset"),
        (pickled(view_of(storage(), 0, (2,), (1,), "_rebuild_tensor_v2", {"conj": True})),
         "conjugated or negated"),
        (pickled(view_of(storage(), 0, (2,), (1,), "_rebuild_tensor_v3", Global("torch", "uint16"))),
         "without a storage or dtype"),
        (pickled(view_of(storage("UntypedStorage", n=8, module="torch.storage"), 0, (2,), (1,),
                                              "_rebuild_tensor_v3", 3)), "without a storage or dtype"),
        (pickled(view_of(storage("UntypedStorage", n=8, module="torch.storage"), 0, (5,), (1,),
                                              "_rebuild_tensor_v3", Global("torch", "uint16"))), "its element 4 lies"),
        (pickled(dumps(Call(Global("posix", "system"), ("true",)))), "refers to 'posix.system'"),
    ],
)  # fmt: skip
def test_hostile_contents_are_refused(tmp_path, records, message):
    path = archive(tmp_path / "x", records)
    with pytest.raises(CheckpointError, match=message):
        read_state_dict(path)


def test_the_good_one_is_read(tmp_path):
    path = archive(tmp_path / "x", GOOD)
    assert bits(path, read_state_dict(path)["a"]) == b"12345678"
    assert raw_bytes(torch.load(path, weights_only=True)["a"]).tobytes() == b"12345678"


def test_compressed_records_are_refused_before_they_are_unpacked(tmp_path):
    bomb = [*GOOD[:1], ("x/data/0", bytes(10_000_000)), GOOD[2]]
    path = archive(tmp_path / "x", bomb, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    with pytest.raises(CheckpointError, match=r"'x/data\.pkl' is compressed"):
        read_state_dict(path)


def test_other_files_are_refused_with_a_remedy(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before version 1\.6; load it with torch\.load"):
        read_state_dict(path)
    for data in (b"", b"P", b"PK", b"PK\3\4" + bytes(100), b"hello, I am text"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"x\.pt: "):
            read_state_dict(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_state_dict(tmp_path / "none")


def patched(path, out, changes):
    raw = bytearray(path.read_bytes())
    for position, data in changes.items():
        raw[position : position + len(data)] = data
    out.write_bytes(raw)
    return out


def test_directories_that_lie_are_refused(tmp_path):
    path = write(tmp_path / "x.pt", {"a": torch.ones(4), "b": torch.ones(4)})
    raw = path.read_bytes()
    lines = [i for i in range(len(raw)) if raw[i : i + 4] == b"PK\1\2"]
    a = next(i for i in lines if raw[i + 46 :].startswith(b"archive/data/0"))
    b = next(i for i in lines if raw[i + 46 :].startswith(b"archive/data/1"))
    end64, locator, end = raw.rindex(b"PK\6\6"), raw.rindex(b"PK\6\7"), raw.rindex(b"PK\5\6")
    local = struct.unpack_from("<L", raw, a + 42)[0]
    four = struct.Struct("<L").pack
    lies = {
        "overlap": {b + 42: raw[a + 42 : a + 46], b + 46: b"archive/data/0"},
        "a longer record": {a + 20: four(800) * 2},
        "sizes that differ": {a + 20: four(15)},
        "a record behind the end": {a + 42: four(len(raw) - 40)},
        "a record far away": {a + 42: four(2**31)},
        "zip64 numbers that are not there": {a + 42: four(2**32 - 1)},
        "a compressed record": {a + 10: b"\x08\0"},
        "a compressed record in its own header": {local + 8: b"\x08\0"},
        "an encrypted record": {a + 8: b"\x09\x08"},
        "other flags": {local + 6: b"\0\0"},
        "another name": {local + 30: b"archive/data/9"},
        "another disk": {a + 34: b"\1\0"},
        "a long name": {a + 28: b"\xff\xff"},
        "fewer entries": {end64 + 24: four(3), end64 + 32: four(3), end + 8: b"\3\0\3\0"},
        "more entries": {end64 + 24: four(99), end64 + 32: four(99), end + 8: b"\x63\0\x63\0"},
        "entries on another disk": {end64 + 24: four(3), end + 8: b"\3\0"},
        "two ends that differ": {end + 8: b"\3\0\3\0"},
        "a directory elsewhere": {end64 + 48: four(64), end + 16: four(64)},
        "a huge directory": {end64 + 40: b"\xff" * 8, end + 12: b"\xff" * 4},
        "a locator elsewhere": {locator + 8: four(5)},
        "several disks": {locator + 16: four(2)},
        "a comment": {end + 20: b"\1\0"},
        "no end": {end: b"PK\5\7"},
        "no zip64 end": {end64: b"PK\6\5"},
        "no directory": {lines[0]: b"PK\1\3"},
        "no header": {local: b"PK\3\5"},
    }
    for name, changes in lies.items():
        with pytest.raises(CheckpointError, match=r"y\.pt: "):
            pytest.fail(f"{name}: {read_state_dict(patched(path, tmp_path / 'y.pt', changes))}")
    for cut in (1, 22, 100, len(raw) // 2, len(raw) - 5):
        (tmp_path / "y.pt").write_bytes(raw[:-cut])
        with pytest.raises(CheckpointError):
            read_state_dict(tmp_path / "y.pt")
    for other in (raw + b"x", b"x" + raw, raw + raw):
        (tmp_path / "y.pt").write_bytes(other)
        with pytest.raises(CheckpointError):
            read_state_dict(tmp_path / "y.pt")


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_refused_or_still_consistent(memory, rng: random.Random):
    path = memory / "fuzz.pt"
    path.unlink(missing_ok=True)
    write(path, {"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)})
    raw = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice([0, 255, rng.randrange(256)])
    if rng.random() < 0.2:
        del raw[rng.randrange(len(raw)) :]
    path.write_bytes(raw)
    try:
        with mock.patch.object(StoredZip, "has_checksums", new=rng.random() < 0.2):  # an attacker leaves them out
            held = read_state_dict(path)
    except CheckpointError:
        return
    for one in held.values():
        assert one.byte_offset >= 0
        assert one.byte_offset + one.spec.n_bytes <= len(raw)


def test_every_flipped_bit_of_a_tensor_is_found(memory):
    path = write(memory / "flips.pt", {"a": filled(1, torch.float32, (4, 4)), "b": filled(2, torch.int64, (3,))})
    raw = path.read_bytes()
    for held in read_state_dict(path).values():
        for bit in range(8 * held.spec.n_bytes):
            at = held.byte_offset + bit // 8
            damaged = patched(path, memory / "flipped.pt", {at: bytes([raw[at] ^ 1 << bit % 8])})
            with pytest.raises(CheckpointError, match=r"record 'data/[01]' differ"):
                check_all(damaged)


def test_files_beyond_four_gigabytes(tmp_path):
    """The headers of a file with a long record, and of records far from the start, without its five billion bytes."""
    headers, position = {}, 0

    def note(data):
        nonlocal position
        if len(data) < 10_000:
            headers[position] = bytes(data)
        position += len(data)

    out, block = StoredZipWriter(note, "archive"), memoryview(bytes(2**26))
    out.begin_record("data/0", 2**32 + 100)
    for _ in range(64):
        out.append(block)
    out.append(block[:100])
    out.end_record()
    out.write_record("data/1", b"12345")
    out.finish()
    path = tmp_path / "x"
    with path.open("wb") as file:
        for at, data in headers.items():
            file.seek(at)
            file.write(data)
    assert path.stat().st_size == position
    with zipfile.ZipFile(path) as made:
        assert [info.file_size for info in made.infolist()] == [2**32 + 100, 5]
        assert made.read("archive/data/1") == b"12345"
    assert struct.unpack_from("<HHQQ", headers[0], 30 + 14) == (1, 16, 2**32 + 100, 0)
    with zipfile.ZipFile(path) as made, path.open("rb") as file:
        far = made.getinfo("archive/data/1").header_offset
        file.seek(far + 30 + 14)
        assert struct.unpack("<HHQ", file.read(12)) == (1, 8, far)
    with path.open("rb") as file:

        def read(at, n):
            file.seek(at)
            return file.read(n)

        records = read_zip(read, 0, position, "x").records
    assert [(r.n_bytes, r.byte_offset % 64) for r in records.values()] == [(2**32 + 100, 0), (5, 0)]


@pytest.mark.parametrize("n_tensors", [1, 20])
def test_an_archive_takes_few_reads(tmp_path, n_tensors):
    """Each is a round trip on a network file system: the end with the directory, the start, one for each far record."""
    path = tmp_path / "x.pt"
    torch.save({str(n): torch.zeros(10_000) for n in range(n_tensors)}, path)
    reads = []
    with path.open("rb") as file:

        def read(at, n):
            reads.append(n)
            file.seek(at)
            return file.read(n)

        assert len(read_zip(read, 0, path.stat().st_size, "x").records) > n_tensors
    assert len(reads) <= 3 + n_tensors
    assert max(reads) <= CACHE_BYTES


@pytest.mark.parametrize("library", ["zlib", "isal.isal_zlib"])
def test_checksums_are_the_same_whichever_library_makes_them(library: str) -> None:
    crc32 = pytest.importorskip(library).crc32
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8).data
    for cut in (0, 1, 17, 65_536, 100_003):
        assert chosen_crc32(data[cut:], chosen_crc32(data[:cut], 0)) == crc32(data[cut:], crc32(data[:cut], 0))
    assert chosen_crc32(b"123456789", 0) == 0xCBF43926, "the check value of the standard"
