"""Walks over many files: from any point, in parts, with counts that add up, told apart by a fingerprint."""

import gzip
import hashlib
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, DocumentReader, SourceOptions
from lt_data.sources.reader import summarize_sources
from lt_data.store.source_files import SourceFile

# One file: its kind, and what stands in each of its records: a text, or None for one that is bad.
FILES = st.lists(
    st.tuples(
        st.sampled_from(["txt", "jsonl", "jsonl.gz", "parquet"]),
        st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=5),
    ),
    max_size=7,
)


def write_files(folder: Path, files: list[tuple[str, list[str | None]]]) -> tuple[list[str], int]:
    """Write the files; returns all texts in order and how many records are bad."""
    texts: list[str] = []
    bad = 0
    for number, (kind, records) in enumerate(files):
        path = folder / f"{number:02}.{kind}"
        if kind == "txt":
            (text,) = records[:1] or [""]
            path.write_bytes(b"\xff" if text is None else text.encode())
            texts += [] if text is None else [text.removeprefix("\ufeff")]
            bad += text is None
            continue
        texts += [text for text in records if text is not None]
        bad += records.count(None)
        if kind == "parquet":
            pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
            import pyarrow.parquet

            out = io.BytesIO()
            pyarrow.parquet.write_table(pa.table({"text": pa.array(records, pa.string())}), out, row_group_size=2)
            path.write_bytes(out.getvalue())
        else:
            lines = ["{" if text is None else json.dumps({"text": text}) for text in records]
            content = "".join(f"{line}\n" + "\n" * (i % 2) for i, line in enumerate(lines)).encode()
            path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    return texts, bad


@settings(max_examples=120)
@given(FILES, st.integers(1, 5))
def test_nothing_is_lost_from_any_point_and_in_any_parts(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[str | None]]], num_parts: int
) -> None:
    folder = tmp_path_factory.mktemp("walk")
    texts, bad = write_files(folder, files)
    whole = DocumentReader([folder], SourceOptions(on_bad="skip"))
    found = list(whole)
    assert [d.text for d in found] == texts
    assert whole.skipped.total() == bad
    assert [f.sha256 for f in whole.finished_files] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
    ]
    every, skipped, sources = whole.finished_files, whole.skipped, whole.source_files()

    for i, document in enumerate(found):
        rest = list(whole.documents_from(document.file_index, document.next_record))
        assert rest == found[i + 1 :]
        assert whole.finished_files == every[document.file_index :]
        assert whole.read_bytes == whole.total_bytes == sum(file.bytes for file in every)

    parts = [whole.part(rank, num_parts) for rank in range(num_parts)]
    assert [d.text for part in parts for d in part] == texts
    assert [file for part in parts for file in part.finished_files] == every
    assert sum((part.skipped for part in parts), start=type(skipped)()) == skipped
    assert sum(part.n_files for part in parts) == whole.n_files == len(files)
    assert summarize_sources([file for part in parts for file in part.finished_files]) == sources


def test_counts_at_a_document_are_those_up_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{\n{"text": "1"}\n{\n{"text": "2"}\n{\n')
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n')
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [(d.text, reader.skipped.total(), len(reader.finished_files)) for d in reader] == [
        ("1", 1, 0),
        ("2", 2, 0),
        ("3", 3, 1),
    ]
    assert [(d.text, reader.skipped.total(), len(reader.finished_files)) for d in reader.documents_from(0, 2)] == [
        ("2", 1, 0),
        ("3", 2, 1),
    ]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 9))
def test_parts_are_balanced_by_bytes(sizes: list[int], num_parts: int) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({f"/parts/{i:03}.txt": b"x" * size for i, size in enumerate(sizes)} | {"/parts/x.bin": b""})
    try:
        whole = DocumentReader(["memory://parts"])
    finally:
        memory.rm("/parts", recursive=True)
    parts = [whole.part(rank, num_parts) for rank in range(num_parts)]
    assert sum(part.total_bytes for part in parts) == sum(sizes)
    assert sum(part.n_files for part in parts) == len(sizes)
    # No part is more than one file away from its share.
    for part in parts:
        assert abs(part.total_bytes - sum(sizes) / num_parts) <= max(sizes, default=0)


def test_equal_files_are_dealt_out_evenly(tmp_path: Path) -> None:
    for size in (b"", b"x"):
        for i in range(12):
            (tmp_path / f"{i:02}.txt").write_bytes(size)
        whole = DocumentReader([tmp_path])
        assert [whole.part(rank, 4).n_files for rank in range(4)] == [3, 3, 3, 3]
        assert [whole.part(rank, 24).n_files for rank in range(24)].count(1) == 12
        assert whole.part(0, 1).n_files == 12


def test_ranks_and_points_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    reader = DocumentReader([tmp_path])
    for rank, num_parts in ((0, 0), (1, 1), (-1, 2), (2, 2)):
        with pytest.raises(DataError, match=f"part_index = {rank}, num_parts = {num_parts}"):
            reader.part(rank, num_parts)
    for file, record in ((2, 0), (-1, 0), (0, -1)):
        with pytest.raises(DataError, match=f"file = {file}, record = {record}: the sources have 1 files"):
            list(reader.documents_from(file, record))


def test_the_fingerprint_tells_listings_and_options_apart(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.jsonl").write_text("{}")

    def fingerprint(**options: object) -> str:
        return DocumentReader([folder], SourceOptions(**options)).fingerprint  # pyright: ignore[reportArgumentType]

    first = fingerprint()
    assert first == fingerprint() == fingerprint(on_bad="skip"), "a job goes on without what it has stopped at"
    others = [
        fingerprint(text_field="body"),
        fingerprint(tokens_field="tokens"),
        fingerprint(suffixes=[".txt"]),
        DocumentReader([folder]).part(0, 1).fingerprint,
        DocumentReader([folder]).part(0, 2).fingerprint,
        DocumentReader([folder]).part(1, 2).fingerprint,
        DocumentReader([folder / "a.txt", folder / "b.jsonl"], SourceOptions(text_field="x")).fingerprint,
    ]
    (folder / "a.txt").write_text("three")
    others.append(fingerprint())
    (folder / "a.txt").rename(folder / "c.txt")
    others.append(fingerprint())
    (folder / "b.jsonl").unlink()
    others.append(fingerprint())
    assert len({first, *others}) == 1 + len(others)
    os.utime(folder / "c.txt", (0, 0))
    assert fingerprint() == others[-1]  # a copy with other times is the same


def test_sources_of_adds_up() -> None:
    files = [SourceFile(path=f"{i}\udcff", bytes=i, sha256=f"{i:064}") for i in range(3)]
    sources = summarize_sources(files, skipped_links=2)
    lines = "".join(f"{file.sha256} {file.bytes} {file.path}\n" for file in files)
    assert (sources.files, sources.bytes, sources.skipped_links, sources.listed) == (3, 3, 2, tuple(files))
    assert sources.sha256 == hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def test_a_document_is_text_or_ids() -> None:
    import numpy as np

    assert Document(text="a", source="x").as_text() == "a"
    for wrong in ({}, {"text": "a", "ids": np.zeros(1, np.int64)}):
        with pytest.raises(DataError, match="x: a document has either text or ids"):
            Document(source="x", **wrong)
