"""Every kind of file gives the documents that another program wrote into it; bad input is an error, or counted.

An error names file and line; with `on_bad="skip"` bad records are left out and counted. Never is a loss silent.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, Document, SourceOptions
from lt_data.sources.reader import DocumentReader, read_documents

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
import pyarrow.parquet as pq  # noqa: E402

TEXTS = ["one", "", "zwei\r\n\x00 東京 🦊", "a\u2028b", "last " * 5000]
IDS = [[1, 5, 2], [], [0, 2**31 - 1], list(range(70_000, 70_300))]
SKIP = SourceOptions(on_bad="skip")
GOOD = b'{"text": "good"}\n'
REMEDY = r"; to leave out and count bad input give on_bad='skip' \(--on-bad skip\)$"


def lines(values: Sequence[Any], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: value}) + "\n" for i, value in enumerate(values)).encode()


def zstd(content: bytes, **options: Any) -> bytes:
    """One frame; in a stream, so that its window is not that of its size."""
    parameters = zstandard.ZstdCompressionParameters(**{"write_checksum": True, **options})
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return frame.compress(content) + frame.flush()


def with_dictionary(content: bytes) -> bytes:
    dictionary = zstandard.train_dictionary(512, [f"{i} lazy dogs".encode() * 9 for i in range(99)])
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(content)


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, **options)
    return out.getvalue()


def arrow(columns: dict[str, Any], *, stream: bool = True, rows: int = 2) -> bytes:
    out = io.BytesIO()
    table = pa.table(columns)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


KINDS: dict[str, Callable[[Sequence[Any], str], bytes]] = {
    "x.jsonl": lines,
    "x.NDJSON": lines,
    "x.json": lines,
    "array.json": lambda values, field: json.dumps([{field: value} for value in values], indent=1).encode(),
    "array.json.gz": lambda values, field: gzip.compress(json.dumps([{field: value} for value in values]).encode()),
    "members.jsonl.gz": lambda values, field: (
        gzip.compress(lines(values[:2], field)) + gzip.compress(lines(values[2:], field)) + bytes(99)
    ),
    "x.json.gz": lambda values, field: gzip.compress(lines(values, field)),
    "frames.jsonl.zst": lambda values, field: (
        zstd(lines(values[:2], field)) + zstd(b"") + b"\x50\x2a\x4d\x18\3\0\0\0abc" + zstd(lines(values[2:], field))
    ),
    "streams.jsonl.bz2": lambda values, field: (
        bz2.compress(lines(values[:2], field)) + bz2.compress(lines(values[2:], field))
    ),
    "streams.jsonl.xz": lambda values, field: (
        lzma.compress(lines(values[:2], field)) + bytes(8) + lzma.compress(lines(values[2:], field))
    ),
    "x.jsonl.gzip": lambda values, field: gzip.compress(lines(values, field)),
    "long.json.zst": lambda values, field: zstd(lines(values, field), window_log=31),
    "groups.parquet": lambda values, field: parquet({"n": range(len(values)), field: values}, row_group_size=2),
    "stream.arrow": lambda values, field: arrow({field: values}),
    "file.arrow": lambda values, field: arrow({field: values}, stream=False),
}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind(tmp_path, kind, remote):
    path = tmp_path / kind
    content = KINDS[kind](TEXTS, "text")
    path.write_bytes(content)
    reader = DocumentReader([f"file://{path}" if remote else path], SourceOptions(keep_fields=True))
    found = list(reader)
    name = f"{'file://' if remote else ''}{path}"
    mark = ":" if "json" in kind.lower() else "#"
    assert [(d.text, d.source, d.record_number) for d in found] == [
        (text, f"{name}{mark}{i}", i) for i, text in enumerate(TEXTS, start=1)
    ]
    assert [d.fields["text"] for d in found if d.fields] == TEXTS
    (file,) = reader.source_files().listed
    assert (file.path, file.bytes, file.sha256) == (name, len(content), hashlib.sha256(content).hexdigest())
    assert reader.read_bytes == reader.total_bytes == len(content)


@pytest.mark.parametrize("kind", KINDS)
def test_ready_made_ids(tmp_path, kind):
    path = tmp_path / kind
    path.write_bytes(KINDS[kind](IDS, "input_ids"))
    found = list(read_documents([path], SourceOptions(tokens_field="input_ids")))
    assert [d.ids.tolist() for d in found if d.ids is not None] == IDS
    assert all(d.text is None and d.ids is not None and d.ids.dtype == np.int64 for d in found)
    with pytest.raises(DataError, match="holds ids, but text is required"):
        found[0].as_text()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_padding_under_the_attention_mask_is_left_out_and_counted(tmp_path, suffix):
    def read(rows: list[tuple[list[int], list[int]]], path: Path) -> DocumentReader:
        columns = {"input_ids": [ids for ids, _ in rows], "attention_mask": [mask for _, mask in rows]}
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        path.write_bytes(text if suffix == ".jsonl" else parquet(columns))
        return DocumentReader([path], SourceOptions(tokens_field="input_ids"))

    rows = [([3, 4, 0, 0], [1, 1, 0, 0]), ([0, 5], [0, 1]), ([9, 9], [0, 0]), ([6], [1])]
    reader = read(rows, tmp_path / f"x{suffix}")
    assert [d.ids.tolist() for d in reader if d.ids is not None] == [[3, 4], [5], [], [6]]
    assert reader.skipped == {"ids that the attention mask hides": 5}
    for bad in (([1, 2, 3], [1, 0, 1]), ([1], [1, 1]), ([1], [2])):
        with pytest.raises(DataError, match=rf"bad{suffix}[:#]1: attention_mask"):
            list(read([bad], tmp_path / f"bad{suffix}"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize("remote", [False, True])
def test_pieces_of_large_files_are_the_whole(tmp_path, name, remote):
    rng = random.Random(7)
    texts = [f"{i} " + "é" * rng.choice((0, 3, 40)) for i in range(120)]
    content = b"\xef\xbb\xbf" + lines(texts) if name == "x.jsonl" else parquet({"text": texts}, row_group_size=7)
    (tmp_path / name).write_bytes(content.removesuffix(b"\n"))
    whole = DocumentReader([f"file://{tmp_path / name}" if remote else tmp_path / name])
    for max_bytes in (1, 50, 333, 1000, whole.total_bytes - 1, whole.total_bytes):
        reader = whole.divided(max_bytes)
        divided = reader.total_bytes > max_bytes and not (remote and name == "x.parquet")
        assert (reader.n_files > 1) == divided
        found = list(reader)
        assert [d.text for d in found] == texts
        if name == "x.parquet":
            assert [d.record_number for d in found] == list(range(1, 121))
        begin = 0
        for file in reader.finished_files:
            assert file.sha256 == hashlib.sha256(content[begin : begin + file.bytes]).hexdigest()
            begin += file.bytes
        assert begin == reader.total_bytes
        for bytes_ in (1, 3000, 10**6):
            parts = [reader.slice(*group) for group in reader.group(bytes_)]
            assert [d.text for part in parts for d in part] == texts
            assert len({part.fingerprint for part in parts}) == len(parts)


@pytest.mark.parametrize(("name", "mark"), [("x.txt", ""), ("x.txt.gz", ""), ("x.txt.zst", ""), ("x.jsonl", ":1")])
def test_text_is_kept_exactly(tmp_path, name, mark):
    text = "\r\n a\x00b\u2028c\tß🦊 \ufeff\n\n"
    content = b"\xef\xbb\xbf" + (text.encode() if "txt" in name else json.dumps({"text": text}).encode() + b"\r\n \n")
    pack = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content))
    (found,) = read_documents([tmp_path / name])
    assert found == Document(text=text, source=f"{tmp_path / name}{mark}", record_number=int(bool(mark)))


def test_empty_files(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "e.json").write_bytes(b"[]")
    (tmp_path / "f.parquet").write_bytes(parquet({"text": []}))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [(d.text, d.file_index) for d in reader] == [("", 0)]  # an empty text file is an empty document
    assert not reader.skipped
    assert reader.source_files().files == 6
    for suffix in (".gz", ".zst", ".bz2", ".xz"):  # which the programs refuse too
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(b"")
        with pytest.raises(DataError, match=r"damaged file .*: the file is empty"):
            list(read_documents([path]))


def test_papers(tmp_path, make_pdf):
    (tmp_path / "b.pdf").write_bytes(make_pdf(["Attention is", "all you need"]))
    (tmp_path / "a.PDF").write_bytes(make_pdf(["Only one page"]))
    (tmp_path / "scanned.pdf").write_bytes(make_pdf(["", ""]))
    (tmp_path / "no.pdf").write_bytes(b"no PDF at all")
    with pytest.raises(DataError, match=r"no\.pdf: pypdf cannot read it"):
        list(read_documents([tmp_path]))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == ["Only one page", "Attention is\nall you need", "\n"]
    assert reader.skipped == {"damaged PDF": 1}


@pytest.mark.parametrize("splits", [None, ["train", "test"]])
@pytest.mark.parametrize("remote", [False, True])
def test_saved_datasets_are_read_in_the_order_of_their_list(tmp_path, splits, remote):
    def save(folder: Path, texts: list[str]) -> None:
        folder.mkdir(parents=True)
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for name, part in zip(names, (texts[:2], texts[2:]), strict=True):
            (folder / name).write_bytes(arrow({"text": part}))
        (folder / "cache-0123.arrow").write_bytes(b"no part of it")
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in reversed(names)]}))

    root = tmp_path / "saved"
    source = f"file://{root}" if remote else root
    chosen = None if splits is None else "test"
    save(root / (chosen or ""), TEXTS)
    if splits:
        save(root / "train", ["train", *TEXTS])
        (root / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        for wrong in (None, "validation", "train[:10%]"):
            with pytest.raises(DataError, match="the splits are train, test"):
                read_documents([source], SourceOptions(split=wrong))
    options = SourceOptions(split=chosen)
    assert [d.text for d in read_documents([source], options)] == TEXTS[2:] + TEXTS[:2]
    state = root / (chosen or "") / "state.json"
    files = json.loads(state.read_text())["_data_files"]
    for changed in (  # of datasets 1 and later
        {"_indices_files": [{"filename": "indices.arrow"}]},
        {"_indices_data_files": [{"filename": "indices.arrow"}]},
        {"_data_files": [{**files[0], "skip": 1, "take": 2}]},
        {"_inplace_history": [{"transforms": [["remove_columns", [], {}]]}]},
    ):
        state.write_text(json.dumps({"_data_files": files, **changed}))
        with pytest.raises(DataError, match=r"state\.json: the dataset is not all rows of its files in their order"):
            read_documents([source], options)
    state.write_text(
        json.dumps({"_data_files": files, "_indices_data_files": None, "_inplace_history": [{"transforms": []}] * 2})
    )
    assert len(list(read_documents([source], options))) == len(TEXTS)
    (root / (chosen or "") / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00000-of-00002\.arrow: a file of the saved dataset is missing"):
        read_documents([source], options)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("x.jsonl.zst", "zstandard", "zstd"), ("x.parquet", "pyarrow", "parquet"), ("x.arrow", "pyarrow", "parquet"),
     ("x.pdf", "pypdf", "pdf"), ("hf://org/name", "datasets", "datasets"), ("s3://bucket/x", "s3fs", "s3")],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # of another test
    (tmp_path / "x").write_bytes(b"x")
    source = name if "://" in name else str((tmp_path / "x").rename(tmp_path / name))
    with pytest.raises(DataError, match=rf'pip install "lt-data\[{extra}\]"'):
        list(read_documents([source]))


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "b"', "broken JSON line", r"not a JSON value: .*correct or remove the line"),
        (b'{"text": "b"} {}', "broken JSON line", "not a JSON value: Extra data"),
        (b"[" * 100_000, "broken JSON line", "not a JSON value"),
        (b'{"text": "b", "n": ' + b"9" * 5000 + b"}", "broken JSON line", "not a JSON value"),
        (b'\xef\xbb\xbf{"text": "b"}', "broken JSON line", "not a JSON value"),  # a mark in the midst of a file
        (b'{"text": "\xff"}', "not UTF-8", "not UTF-8 at byte 10"),
        (b'{"text": "a\\ud83d"}', "half of a surrogate pair", "character 1 is half of a surrogate pair"),
        (b"[1]", "not a record", "holds list, not fields such as 'text'"),
        (b'{"Text": "b", "id": 1}', "no field 'text'", r"no field 'text' \(found fields 'Text', 'id'\); name the"),
        (b'{"input_ids": [1]}', "no field 'text'", r".*give tokens_field='input_ids' \(--tokens-field input_ids\)"),
        (b"{}", "no field 'text'", r"no field 'text' \(the record has no fields\); name the field"),
        (b'{"text": null}', "null", "field 'text' is null"),
        (b'{"text": 3}', "not a string", "field 'text' holds int, not a string"),
        (b'{"text": {"en": "a"}}', "not a string", "field 'text' holds fields of its own, not a string; .*--map"),
        (b'{"text": "' + b"x" * 990 + b'"}', "too large", "line of more than 1000 bytes; .*--max-document-bytes"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_bad_lines(tmp_path, line, reason, message, packed):
    path = tmp_path / f"x.jsonl{packed}"
    content = GOOD + line + b"\n\n" + GOOD + line
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstd}[packed](content))
    limit = 1000 if reason == "too large" else 200_000
    with pytest.raises(DataError, match=rf"x\.jsonl{packed}:2: {message}.*{REMEDY}"):
        list(read_documents([path], SourceOptions(max_document_bytes=limit)))
    reader = DocumentReader([path], SourceOptions(on_bad="skip", max_document_bytes=limit))
    assert [(d.text, d.source) for d in reader] == [("good", f"{path}:1"), ("good", f"{path}:4")]
    assert reader.skipped == {reason: 2}
    assert list(reader.skip_examples) == [reason]
    assert reader.skip_examples[reason].startswith(f"{path}:2: ")
    assert reader.source_files().bytes == path.stat().st_size


def test_a_bad_line_of_a_file_without_a_checksum_is_told_at_once(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{\n" + GOOD * 300_000)
    reader = DocumentReader([path])
    with pytest.raises(DataError, match=r"x\.jsonl:1: not a JSON value"):
        next(iter(reader))
    assert reader.read_bytes <= 2**20 < path.stat().st_size


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_field_inside_of_a_field_points_to_a_map(tmp_path, name):
    row = {"content": {"text": "a"}}
    path = tmp_path / name
    path.write_bytes(json.dumps(row).encode() if name == "x.jsonl" else parquet({"content": [row["content"]]}))
    with pytest.raises(DataError, match=r"no field 'content\.text' .*inside of 'content': .*--map MODULE:FUNCTION"):
        list(read_documents([path], SourceOptions(text_field="content.text")))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    table = pa.table([["a"], ["b"], ["c"], ["d"]], names=["text", "text", "n", "n"])
    path = tmp_path / name
    with pq.ParquetWriter(path, table.schema) if name == "x.parquet" else pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)
    for options, column in ((SourceOptions(), "text"), (SourceOptions(text_field="n"), "n")):
        with pytest.raises(DataError, match=rf"{name}: two columns are named '{column}'; write the table"):
            list(read_documents([path], options))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD), r"compressed with gzip; end its name in \.gz"),
        (zstd(GOOD), r"compressed with zstandard; end its name in \.zst"),
        (bz2.compress(GOOD), r"compressed with bzip2; end its name in \.bz2"),
        (lzma.compress(GOOD), r"compressed with xz; end its name in \.xz"),
        (parquet({"text": ["good"]}), r"a parquet file; end its name in \.parquet"),
        (b"x.jsonl".ljust(257, b"\0") + b"ustar\0" + GOOD, "a tar archive, which is not read; unpack it"),
        (b"PK\3\4" + GOOD, "a zip archive, which is not read; unpack it"),
        (b"\x04\x22\x4d\x18" + GOOD, "compressed with lz4, which is not read; unpack it"),
    ],
    ids=["gzip", "zstandard", "bzip2", "xz", "parquet", "tar", "zip", "lz4"],
)
@pytest.mark.parametrize("name", ["x", "x.jsonl", "x.json.gz"])
def test_what_is_compressed_and_not_named_so_is_said(tmp_path, content, message, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"{name}: {message}"):
        list(read_documents([path]))
    reader = DocumentReader([path], SKIP)
    assert list(reader) == []
    assert reader.skipped == {"not text": 1}


@pytest.mark.parametrize("value", ["3", '"1 2"', "[1, -1]", "[1.0]", "[true]", "[2147483648]", f"[{2**64}]", "[[1]]"])
def test_bad_ids(tmp_path, value):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"input_ids": [1]}}\n{{"input_ids": {value}}}\n{{"input_ids": [2]}}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: field 'input_ids' is not a list of whole numbers from 0 to"):
        list(read_documents([path], SourceOptions(tokens_field="input_ids")))
    reader = DocumentReader([path], SourceOptions(tokens_field="input_ids", on_bad="skip"))
    assert [d.ids.tolist() for d in reader if d.ids is not None] == [[1], [2]]
    assert reader.skipped == {"not a list of ids": 1}


def test_bad_values_in_columns(tmp_path):
    binary = pa.array([b"good", b"\xff", None, b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, binary.buffers())
    for column, field, kept, skipped in (
        (text, "text", ["good", "good"], {"not UTF-8": 1, "null": 1}),
        (pa.array([1, None]), "text", [], {"not a string": 1, "null": 1}),
        (pa.array([[1], None, [3, None], [-1]]), "tokens", [[1]], {"null": 1, "not a list of ids": 2}),
        (pa.array([[1.0]]), "tokens", [], {"not a list of ids": 1}),
    ):
        path = tmp_path / "x.parquet"
        path.write_bytes(parquet({field: column}))
        tokens = None if field == "text" else field
        reader = DocumentReader([path], SourceOptions(tokens_field=tokens, on_bad="skip"))
        assert [d.text if d.ids is None else d.ids.tolist() for d in reader] == kept
        assert reader.skipped == skipped
        with pytest.raises(DataError, match=rf"x\.parquet#{2 if kept else 1}: .*{REMEDY}"):
            list(read_documents([path], SourceOptions(tokens_field=tokens)))


@pytest.mark.parametrize(
    "kind",
    [
        "members.jsonl.gz",
        "frames.jsonl.zst",
        "streams.jsonl.bz2",
        "streams.jsonl.xz",
        "groups.parquet",
        "stream.arrow",
        "file.arrow",
    ],
)
def test_a_file_that_is_cut_off_anywhere_is_an_error(tmp_path, kind):
    texts = [str(i) for i in range(500)]
    whole = KINDS[kind](texts, "text").rstrip(b"\0" if kind.endswith(".gz") else b"")
    path = tmp_path / kind
    (tmp_path / "y.txt").write_text("after it")
    for cut in sorted({1, 7, 8, 9, len(whole) // 3, len(whole) // 2, *range(len(whole) - 12, len(whole))}):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"{kind}: damaged file .*again{REMEDY}"):
            list(read_documents([path]))
        reader = DocumentReader([path, tmp_path / "y.txt"], SKIP)
        assert [d.text for d in reader] == ["after it"]
        assert reader.skipped == {"damaged file": 1}
        assert [file.bytes for file in reader.finished_files] == [cut, 8]


def test_an_arrow_stream_cut_at_the_border_of_two_batches(tmp_path):
    whole, half = arrow({"text": ["a", "b", "c", "d"]}), arrow({"text": ["a", "b"]})
    cut = whole[: len(half) - 8]
    assert pa.ipc.open_stream(cut).read_all().num_rows == 2  # pyarrow takes it for a whole one
    (tmp_path / "x.arrow").write_bytes(cut)
    with pytest.raises(DataError, match=r"x\.arrow: damaged file \(arrow\): its end mark is missing"):
        list(read_documents([tmp_path / "x.arrow"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl.gz", gzip.compress(GOOD) + b"garbage", r"damaged file \(gzip\)"),
        ("x.jsonl.zst", zstd(GOOD) + b"garbage", r"damaged file \(zstandard\)"),
        ("x.jsonl.zst", with_dictionary(GOOD), "damaged file .*it needs a dictionary, .* not read; unpack it"),
        ("x.json", b'[{"text": "a"}', "not a JSON value"),
        ("x.json", b"[\xff]", "not UTF-8"),
        ("x.txt", "caf\xe9".encode("latin-1"), "not UTF-8 at byte 3 .*iconv"),
        ("x.txt", b"x" * 1001, "text of more than 1000 bytes"),
        ("x.json", b'[{"text": "' + b"x" * 1000, "JSON array, which is parsed as a whole, of more than 1000 bytes"),
        ("x.parquet", parquet({"text": ["x" * 1001]}), "text of more than 1000 bytes"),
    ],
    ids=range(9),
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("good")
    with pytest.raises(DataError, match=rf"{name}(#1)?: {message}.*{REMEDY}"):
        list(read_documents([tmp_path], SourceOptions(max_document_bytes=1000)))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip", max_document_bytes=1000))
    assert [d.text for d in reader][-1] == "good"
    assert reader.skipped.total() == 1


def test_bad_records_of_an_array_are_counted_one_by_one(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('\ufeff [{"text": "a"}, 3, {"text": "\\ud800"}, {"text": "d"}]')
    reader = DocumentReader([path], SKIP)
    assert [(d.text, d.source) for d in reader] == [("a", f"{path}:1"), ("d", f"{path}:4")]
    assert reader.skipped == {"not a record": 1, "half of a surrogate pair": 1}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_a_file_that_changes_or_goes_after_it_was_listed_is_never_skipped(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(GOOD * 2)
    for content in (GOOD, GOOD * 3):
        reader = DocumentReader([path], SKIP)
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: \d+ bytes read of a file that had \d+ when it was listed"):
            list(reader)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot read {path}: No such file or directory; check the path"):
        list(reader)
