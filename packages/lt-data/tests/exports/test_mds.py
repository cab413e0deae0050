"""MDS shards, read with struct and numpy as the public format describes them; shards of others as stores.

tools/interop_exports.py reads the same with MosaicML's own library.
"""

import gzip
import hashlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lt_data import DataError, RowReader, Tokenizer, TokenStore, pack
from lt_data.exports import mds
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions


def decode(encoding: str, content: bytes) -> list[int]:
    """`NDArray.decode` of the library."""
    _, dtype, *shape = encoding.split(":")
    if shape:
        assert len(content) == int(shape[0]) * np.dtype(dtype).itemsize
        return np.frombuffer(content, dtype).tolist()
    head = content[0]
    width = 2 ** (head % 4)
    assert head >> 2 == 1
    (length,) = np.frombuffer(content[1 : 1 + width], f"<u{width}").tolist()
    values = np.frombuffer(content[1 + width :], dtype)
    assert values.size == length
    return values.tolist()


def read_shards(folder: Path) -> list[dict[str, list[int]]]:
    """`MDSReader` of the library: offsets, sizes of the columns, columns."""
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    found: list[dict[str, list[int]]] = []
    for number, shard in enumerate(index["shards"]):
        assert (shard["version"], shard["format"], shard["compression"], shard["zip_data"]) == (2, "mds", None, None)
        assert shard["raw_data"]["basename"] == f"shard.{number:05d}.mds"
        content = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert shard["raw_data"]["bytes"] == len(content)
        assert shard["raw_data"]["hashes"] == {"sha256": hashlib.sha256(content).hexdigest()}
        (n,) = struct.unpack_from("<I", content)
        assert n == shard["samples"] > 0
        for i in range(n):
            begin, end = struct.unpack_from("<2I", content, 4 + 4 * i)
            found.append(sample(shard, content[begin:end]))
        stated = struct.unpack_from("<I", content, 4)[0]
        config = json.loads(content[4 + 4 * (n + 1) : stated])
        assert config == {key: shard[key] for key in config}
        assert struct.unpack_from("<I", content, 4 + 4 * n)[0] == len(content)
    return found


def sample(shard: dict[str, Any], data: bytes) -> dict[str, list[int]]:
    position, sizes = 0, []
    assert shard["column_names"] == sorted(shard["column_names"])
    for size in shard["column_sizes"]:
        if size is None:
            (size,) = struct.unpack_from("<I", data, position)
            position += 4
        sizes.append(size)
    values = {}
    for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
        values[name] = decode(encoding, data[position : position + size])
        position += size
    assert position == len(data)
    return values


