import json

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lt_ckpt import CheckpointError, TensorSpec
from lt_ckpt.tensorfile import file_order, read_header, write_safetensors

ENTRIES = {
    "bytes": TensorSpec("U8", (3,)),
    "half": TensorSpec("BF16", (2, 3)),
    "wide": TensorSpec("F64", (2,)),
    "scalar": TensorSpec("F32", ()),
    "count": TensorSpec("I64", ()),
    "empty": TensorSpec("F32", (0, 4)),
    "flag": TensorSpec("BOOL", (2,)),
}
TORCH = {
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F32": torch.float32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def content(spec, seed):
    data = np.random.default_rng(seed).integers(0, 256, spec.n_bytes, dtype=np.uint8)
    return data & 1 if spec.dtype == "BOOL" else data


def write(path, entries=ENTRIES, metadata=None):
    contents = {name: content(entries[name], i) for i, name in enumerate(file_order(entries))}
    header, placed, hashes = write_safetensors(path, entries, metadata or {}, contents.__getitem__)
    assert hashes == {name: xxhash.xxh3_128_hexdigest(data) for name, data in contents.items()}
    assert path.read_bytes()[: len(header)] == header
    return header, placed


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "x.safetensors"
    header, placed = write(path, metadata={"format": "pt", "note": "ä"})
    tensors = load_file(path)
    assert set(tensors) == set(ENTRIES)
    for i, name in enumerate(file_order(ENTRIES)):
        tensor, spec = tensors[name], ENTRIES[name]
        assert tensor.dtype == TORCH[spec.dtype]
        assert tuple(tensor.shape) == spec.shape
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == content(spec, i).tobytes()
        assert placed[name].byte_offset % max(1, spec.n_bytes and tensor.element_size()) == 0
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "ä"}
    assert read_header(path) == placed
    assert path.stat().st_size == len(header) + sum(spec.n_bytes for spec in ENTRIES.values())


def test_we_read_what_the_library_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7, dtype=torch.int64)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path)
    assert {name: (t.spec.dtype, t.spec.shape) for name, t in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", ()),
    }
    raw = path.read_bytes()
    assert raw[found["b"].byte_offset :][:8] == (7).to_bytes(8, "little")


def craft(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "'b' .* does not follow"),
        ({"a": entry(0, 2), "b": entry(4, 6)}, b"123456", "'b' .* does not follow"),
        ({"a": entry(1, 3)}, b"123", "does not follow"),
        ({"a": entry(0, 8)}, b"1234", "truncated"),
        ({"a": entry(0, 2)}, b"1234", "trailing bytes"),
        ({"a": entry(0, 4, "F32", [2])}, b"1234", "another size"),
        ({"a": entry(0, 4, "U8", [-2, -2])}, b"1234", "another size"),
        ({"a": entry(0, 4, "U8", [4.0])}, b"1234", "another size"),
        ({"a": entry(0, 4, "X9")}, b"1234", "not known"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", "data_offsets"),
        ({"a": [1]}, b"", "is damaged"),
        (b"[1]", b"1234567", "a JSON object"),
        (b"{nonsense", b"1234567", "is damaged"),
        (b"\xff\xfe{}", b"1234567", "is damaged"),
        (b"[" * 100_000, b"", "is damaged"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, data, message):
    with pytest.raises(CheckpointError, match=message):
        read_header(craft(tmp_path / "x.safetensors", header, data))


def test_a_length_that_exceeds_the_file_is_refused_without_allocating_it(tmp_path):
    for length in (2**63, 2**64 - 1, 100, 100_000_001):
        with pytest.raises(CheckpointError, match="its header exceeds the file"):
            read_header(craft(tmp_path / "x.safetensors", b"{}" + b" " * 20, length=length))
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="is truncated"):
        read_header(tmp_path / "short")


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 423), st.sampled_from(b"0123456789") | st.integers(0, 255)), min_size=1, max_size=4
    ),
    cut=st.just(0) | st.integers(1, 469),
)
@example(changes=[(11, ord("x"))], cut=0)  # another name: nothing tells that the file is damaged
@example(changes=[(336, ord("5")), (359, ord("5")), (415, ord("5")), (395, ord("0"))], cut=0)  # bytes up, flag down
@example(changes=[(395, ord("3")), (418, ord("6"))], cut=0)  # flag is longer than the file
def test_a_damaged_file_is_refused_or_still_consistent(memory, changes, cut):
    path = memory / "fuzz.safetensors"
    path.unlink(missing_ok=True)
    header, _ = write(path)
    raw = bytearray(path.read_bytes())
    assert (len(header), len(raw)) == (424, 469)
    for position, value in changes:
        raw[position] = value
    path.write_bytes(raw[: len(raw) - cut])
    try:
        found = read_header(path)
    except CheckpointError:
        return
    position = 8 + int.from_bytes(raw[:8], "little")
    for tensor in found.values():
        assert tensor.byte_offset == position
        position += tensor.spec.n_bytes
    assert position == path.stat().st_size
