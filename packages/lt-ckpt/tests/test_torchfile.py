"""Files of torch.save: where torch says that bytes lie, files with room for tensors, and what is refused.

These pin what is half private in torch: they run with 2.9 and with the newest.
"""

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lt_ckpt import CheckpointError, files
from lt_ckpt.laid_out_files import pwrite
from lt_ckpt.stored_slices import read_box
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_ckpt.torchfile import tensor_files
from lt_ckpt.torchfile.file import DTYPES, load_pt, read_state_dict, write_pt
from lt_ckpt.torchfile.tensor_files import TensorFiles


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(path: Path, array: StoredArray, box=None) -> bytes:
    whole = (0,) * len(array.spec.shape), array.spec.shape
    return read_box(path.parent, [array.stored_slice(path.name)], box or whole, array.spec.dtype, "x").tobytes()


BASE = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
VIEWS = {
    "whole": BASE,
    "rows": BASE[3:7],
    "columns": BASE[:, 2:5],
    "every third row": BASE[1::3],
    "transposed": BASE.T,
    "box of the transposed": BASE.T[2:5, 3:9],
    "backwards strides": BASE.view(3, 4, 10).permute(2, 0, 1),
    "expanded": BASE[:1].expand(4, 10),
    "scalar": torch.tensor(7.0),
    "element": BASE[4, 5],
    "empty": torch.ones(0, 3),
    "parameter": torch.nn.Parameter(BASE.clone()),
}


@pytest.mark.parametrize("span_bytes", [files.BLOCK_BYTES, 48])
def test_any_view_of_any_storage_is_read(tmp_path, monkeypatch, span_bytes):
    monkeypatch.setattr(files, "BLOCK_BYTES", span_bytes)
    path = tmp_path / "views.pt"
    torch.save({**VIEWS, "nested": [{"a": (BASE[2:], 3, None, "text")}]}, path)
    tree = load_pt(path)
    for name, tensor in VIEWS.items():
        assert tree[name].spec == TensorSpec("F32", tuple(tensor.shape))
        assert read(path, tree[name]) == bits(tensor.detach()), name
        if tensor.dim() == 2 and tensor.numel():
            part = ((0, 1), (tensor.shape[0], tensor.shape[1] - 1))
            assert read(path, tree[name], part) == bits(tensor.detach()[:, 1:]), name
    inner, *plain = tree["nested"][0]["a"]
    assert (read(path, inner), plain) == (bits(BASE[2:]), [3, None, "text"])
    os.truncate(path, min(array.byte_offset for array in map(tree.get, VIEWS) if array.spec.n_bytes))
    for name in ("whole", "every third row", "transposed", "backwards strides"):  # cut after it was opened
        with pytest.raises(CheckpointError, match="the file is truncated"):
            read(path, tree[name])


@pytest.mark.parametrize("code", DTYPES)
def test_room_for_every_dtype_is_filled_in_any_order(tmp_path, code):
    path = tmp_path / "x.pt"
    dtype = DTYPES[code]
    tensors = {str(i): torch.arange(2 * 3 * (i + 1)).view(2, -1).to(dtype) for i in range(3)}
    write_pt(path, OrderedDict((key, TensorSpec(code, tuple(t.shape))) for key, t in tensors.items()))
    placed = load_pt(path)
    for key in reversed(tensors):
        pwrite((path, placed[key].byte_offset), memoryview(bits(tensors[key])))
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert type(loaded) is OrderedDict
        for key, tensor in tensors.items():
            assert loaded[key].dtype == dtype
            assert bits(loaded[key]) == bits(tensor)
    assert all(array.byte_offset % 64 == 0 for array in placed.values())


def test_room_takes_no_memory_and_is_zeros(tmp_path):
    path = tmp_path / "x.pt"
    write_pt(path, {"a": TensorSpec("BF16", (2**15, 2**14)), "b": TensorSpec("F32", ())})
    assert path.stat().st_size > 2**30
    assert path.stat().st_blocks * 512 < 2**20, "not sparse"
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert (loaded["b"], loaded["a"][-1, -1]) == (0, 0)


def test_torch_reads_and_writes_one_file_of_a_kind(tmp_path, monkeypatch):
    n_read = 0

    def counted(path, real=tensor_files.load_pt):
        nonlocal n_read
        n_read += 1
        return real(path)

    monkeypatch.setattr(tensor_files, "load_pt", counted)
    kinds = [lambda i: BASE + i, lambda i: (BASE + i).bfloat16(), lambda i: (BASE + i)[:, 2:5], lambda i: BASE.T + i]
    known = TensorFiles()
    for i in range(40):
        torch.save(kinds[i % 4](i), tmp_path / f"tensor_{i}.pt")
        array = known.locate(tmp_path / f"tensor_{i}.pt", "x")
        assert read(tmp_path / f"tensor_{i}.pt", array) == bits(kinds[i % 4](i)), i
    # Each kind with one and with two digits in its name; a view's head has bytes of its storage in it.
    assert n_read <= 6 + 10
    for i in range(20):
        place = known.lay_out(tmp_path / f"made_{i}.pt", TensorSpec("F32", (12, 10)))
        pwrite(place, memoryview(bits(BASE * i)))
    for i in range(20):
        assert torch.equal(torch.load(tmp_path / f"made_{i}.pt", weights_only=True), BASE * i)
        assert torch.equal(torch.load(tmp_path / f"made_{i}.pt", weights_only=True, mmap=True), BASE * i)


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def cut(path: Path, n: int) -> None:
    path.write_bytes(path.read_bytes()[:-n])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save({"w": BASE, "evil": Runs(path.with_name("ran"))}, path), r"GLOBAL posix\.mkdir"),
        (lambda path: path.write_bytes(pickle.dumps(Runs(path.with_name("ran")))), "torch cannot read it"),
        (lambda path: torch.save(BASE, path, _use_new_zipfile_serialization=False), "save it again"),
        (lambda path: (torch.save(BASE, path), cut(path, 30)), "whole file of torch.save"),
        (lambda path: path.write_bytes(b""), "torch cannot read it"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: torch.save(BASE.to_sparse(), path), "torch"),
        (lambda path: torch.save(torch.ones(2, dtype=torch.complex64), path), "complex64"),
    ],
)
def test_what_is_no_plain_file_of_tensors_is_refused(tmp_path, write, message):
    path = tmp_path / "x.pt"
    write(path)
    with pytest.raises(CheckpointError, match=message):
        load_pt(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": BASE}, ""),
        ({"model": {"a": BASE}, "step": 3}, ""),
        ({"module": {"a": BASE}, "ema": {"a": BASE + 1}}, ""),
        ({"a": BASE, "step": 3}, "'step' is not a tensor but a int"),
        ({"model": {"a": BASE}, "state_dict": {"a": BASE}}, "no state dict .its keys: 'model', 'state_dict'"),
        ({"weights": {"a": BASE}}, "no state dict .its keys: 'weights'"),
        ([BASE], "holds a list"),
    ],
)
def test_a_state_dict_is_found(tmp_path, content, message):
    path = tmp_path / "x.pt"
    torch.save(content, path)
    if message:
        with pytest.raises(CheckpointError, match=message):
            read_state_dict(path)
        return
    found = read_state_dict(path)
    assert list(found) == ["a"]
    assert read(path, found["a"]) == bits(BASE)
