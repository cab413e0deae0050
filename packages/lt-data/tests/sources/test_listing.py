"""Which files are read, in which order, and what is said of the others."""

import os
from pathlib import Path

import pytest

from lt_data import DataError, SourceOptions
from lt_data.sources.reader import DocumentReader, read_documents


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_folders_are_sorted_by_relative_path_and_filtered(tmp_path):
    names = ["b.txt", "a/z.md", "a/b/c.py", "a.rst", "a-b.txt", "B.TXT", "é.txt", "z.txt"]
    others = ["skip.bin", "a/skip.bin", "b.csv", "Makefile", ".hidden.txt", ".git/x.txt", "a/.git/y.txt"]
    for name in names + others:
        write(tmp_path / "in" / name, name)
    (tmp_path / "in/linked").symlink_to(tmp_path / "in/a")
    right = ["B.TXT", "a-b.txt", "a.rst", "a/b/c.py", "a/z.md", "b.txt", "z.txt", "é.txt"]
    for source in (tmp_path / "in", f"file://{tmp_path / 'in'}"):
        reader = DocumentReader([source])
        assert [document.text for document in reader] == right
        (notice,) = reader.notices()
        assert notice.startswith("not read: ")
        assert notice.endswith("; name their suffixes to read them (--suffix)")
        for part in ("hidden 3", ".bin 2", ".csv 1", "Makefile 1"):
            assert part in notice
    assert [d.text for d in read_documents([tmp_path / "in"], SourceOptions(suffixes=[".BIN"]))] == others[1::-1]


def test_sources_come_in_the_order_given(tmp_path):
    write(tmp_path / "d/x.txt", "in folder")
    alone = write(tmp_path / "alone.unknown", "any suffix when named")
    lines = write(tmp_path / "d2/l.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "d")
    found = list(read_documents([alone, lines, str(tmp_path / "link")]))
    assert [document.text for document in found] == ["any suffix when named", "one", "two", "in folder"]
    assert [document.file_index for document in found] == [0, 1, 1, 2]


def test_a_file_of_two_sources_is_an_error(tmp_path):
    one = write(tmp_path / "in/one.txt", "one")
    write(tmp_path / "in/two.txt", "two")
    (tmp_path / "link.txt").symlink_to(one)
    folder = tmp_path / "in"
    for sources in ([folder, folder], [folder, one], [one, f"{folder}/../in/one.txt"], [folder, tmp_path / "link.txt"]):
        with pytest.raises(DataError, match=r"(one|two|link)\.txt: in two sources, .* and .*; give each file once"):
            read_documents(sources)


def test_the_fingerprint_tells_listings_and_options_apart(tmp_path):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.jsonl", "{}")

    def fingerprint(options: SourceOptions | None = None) -> str:
        return DocumentReader([tmp_path], options).fingerprint

    first = fingerprint()
    assert first == fingerprint(SourceOptions(on_bad="skip", max_document_bytes=5))
    others = [fingerprint(SourceOptions(text_field="body")), fingerprint(SourceOptions(tokens_field="tokens"))]
    others.append(DocumentReader([tmp_path]).slice(1, 2).fingerprint)
    write(tmp_path / "a.txt", "three")
    others.append(fingerprint())
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    others.append(fingerprint())
    assert len({first, *others}) == 6


def test_what_cannot_be_read_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    write(tmp_path / "good.txt", "good")
    for source, message in (
        (tmp_path / "nowhere", "cannot read .*nowhere: No such file or directory; check the path"),
        (tmp_path / "pipe.txt", "neither a file nor a folder"),
        ("no text\nbut a document", r"no such file or folder \(a text in memory: "),
        ("nosuchthing://x", "nosuchthing"),
        ("memory://nowhere", "cannot read memory://nowhere"),
        (tmp_path, r"broken\.txt: not a file, or a link to nothing; .*--on-bad skip"),
    ):
        with pytest.raises(DataError, match=message):
            read_documents([source])
    with pytest.raises(DataError, match="pass a list"):
        read_documents(str(tmp_path))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == ["good"]
    assert "no file 2" in reader.ignored_files
