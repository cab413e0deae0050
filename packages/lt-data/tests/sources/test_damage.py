"""Damaged, edited and oversized input: no document is kept before the checksum of its member or page confirmed it."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from lt_data import DataError, DocumentReader, Tokenizer, prepare, read_documents
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


@pytest.mark.guarantee("sources-confirmed")
@pytest.mark.usefixtures("confirmation")
@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_members_before_damage_stay_and_nothing_else(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    members = in_members(compress)
    path.write_bytes(b"".join(members))
    assert [d.text for d in DocumentReader([path], on_bad="skip")] == TEXTS
    before = sum(map(len, members[:4]))
    for at in (before + len(members[4]) // 2, before + len(members[4]) - 1, before):
        path.write_bytes(flip(b"".join(members), at))
        reader = DocumentReader([path], on_bad="skip")
        assert [d.text for d in reader] == TEXTS[:400]
        assert reader.skipped["damaged file"] == 1
        assert 0 <= reader.skipped[UNCONFIRMED] <= 100
        assert reader.finished_files[0].bytes == path.stat().st_size
        with pytest.raises(DataError, match=r"damaged|truncated"):
            list(read_documents([path]))


def test_one_member_without_its_end_is_lost_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES))[:-8])
    reader = DocumentReader([path], on_bad="skip")
    assert list(reader) == []
    assert reader.skipped == {"damaged file": 1, UNCONFIRMED: 1000}
    assert reader.skip_examples[UNCONFIRMED] == f"{path}: 1000 records, whose checksum comes after the damage"


def test_a_line_over_two_members_needs_both(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    content = b"".join(LINES)
    members = [gzip.compress(content[i : i + 777]) for i in range(0, len(content), 777)]
    path.write_bytes(b"".join(members))
    assert [d.text for d in DocumentReader([path], on_bad="skip")] == TEXTS
    path.write_bytes(flip(b"".join(members), sum(map(len, members[:21])) - 6))  # in the checksum of member 20
    reader = DocumentReader([path], on_bad="skip")
    assert [d.text for d in reader] == TEXTS[: content[: 20 * 777].count(b"\n")]
    assert reader.skipped == {"damaged file": 1, UNCONFIRMED: content[20 * 777 : 21 * 777].count(b"\n")}


def test_zeros_between_members_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes((b"\0" * 300_000).join(in_members(gzip.compress)) + b"\0" * 300_000)
    for on_bad in ("error", "skip"):
        assert [d.text for d in read_documents([path], on_bad=on_bad)] == TEXTS
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
        reader = DocumentReader([path], on_bad=on_bad)
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
    documents = iter(DocumentReader([path], on_bad="skip"))
    next(documents)
    path.write_bytes(other)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"x\.jsonl\.gz: it (was changed while it was read|reads differently)"):
        list(documents)


def test_a_remote_file_is_confirmed_too(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    members = in_members(gzip.compress)
    memory.pipe("/damage/x.jsonl.gz", flip(b"".join(members), sum(map(len, members[:6])) - 5))
    reader = DocumentReader(["memory://damage/x.jsonl.gz"], on_bad="skip")
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
        prepare([path], tokenizer=tokenizer, out=tmp_path / "store", on_bad="skip")
    assert not (tmp_path / "store.building").exists()
