"""Every kind of file gives the documents that another program wrote into it."""

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, Document, DocumentReader, SourceOptions, read_documents

TEXTS = ["one", "", "zwei\r\n\x00 東京 🦊", "a\u2028b", "last " * 5000]


Pdf = Callable[[list[str]], bytes]


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def zstandard_of(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def parquet_of(columns: dict[str, Any], **options: Any) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), out, **options)
    return out.getvalue()


def arrow_of(columns: dict[str, Any], *, stream: bool, rows: int = 2) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    out = io.BytesIO()
    table = pa.table(columns)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


KINDS: dict[str, Callable[[list[str]], bytes]] = {
    "x.jsonl": lines,
    "x.ndjson": lines,
    "x.json": lines,
    "x.JSONL": lines,
    "array.json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    "x.jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "members.jsonl.gz": lambda texts: gzip.compress(lines(texts[:2])) + gzip.compress(lines(texts[2:])),
    "x.json.gz": lambda texts: gzip.compress(lines(texts)),
    "x.jsonl.zst": lambda texts: zstandard_of(lines(texts)),
    "frames.jsonl.zst": lambda texts: (
        zstandard_of(lines(texts[:2])) + zstandard_of(b"") + zstandard_of(lines(texts[2:]))
    ),
    "x.parquet": lambda texts: parquet_of({"text": texts}),
    "groups.parquet": lambda texts: parquet_of({"n": range(len(texts)), "text": texts}, row_group_size=2),
    "stream.arrow": lambda texts: arrow_of({"text": texts}, stream=True),
    "file.arrow": lambda texts: arrow_of({"text": texts}, stream=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    content = KINDS[kind](TEXTS)
    path.write_bytes(content)
    reader = DocumentReader([path])
    found = list(reader)
    mark = ":" if "json" in kind.lower() else "#"
    assert found == [
        Document(text=text, source=f"{path}{mark}{i}", record_number=i, next_record=i)
        for i, text in enumerate(TEXTS, start=1)
    ]
    (file,) = reader.source_files().listed
    assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert reader.read_bytes == reader.total_bytes == len(content)
    for i in range(len(TEXTS) + 1):
        assert list(reader.documents_from(0, i)) == found[i:]
        assert reader.source_files().listed == (file,)
    assert list(reader.documents_from(1, 0)) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_text_is_one_document(tmp_path: Path, suffix: str) -> None:
    packed = {".gz": gzip.compress, ".zst": zstandard_of}[suffix]
    (tmp_path / f"x.txt{suffix}").write_bytes(packed("\ufeffa\r\n\x00é".encode()))
    (tmp_path / f"empty.txt{suffix}").write_bytes(packed(b""))
    assert [d.text for d in read_documents([tmp_path])] == ["", "a\r\n\x00é"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (lambda pa: pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (lambda pa: pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
        (lambda pa: pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (lambda pa: pa.chunked_array([["a"], ["b", "c"]]), ["a", "b", "c"]),
    ],
)
def test_kinds_of_string_columns(tmp_path: Path, column: Callable[[Any], Any], expected: list[str]) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    made = column(pa)
    (tmp_path / "x.arrow").write_bytes(arrow_of({"text": made}, stream=True))
    assert [d.text for d in read_documents([tmp_path / "x.arrow"])] == expected


def test_many_rows_and_row_groups(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet_of({"text": texts}, row_group_size=300))
    reader = DocumentReader([path])
    assert [d.text for d in reader] == texts
    for start in (1, 127, 128, 129, 299, 300, 301, 428, 599, 600, 999):
        found = list(reader.documents_from(0, start))
        assert [d.text for d in found] == texts[start:], start
        assert (found[0].next_record, found[0].source, found[-1].next_record) == (
            start + 1,
            f"{path}#{start + 1}",
            1000,
        )


IDS = [[1, 5, 2], [], [7], list(range(70_000, 70_300))]
IDS_KINDS: dict[str, Callable[[list[list[int]]], bytes]] = {
    "x.jsonl": lambda ids: "".join(
        json.dumps({"input_ids": i, "attention_mask": [1] * len(i)}) + "\n" for i in ids
    ).encode(),
    "x.json.gz": lambda ids: gzip.compress("".join(json.dumps({"input_ids": i}) + "\n" for i in ids).encode()),
    "x.parquet": lambda ids: parquet_of({"text": ["no"] * len(ids), "input_ids": ids}),
    "masked.arrow": lambda ids: arrow_of(
        {"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids]}, stream=True
    ),
}


@pytest.mark.parametrize("kind", IDS_KINDS)
def test_ready_made_ids(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_bytes(IDS_KINDS[kind](IDS))
    found = list(read_documents([path], SourceOptions(tokens_field="input_ids")))
    assert [d.text for d in found] == [None] * 4
    assert [d.ids.tolist() for d in found if d.ids is not None] == IDS
    assert all(d.ids is not None and d.ids.dtype == np.int64 and d.ids.ndim == 1 for d in found)
    mark = ":" if "json" in kind.lower() else "#"
    assert [(d.source, d.next_record) for d in found] == [(f"{path}{mark}{i}", i) for i in (1, 2, 3, 4)]
    with pytest.raises(DataError, match="holds ids, but text is required"):
        found[0].as_text()


@pytest.mark.parametrize("type_", ["int32", "uint16", "int64", "uint32"])
def test_id_columns_of_any_width(tmp_path: Path, type_: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    for name, list_type in (("list", pa.list_), ("large", pa.large_list), ("fixed", lambda t: pa.list_(t, 3))):
        column = pa.array(
            [[1, 2, 3], [4, 5, 65535]] if type_ == "uint16" else [[1, 2, 3], [4, 5, 6]], list_type(getattr(pa, type_)())
        )
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(parquet_of({"tokens": column}))
        ids = [d.ids for d in read_documents([path], SourceOptions(tokens_field="tokens"))]
        assert [i.tolist() for i in ids if i is not None] == column.to_pylist()


def test_padding_under_the_attention_mask_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [3, 4, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 5], "attention_mask": [0, 1]},
        {"input_ids": [9, 9], "attention_mask": [0, 0]},
        {"input_ids": [6], "attention_mask": [1]},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "x.parquet").write_bytes(
        parquet_of({name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")})
    )
    for path in sorted(tmp_path.iterdir()):
        reader = DocumentReader([path], SourceOptions(tokens_field="input_ids"))
        assert [d.ids.tolist() for d in reader if d.ids is not None] == [[3, 4], [5], [], [6]]
        assert reader.skipped == {"ids that the attention mask hides": 5}
        for bad in (
            {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
            {"input_ids": [1], "attention_mask": [1, 1]},
        ):
            other = tmp_path / f"bad{path.suffix}"
            other.write_bytes(
                json.dumps(bad).encode()
                if path.suffix == ".jsonl"
                else parquet_of({name: [value] for name, value in bad.items()})
            )
            with pytest.raises(DataError, match=rf"bad{path.suffix}[:#]1: attention_mask"):
                list(read_documents([other], SourceOptions(tokens_field="input_ids")))
            other.unlink()


def test_papers(tmp_path: Path, make_pdf: Pdf) -> None:
    pytest.importorskip("pypdf", reason="pypdf is not installed")
    (tmp_path / "b.pdf").write_bytes(make_pdf(["Attention is", "all you need"]))
    (tmp_path / "a.PDF").write_bytes(make_pdf(["Only one page"]))
    (tmp_path / "scanned.pdf").write_bytes(make_pdf(["", ""]))
    reader = DocumentReader([tmp_path])
    assert [d.text for d in reader] == ["Only one page", "Attention is\nall you need", "\n"]
    assert [(d.file_index, d.next_record) for d in reader.documents_from(1, 0)] == [(1, 1), (2, 1)]
    assert [d.file_index for d in reader.documents_from(0, 1)] == [1, 2]
    assert not reader.skipped


def test_damaged_and_locked_papers(tmp_path: Path, make_pdf: Pdf) -> None:
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    whole = make_pdf(["Attention is", "all you need"])
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(whole))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    (tmp_path / "no.pdf").write_bytes(b"no PDF at all")
    (tmp_path / "whole.pdf").write_bytes(whole)
    with pytest.raises(DataError, match=r"locked\.pdf: the PDF needs a password"):
        list(read_documents([tmp_path]))
    with pytest.raises(DataError, match=r"no\.pdf: pypdf cannot read it"):
        list(read_documents([tmp_path / "no.pdf"]))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == ["Attention is\nall you need"]
    assert reader.skipped == {"encrypted PDF": 1, "damaged PDF": 1}
    assert reader.source_files().files == 3


def test_any_damage_to_a_paper_is_an_error_of_ours_or_some_text(
    tmp_path: Path, make_pdf: Callable[[list[str]], bytes]
) -> None:
    pytest.importorskip("pypdf", reason="pypdf is not installed")
    whole = make_pdf(["Attention is", "all you need"])
    rng = np.random.default_rng(3)
    path = tmp_path / "x.pdf"
    outcomes = {0: 0, 1: 0}
    for i in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 4):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged[: rng.integers(len(whole) // 2, len(whole))] if i % 2 else damaged)
        reader = DocumentReader([path], SourceOptions(on_bad="skip"))
        outcomes[len(list(reader))] += 1
        assert len(list(reader)) + reader.skipped.total() == 1
    assert outcomes[0]
    assert outcomes[1]


@pytest.mark.parametrize("splits", [None, ["train", "test"]])
def test_saved_datasets_are_read_in_the_order_of_their_list(tmp_path: Path, splits: list[str] | None) -> None:
    # The layout of datasets.save_to_disk; test_hub.py reads what `datasets` itself wrote.
    def save(folder: Path, texts: list[str]) -> None:
        folder.mkdir(parents=True)
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for name, part in zip(names, (texts[:2], texts[2:]), strict=True):
            (folder / name).write_bytes(arrow_of({"text": part}, stream=True))
        (folder / "cache-0123.arrow").write_bytes(b"no part of it")
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in reversed(names)]}))

    order = TEXTS[2:] + TEXTS[:2]
    if splits is None:
        save(tmp_path / "saved", TEXTS)
        assert [d.text for d in read_documents([tmp_path / "saved"])] == order
    else:
        for split in splits:
            save(tmp_path / "saved" / split, [split, *TEXTS[1:]])
        (tmp_path / "saved/dataset_dict.json").write_text(json.dumps({"splits": splits}))
        found = [d.text for d in read_documents([tmp_path / "saved"], SourceOptions(split="test"))]
        assert found == [*TEXTS[2:], "test", TEXTS[1]]
        for wrong in (None, "validation", "train[:10%]"):
            with pytest.raises(DataError, match="the splits of this saved dataset are train, test"):
                read_documents([tmp_path / "saved"], SourceOptions(split=wrong))
    folder = tmp_path / "saved" / ("" if splits is None else "test")
    (folder / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"cannot read .*data-00000-of-00002\.arrow: No such file"):
        read_documents([tmp_path / "saved"], SourceOptions(split=splits and "test"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", r"state\.json: not JSON"),
        ("[]", r"state\.json: holds a list, not an object"),
        ('{"a": 1}', r"state\.json: no list _data_files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "_data_files does not name files of the folder"),
        ('{"_data_files": [3]}', "_data_files does not name files of the folder"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "not in the order of the files"),
    ],
)
def test_broken_lists_of_saved_datasets(tmp_path: Path, state: str, message: str) -> None:
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path])


@pytest.mark.parametrize(("name", "package", "extra"), [
    ("x.jsonl.zst", "zstandard", "zstd"),
    ("x.parquet", "pyarrow", "parquet"),
    ("x.arrow", "pyarrow", "parquet"),
    ("x.pdf", "pypdf", "pdf"),
    ("hf://org/name", "datasets", "datasets"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    source = name if "://" in name else str(tmp_path / name)
    if "://" not in name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf'pip install "lt-data\[{extra}\]"'):
        list(read_documents([source]))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_small_compressed_arrow_file_does_not_fill_the_memory(tmp_path: Path, stream: bool, codec: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = tmp_path / "x.arrow"

    def write(texts: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(str(path), pa.schema([("text", texts.type)]), options=options) as writer:
            writer.write(pa.record_batch([texts], names=["text"]))

    write(pa.array(["x" * 500, "y" * 400]))
    assert [len(document.text or "") for document in read_documents([path], SourceOptions(max_document_bytes=500))] == [
        500,
        400,
    ]
    for texts in (pa.array(["x" * 1000, "y" * 1000, "z" * 1000]), pa.array(["x" * 3000, "y"]).dictionary_encode()):
        write(texts)
        with pytest.raises(DataError, match=r"arrow batch of \d+ bytes without compression; write it in smaller"):
            list(read_documents([path], SourceOptions(max_document_bytes=500)))
    write(pa.array(["x" * (1 << 24)]))
    assert path.stat().st_size < 1 << 17
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match="arrow batch of"):
        list(read_documents([path], SourceOptions(max_document_bytes=1 << 20)))
    assert (pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()) == (before, peak)


@pytest.mark.parametrize("stream", [True, False])
def test_damaged_arrow_headers_are_one_error(tmp_path: Path, stream: bool) -> None:
    content = arrow_of({"text": [f"text {i}" for i in range(9)]}, stream=stream)
    rng = np.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3).tolist():
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "x.arrow").write_bytes(damaged)
        with suppress(DataError):
            list(read_documents([tmp_path / "x.arrow"]))
