"""Ranges of large files: the documents of the whole file, each once, whatever the size of the ranges."""

import hashlib
import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, DocumentReader, SourceOptions, Tokenizer, TokenStore, prepare
from lt_data.sources.record import DamagedFileError
from lt_data.sources.zstd import list_frames

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \n"])
TEXTS = st.lists(st.tuples(st.text("aé\u2028 ", min_size=1, max_size=30), LINE_ENDS), min_size=1, max_size=25)


def make_lines(texts: list[tuple[str, bytes]], *, closed: bool, bom: bool) -> bytes:
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + end for text, end in texts)
    return (b"\xef\xbb\xbf" if bom else b"") + (lines if closed else lines.rstrip())


def compress(content: bytes, cuts: list[int], *, checksum: bool) -> bytes:
    """Compress in frames that end at some places, with a skippable frame between the first two."""
    bounds = [0, *sorted({cut % (len(content) + 1) for cut in cuts}), len(content)]
    writer = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=False)
    frames = [writer.compress(content[a:b]) for a, b in itertools.pairwise(bounds)]
    return frames[0] + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + b"".join(frames[1:])


def texts_of(reader: DocumentReader) -> list[str | None]:
    return [document.text for document in reader]


def check(path: Path, max_bytes: int, **options: Any) -> DocumentReader:
    """Compare the divided file with the whole; every byte is in the hash of one range."""
    whole = DocumentReader([path], SourceOptions(**options))
    divided = DocumentReader([path], SourceOptions(**options)).divided(max_bytes)
    assert texts_of(divided) == texts_of(whole)
    assert divided.skipped == whole.skipped
    assert divided.total_bytes == whole.total_bytes == sum(file.bytes for file in divided.finished_files)
    content, begin = path.read_bytes(), 0
    for file in divided.finished_files:
        assert file.sha256 == hashlib.sha256(content[begin : begin + file.bytes]).hexdigest()
        begin += file.bytes
    for document in list(divided)[::5]:
        rest = divided.documents_from(document.file_index, document.next_record)
        before = [other.text for other in divided.documents_from(0, 0)]
        after = [other.text for other in rest]
        assert before[len(before) - len(after) :] == after
        assert before[len(before) - len(after) - 1] == document.text
    return divided


@given(texts=TEXTS, max_bytes=st.integers(1, 200), closed=st.booleans(), bom=st.booleans())
def test_json_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, bytes]], max_bytes: int, closed: bool, bom: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(make_lines(texts, closed=closed, bom=bom))
    divided = check(path, max_bytes)
    assert divided.n_files == max(1, -(-path.stat().st_size // max_bytes))


@given(
    texts=TEXTS,
    max_bytes=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 900), max_size=8),
    checksum=st.booleans(),
    on_bad=st.sampled_from(["error", "skip"]),
)
def test_zstandard_frames(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[tuple[str, bytes]],
    max_bytes: int,
    cuts: list[int],
    checksum: bool,
    on_bad: Any,
) -> None:
    path = tmp_path_factory.mktemp("frames") / "a.jsonl.zst"
    path.write_bytes(compress(make_lines(texts, closed=True, bom=False), cuts, checksum=checksum))
    check(path, max_bytes, on_bad=on_bad)


@settings(max_examples=30)
@given(rows=st.integers(1, 60), group=st.integers(1, 20), max_bytes=st.integers(1, 4000), start=st.integers(0, 70))
def test_row_groups(
    tmp_path_factory: pytest.TempPathFactory, rows: int, group: int, max_bytes: int, start: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    table = pa.table({"n": list(range(rows)), "text": [f"row {i} " * (i % 7 + 1) for i in range(rows)]})
    pq.write_table(table, path, row_group_size=group)
    divided = check(path, max_bytes)
    assert [document.record_number for document in divided] == list(range(1, rows + 1))
    assert divided.n_files <= -(-rows // group)
    if max_bytes == 1:
        assert divided.n_files == -(-rows // group)


def test_a_row_group_without_the_column_is_counted_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"other": ["x"] * 30}), tmp_path / "a.parquet", row_group_size=7)
    reader = DocumentReader([tmp_path / "a.parquet"], SourceOptions(on_bad="skip")).divided(1)
    assert (reader.n_files, list(reader), reader.skipped.total()) == (5, [], 30)


def test_frames_are_found_without_decompressing(tmp_path: Path) -> None:
    writer = zstandard.ZstdCompressor(level=1)
    frames = [writer.compress(os.urandom(n)) for n in (0, 1, 300_000, 131_072)] + [writer.compress(bytes(400_000))]
    content = b"".join(frames)
    begins = [sum(map(len, frames[:i])) for i in range(len(frames))]
    assert [*list_frames(io.BytesIO(content))] == begins
    for broken in (content[:-1], content + b"x", content[:-30]):
        with pytest.raises(DamagedFileError):
            list(list_frames(io.BytesIO(broken)))


def test_damage_costs_the_rest_of_its_range(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} " + "x" * 50}).encode() + b"\n" for i in range(40)]
    frames = [
        zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(lines[i : i + 10])) for i in (0, 10, 20, 30)
    ]
    damaged = bytearray(frames[1])
    damaged[len(damaged) // 2] ^= 255
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames[0] + bytes(damaged) + frames[2] + frames[3])
    reader = DocumentReader([path], SourceOptions(on_bad="skip")).divided(len(frames[0]) + 1)
    assert reader.n_files == 4
    found = texts_of(reader)
    assert set(found) <= {json.loads(line)["text"] for line in lines}
    assert {text.split()[1] for text in found if text} >= {*map(str, range(10)), *map(str, range(21, 40))}
    assert reader.skipped["damaged file"] >= 1
    with pytest.raises(DataError, match=r"a\.jsonl\.zst\[\d+:\d+\]: damaged zstandard file"):
        texts_of(DocumentReader([path]).divided(len(frames[0]) + 1))


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "some words"}\n' * 100)
    reader = DocumentReader([path]).divided(500)
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(DataError, match="it was changed after it was listed"):
        texts_of(reader)


def test_what_is_not_divided(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 1000, encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([{"text": "x" * 3000}]), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "small"}\n', encoding="utf-8")
    (tmp_path / "d.parquet").write_bytes(b"PAR1" + bytes(2000) + b"PAR1")
    reader = DocumentReader(
        [tmp_path], SourceOptions(suffixes=[".txt", ".json", ".jsonl", ".parquet"], on_bad="skip")
    ).divided(100)
    assert reader.n_files == 4
    assert len(list(reader)) == 3
    assert reader.skipped["damaged file"] == 1


def test_a_store_of_units_of_one_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": f"words {i} " * (i % 9 + 1)}).encode() + b"\n" for i in range(200)))
    options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf"}
    prepare([path], out=tmp_path / "units", unit_bytes=1500, **options)
    prepare([path], out=tmp_path / "flat", **options)
    units, flat = TokenStore(tmp_path / "units"), TokenStore(tmp_path / "flat")
    assert len(units.part_folders) > 5
    assert units.n_documents == flat.n_documents
    assert all((units[i] == flat[i]).all() for i in range(flat.n_documents))
    assert units.manifest.sources.bytes == flat.manifest.sources.bytes
    lines = path.read_bytes().splitlines(keepends=True)
    for number in (0, 57, 199):
        source = units.document_source(number)
        assert source is not None
        name, _, line = str(source).rpartition(":")
        begin = int(name.rpartition("[")[2].partition(":")[0])
        content = path.read_bytes()[begin:] if begin else b"\n" + path.read_bytes()
        assert content.split(b"\n")[int(line)] + b"\n" == lines[number]