@pytest.mark.parametrize("name", ["store", "wide_store"])
@pytest.mark.parametrize("file_bytes", [None, 3000, 1])
def test_documents(name: str, file_bytes: int | None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In one shard, in several, and each in one of its own."""
    store: TokenStore = request.getfixturevalue(name)
    report = export(store, out=tmp_path / "out", options=ExportOptions(to="mds", file_bytes=file_bytes))
    found = read_shards(tmp_path / "out")
    assert found == [{"tokens": store.document(i).tolist()} for i in range(store.n_documents)]
    shards = sorted((tmp_path / "out").glob("*.mds"))
    assert len(shards) == {None: 1, 1: store.n_documents}.get(file_bytes, len(shards))
    if file_bytes == 3000:
        assert len(shards) > 3
        longest = int(store.lengths.max()) * store.dtype.itemsize
        assert all(shard.stat().st_size <= max(3000, longest + 300) for shard in shards)
    assert (report.samples, report.tokens) == (store.n_documents, store.n_tokens)


@pytest.mark.parametrize("length", [1, 255, 256, 65535, 65536])
def test_the_width_of_a_length(length: int, tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    content = json.dumps({"input_ids": [i % 7 for i in range(length)]})
    (tmp_path / "in.json").write_text(content)
    import_tokens(
        tmp_path / "in.json", options=ImportOptions(format="smp"), tokenizer=wide_tokenizer, out=tmp_path / "store"
    )
    export(tmp_path / "store", out=tmp_path / "out", options=ExportOptions(to="mds"))
    assert read_shards(tmp_path / "out") == [{"tokens": [i % 7 for i in range(length)]}]


@pytest.mark.parametrize("mode", ["concat", "bfd"])
def test_rows(store: TokenStore, tmp_path: Path, mode: str) -> None:
    options = ExportOptions(to="mds", seq_len=90, packing=mode, pad_id=4, file_bytes=4000)
    report = export(store, out=tmp_path / "out", options=options)
    found = read_shards(tmp_path / "out")
    reader = RowReader(store, pack(store, seq_len=90, mode=mode))
    rows = reader.read_rows(np.arange(reader.n_rows))
    mask = rows.doc_ids >= 0
    assert [row["attention_mask"] for row in found] == mask.astype(int).tolist()
    assert [row["tokens"] for row in found] == np.where(mask, rows.input_ids, 4).tolist()
    assert (report.samples, report.padding) == (len(found), int((~mask).sum()))


def foreign(folder: Path, encoding: str, values: list[bytes], extra: dict[str, Any] | None = None) -> None:
    """Two columns, ids and a label, as the library's own writer lays them out."""
    folder.mkdir(exist_ok=True)
    samples = [struct.pack("<2I", len(value), 2) + value + b"ab" for value in values]
    offsets = np.cumsum([4 + 4 * (len(samples) + 1), *map(len, samples)]).astype("<u4")
    content = struct.pack("<I", len(samples)) + offsets.tobytes() + b"".join(samples)
    shard: dict[str, Any] = {
        "column_encodings": [encoding, "str"],
        "column_names": ["ids", "label"],
        "column_sizes": [None, None],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "samples": len(samples),
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    } | (extra or {})
    packed = shard["compression"]
    if packed:
        pack_it = {"zstd": zstandard.ZstdCompressor().compress, "gz": gzip.compress, "br": bytes}[packed.split(":")[0]]
        content = pack_it(content)
        shard["zip_data"] = {"basename": "shard.00000.mds.x", "bytes": len(content), "hashes": {}}
    (folder / (shard["zip_data"] or shard["raw_data"])["basename"]).write_bytes(content)
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
@pytest.mark.parametrize(
    ("encoding", "values"),
    [
        (
            "ndarray",
            [b"\x21\x04\x02" + struct.pack("<2i", 5, 69_000), b"\x08\x04\x01\x07", b"\x40\x05\x01\0" + bytes(8)],
        ),
        ("ndarray:int64", [b"\x04\x02" + struct.pack("<2q", 5, 69_000), b"\x04\x01" + struct.pack("<q", 7)]),
        ("ndarray:uint32:2", [struct.pack("<2I", 5, 69_000), struct.pack("<2I", 7, 7)]),
    ],
)
def test_shards_of_others(
    tmp_path: Path, wide_tokenizer: Tokenizer, encoding: str, values: list[bytes], compression: str | None
) -> None:
    foreign(tmp_path / "in", encoding, values, {"compression": compression})
    options = ImportOptions(format="mds", field="ids")
    import_tokens(tmp_path / "in", options=options, tokenizer=wide_tokenizer, out=tmp_path / "st")
    store = TokenStore.open(tmp_path / "st")
    expected = {"ndarray": [[5, 69_000], [7], [0]], "ndarray:uint32:2": [[5, 69_000], [7, 7]]}
    assert [store.document(i).tolist() for i in range(store.n_documents)] == expected.get(encoding, [[5, 69_000], [7]])


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({}, None, r"no column 'tokens' \(found ids, label\)"),
        ({}, "label", r"column 'label' is str, not ndarray"),
        ({"column_encodings": ["ndarray:float32", "str"]}, "ids", "float32 is not an integer array"),
        ({"samples": 2}, "ids", "1 samples in .* not 2"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 5, "hashes": {}}}, "ids", "does not match its index"),
        ({"column_sizes": [4, None]}, "ids", "its column sizes do not sum to its size"),
        ({"format": "jsonl"}, "ids", "format jsonl 2; only mds 2"),
        ({"version": 3}, "ids", "format mds 3; only mds 2"),
        ({"compression": "br"}, "ids", "compressed with br"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, wide_tokenizer: Tokenizer, change: dict[str, Any], field: str | None, message: str
) -> None:
    foreign(tmp_path / "in", "ndarray:int32", [b"\x04\x01" + struct.pack("<i", 5)], change)
    with pytest.raises(DataError, match=message):
        import_tokens(
            tmp_path / "in",
            options=ImportOptions(format="mds", field=field),
            tokenizer=wide_tokenizer,
            out=tmp_path / "st",
        )
    assert not (tmp_path / "st").exists()


def test_a_broken_index(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    foreign(tmp_path / "in", "ndarray:int32", [b"\x04\x01" + struct.pack("<i", 5)])
    index = tmp_path / "in" / "index.json"
    whole = json.loads(index.read_text())
    outside = json.loads(index.read_text().replace("shard.00000.mds", "../shard.00000.mds"))
    for content, message in (
        ({**whole, "version": 1}, "version 1; only version 2"),
        ({"shards": [{}]}, "not the index of MDS shards"),
        ([], "holds a list, not an object"),
        (outside, r"'\.\./shard\.00000\.mds' is not a file of this folder"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            import_tokens(
                tmp_path / "in",
                options=ImportOptions(format="mds", field="ids"),
                tokenizer=wide_tokenizer,
                out=tmp_path / "st",
            )


@pytest.mark.parametrize("kind", ["gz", "zstd"])
def test_compressed_shards_are_bounded_and_checked(tmp_path: Path, kind: str) -> None:
    def read(content: bytes, n_bytes: int) -> None:
        folder = tmp_path / "in"
        foreign(folder, "ndarray:int32", [b"\x04\x01" + struct.pack("<i", 5)], {"compression": kind})
        index = json.loads((folder / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] = n_bytes
        (folder / "index.json").write_text(json.dumps(index))
        (folder / "shard.00000.mds.x").write_bytes(content)
        list(mds.read(folder, "ids"))

    pack = gzip.compress if kind == "gz" else zstandard.ZstdCompressor().compress
    bomb = pack(bytes(1 << 26))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    with pytest.raises(DataError, match="does not match its index"):
        read(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.x: 5000000000 bytes without compression: decompress it"):
        read(bomb, 5_000_000_000)
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.x: (truncated|damaged) "):
        read(bomb[: len(bomb) // 2], 1 << 26)
