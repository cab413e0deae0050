"""Damaged, edited and oversized input: no document is kept before the checksum of its member or page confirmed it."""

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lt_data import DataError, DocumentReader, SourceOptions, Tokenizer, TokenStore, prepare, read_documents, stats
from lt_data.display.stats_text import format_stats
from lt_data.store.manifest import read_manifest

LINES = [b'{"text": "%d %s"}\n' % (i, b"word " * (i % 50)) for i in range(1000)]
TEXTS = [json.loads(line)["text"] for line in LINES]
UNCONFIRMED = "unconfirmed before damage"


def zstd(content: bytes, *, checksum: bool = True) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(content)


def in_members(compress: Callable[[bytes], bytes], n: int = 10) -> list[bytes]:
    size = len(LINES) // n
    return [compress(b"".join(LINES[i : i + size])) for i in range(0, len(LINES), size)]


def flip(content: bytes, at: int, bit: int = 3) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


@pytest.fixture(params=["held", "read twice"])
def confirmation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to confirm a member."""
    if request.param == "read twice":
        monkeypatch.setattr("lt_data.sources.decompression._HELD_BYTES", 1000)
        monkeypatch.setattr("lt_data.sources.gzip_members._CHUNK_BYTES", 900)


@pytest.mark.usefixtures("confirmation")
@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_members_before_damage_stay_and_nothing_else(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    members = in_members(compress)
    path.write_bytes(b"".join(members))
    assert [d.text for d in DocumentReader([path], SourceOptions(on_bad="skip"))] == TEXTS
    before = sum(map(len, members[:4]))
    for at in (before + len(members[4]) // 2, before + len(members[4]) - 1, before):
        path.write_bytes(flip(b"".join(members), at))
        reader = DocumentReader([path], SourceOptions(on_bad="skip"))
        assert [d.text for d in reader] == TEXTS[:400]
        assert reader.skipped["damaged file"] == 1
        assert 0 <= reader.skipped[UNCONFIRMED] <= 100
        assert reader.finished_files[0].bytes == path.stat().st_size
        with pytest.raises(DataError, match=r"damaged|truncated"):
            list(read_documents([path]))


def test_one_member_without_its_end_is_lost_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES))[:-8])
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped == {"damaged file": 1, UNCONFIRMED: 1000}
    assert reader.skip_examples[UNCONFIRMED] == f"{path}: 1000 records, whose checksum comes after the damage"


def test_a_line_over_two_members_needs_both(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    content = b"".join(LINES)
    members = [gzip.compress(content[i : i + 777]) for i in range(0, len(content), 777)]
    path.write_bytes(b"".join(members))
    assert [d.text for d in DocumentReader([path], SourceOptions(on_bad="skip"))] == TEXTS
    path.write_bytes(flip(b"".join(members), sum(map(len, members[:21])) - 6))  # in the checksum of member 20
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == TEXTS[: content[: 20 * 777].count(b"\n")]
    assert reader.skipped == {"damaged file": 1, UNCONFIRMED: content[20 * 777 : 21 * 777].count(b"\n")}


def test_zeros_between_members_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes((b"\0" * 300_000).join(in_members(gzip.compress)) + b"\0" * 300_000)
    for on_bad in ("error", "skip"):
        assert [d.text for d in read_documents([path], SourceOptions(on_bad=on_bad))] == TEXTS
    path.write_bytes(b"\0" * 10 + path.read_bytes())
    with pytest.raises(DataError, match="damaged gzip file"):
        list(read_documents([path]))


def test_frames_that_are_skippable_or_have_unusual_headers(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    path = tmp_path / "x.jsonl.zst"
    skippable = b"\x5a\x2a\x4d\x18" + (3_000_000).to_bytes(4, "little") + bytes(3_000_000)
    content = b"".join(LINES)
    frames = [zstd(content[:50_000]), skippable]
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()  # no size in the header
    frames.append(stream.compress(content[50_000:60_000]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    frames.append(stream.compress(content[60_000:]) + stream.flush())
    frames += [zstd(b""), zstd(b"\n" * 300_000), zstd(b"\n"), skippable]
    path.write_bytes(b"".join(frames))
    for on_bad in ("error", "skip"):
        reader = DocumentReader([path], SourceOptions(on_bad=on_bad))
        assert [d.text for d in reader] == TEXTS
        assert reader.source_files().unchecked == {}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated zstandard file"):
        list(read_documents([path]))


def test_a_file_that_changes_between_two_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_data.sources.decompression._HELD_BYTES", 1000)
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES), mtime=0))
    other = gzip.compress(b"".join(LINES).replace(b"word", b"wort"), mtime=0)
    other = other[: path.stat().st_size].ljust(path.stat().st_size, b"\0")
    documents = iter(DocumentReader([path], SourceOptions(on_bad="skip")))
    next(documents)
    path.write_bytes(other)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"x\.jsonl\.gz: it (was changed while it was read|reads differently)"):
        list(documents)


def test_a_remote_file_is_confirmed_too(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    members = in_members(gzip.compress)
    memory.pipe("/damage/x.jsonl.gz", flip(b"".join(members), sum(map(len, members[:6])) - 5))
    reader = DocumentReader(["memory://damage/x.jsonl.gz"], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == TEXTS[:500]
    assert reader.skipped == {"damaged file": 1, UNCONFIRMED: 100}


def test_formats_without_a_checksum_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    content = b"".join(LINES)
    (folder / "a.jsonl").write_bytes(content)
    (folder / "b.jsonl").write_bytes(content)
    (folder / "c.txt").write_bytes(b"text")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(content))
    (folder / "e.jsonl.zst").write_bytes(zstd(content))
    (folder / "f.jsonl.zst").write_bytes(zstd(content) + zstd(content, checksum=False))
    manifest = prepare([folder], tokenizer=tokenizer, out=tmp_path / "store", engine="hf")
    assert manifest.sources.unchecked == {"jsonl": 2, "text": 1, "zstd": 1}
    assert [file.unchecked for file in manifest.sources.listed] == ["jsonl", "jsonl", "text", "", "", "zstd"]
    assert read_manifest(tmp_path / "store") == manifest
    shown = format_stats(stats(TokenStore(tmp_path / "store")))
    assert "no check, jsonl      2 source files without a checksum: damage in them may go unnoticed\n" in shown
    sound = prepare([folder / "d.jsonl.gz"], tokenizer=tokenizer, out=tmp_path / "sound", engine="hf")
    assert "unchecked" not in (tmp_path / "sound/manifest.json").read_text(encoding="utf-8")
    assert sound.sources.unchecked == {}


def test_the_reason_is_told_when_everything_is_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES))[:-8])
    with pytest.raises(
        DataError,
        match=rf"no text in 1 files .* \(1 damaged file, 1000 {UNCONFIRMED}\): {path}: truncated gzip file; .*"
        r"1000 records, whose checksum comes after the damage; check the sources",
    ):
        prepare([path], options=SourceOptions(on_bad="skip"), tokenizer=tokenizer, out=tmp_path / "store")
    assert not (tmp_path / "store.building").exists()


def parquet(texts: Any, **options: Any) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), out, **options)
    return out.getvalue()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_of_a_damaged_page_are_never_read(tmp_path: Path, version: str) -> None:
    path = tmp_path / "x.parquet"
    written = {"data_page_size": 2000, "row_group_size": 400, "write_batch_size": 20, "data_page_version": version}
    whole = parquet(TEXTS, write_page_checksum=True, compression="none", use_dictionary=False, **written)
    path.write_bytes(whole)
    reader = DocumentReader([path])
    assert [d.text for d in reader] == TEXTS
    assert reader.source_files().unchecked == {}
    at = whole.index(TEXTS[649].encode())
    path.write_bytes(flip(whole, at, bit=0))
    with pytest.raises(DataError, match=r"x\.parquet: damaged parquet file: .*CRC"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    found = [d.text for d in reader]
    assert found == TEXTS[: len(found)]
    assert 500 < len(found) < 650
    assert reader.skipped == {"damaged file": 1}
    path.write_bytes(parquet(TEXTS, **written))
    reader = DocumentReader([path])
    assert [d.text for d in reader] == TEXTS
    assert reader.source_files().unchecked == {"parquet": 1}
    assert [d.text for d in reader.documents_from(0, 990)] == TEXTS[990:]
    assert reader.source_files().unchecked == {"parquet": 1}


def test_pages_with_other_numbers_of_rows_than_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    whole = parquet(TEXTS[:10], write_page_checksum=True, compression="none", use_dictionary=False)
    path.write_bytes(whole)
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == TEXTS[:10]
    number = whole.rindex(b"\x1c\x15\x14") + 1  # in the header of the last page: num_values = 10
    path.write_bytes(whole[:number] + b"\x15\x12" + whole[number + 2 :])
    with pytest.raises(DataError, match=r"pages of 9 values instead of 10"):
        list(read_documents([path]))


@pytest.mark.parametrize("kind", ["x.jsonl", "x.jsonl.gz", "x.txt", "x.json", "x.parquet", "ids.jsonl", "ids.parquet"])
def test_the_limit_of_a_document(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    field: dict[str, Any] = {"tokens_field": "text"} if kind.startswith("ids") else {}
    values: list[Any] = [[1] * 20, [1] * 3000, [2] * 20] if field else ["a" * 50, "b" * 3_000_000, "c" * 50]
    lines = [json.dumps({"text": value}, separators=(",", ":")).encode() for value in values]
    limit = 1000 if kind != "x.json" else 2_000_000
    if kind == "x.txt":
        path.write_text(values[1], encoding="utf-8")
    elif kind == "x.json":
        path.write_bytes(b"[" + b",".join(lines) + b"]")
    elif kind.endswith(".parquet"):
        path.write_bytes(parquet(values, row_group_size=1))
    else:
        path.write_bytes({".gz": gzip.compress}.get(path.suffix, bytes)(b"\n".join(lines)))
    assert len(list(read_documents([path], SourceOptions(**field)))) == (1 if kind == "x.txt" else 3)
    with pytest.raises(DataError, match=rf"{kind}([:#]2)?: .* of more than {limit} bytes; .*--max-document-bytes"):
        list(read_documents([path], SourceOptions(max_document_bytes=limit, **field)))
    reader = DocumentReader([path], SourceOptions(max_document_bytes=limit, on_bad="skip", **field))
    assert [d.next_record for d in reader] == ([] if kind in ("x.txt", "x.json") else [1, 3])
    assert reader.skipped == {"too large": 1}
    with pytest.raises(DataError, match="max_document_bytes = 0: at least 1"):
        read_documents([path], SourceOptions(max_document_bytes=0))


BOMB = """
import re, sys
from lt_data import DocumentReader, SourceOptions
reader = DocumentReader([sys.argv[1]], SourceOptions(on_bad="skip", max_document_bytes=1 << 22))
n = sum(1 for _ in reader)
status = open("/proc/self/status", encoding="utf-8").read()
print(n, dict(reader.skipped), int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) // 1024)
"""


def test_lists_that_may_repeat_a_value_without_bound_are_not_kept(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    words = pa.DictionaryArray.from_arrays([0, 0, 0], ["x"])
    batch = pa.record_batch({"text": ["a", "b"], "words": pa.ListArray.from_arrays([0, 2, 3], words)})
    with pa.ipc.new_stream(tmp_path / "rows.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    assert [document.text for document in DocumentReader([tmp_path / "rows.arrow"])] == ["a", "b"]
    with pytest.raises(DataError, match="may repeat a value without bound"):
        list(DocumentReader([tmp_path / "rows.arrow"], SourceOptions(keep_fields=["words"])))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "kind",
    [
        "line.jsonl.zst",
        "rows.parquet",
        "rows.arrow",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lines.jsonl.zst", "line.jsonl.gz", "page.parquet")),
    ],
)
def test_little_input_takes_little_memory(tmp_path: Path, kind: str) -> None:
    size = 200_000_000
    path = tmp_path / kind
    if kind == "rows.parquet":
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        texts = pa.DictionaryArray.from_arrays([0] * 128, ["x" * 2**22])
        path.write_bytes(parquet(texts, compression="zstd", store_schema=False))
    elif kind == "rows.arrow":
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        texts = pa.DictionaryArray.from_arrays([0] * 128, ["x" * 2**22])
        batch = pa.record_batch([texts], names=["text"])
        compressed = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(path, batch.schema, options=compressed) as writer:
            writer.write_batch(batch)
    elif kind == "page.parquet":
        path.write_bytes(parquet(["x" * 2**26], compression="zstd", use_dictionary=False))
    else:
        line = b'{"text": "%s"}\n' % (b"x" * (size if kind.startswith("line.") else 2**20))
        content = line * (size // len(line) or 1)
        path.write_bytes(zstd(content) if kind.endswith(".zst") else gzip.compress(content, 1))
        del content
    assert path.stat().st_size < 2_000_000
    run = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, encoding="utf-8", check=True)
    documents, skipped, mebibytes = run.stdout.partition(" {")[0], run.stdout, int(run.stdout.split()[-1])
    assert int(documents) == {"lines.jsonl.zst": size // 2**20, "rows.parquet": 128, "rows.arrow": 128}.get(kind, 0)
    assert ("'too large': 1" in skipped) == (int(documents) == 0)
    assert mebibytes < (400 if kind.endswith((".parquet", ".arrow")) else 180)
