import hashlib
import json
import os
from pathlib import Path

import pytest

from lt_data import DataError, Document, DocumentReader, SourceOptions, read_documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_folder_is_sorted_by_relative_path_and_filtered(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.md", "a/b/c.py", "a.rst", "a-b.txt", "B.txt", "skip.bin", "a/skip.yml"]
    for name in names:
        write(tmp_path / name, name)
    found = [document.text for document in read_documents([tmp_path])]
    assert found == ["B.txt", "a-b.txt", "a.rst", "a/b/c.py", "a/z.md", "b.txt"]


def test_sources_come_in_the_order_given(tmp_path: Path) -> None:
    write(tmp_path / "d/x.txt", "in folder")
    alone = write(tmp_path / "alone.unknown", "any suffix when named")
    other = write(tmp_path / "other.unknown", "any suffix when named")
    lines = write(tmp_path / "d2/l.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    found = list(read_documents([alone, lines, str(tmp_path / "d"), other]))
    assert [document.text for document in found] == [
        "any suffix when named",
        "one",
        "two",
        "in folder",
        "any suffix when named",
    ]
    assert found[2] == Document(text="two", source=f"{lines}:2", file_index=1, record_number=2, next_record=2)
    assert (found[3].file_index, found[3].next_record, found[4].file_index) == (2, 1, 3)
    assert found[0].source == str(alone)


def test_a_file_of_two_sources_is_an_error(tmp_path: Path) -> None:
    one = write(tmp_path / "in/one.txt", "one")
    write(tmp_path / "in/two.txt", "two")
    (tmp_path / "link.txt").symlink_to(one)
    (tmp_path / "same.txt").hardlink_to(one)
    folder = tmp_path / "in"
    for sources in (
        [folder, folder],
        [folder, one],
        [one, f"{folder}/../in/one.txt"],
        [f"file://{one}", f"file://{one}"],
    ):
        with pytest.raises(DataError, match=r"(one|two)\.txt: in two sources, .* and .*; give each file once"):
            read_documents(sources)
    for name in ("link.txt", "same.txt"):
        with pytest.raises(
            DataError, match=f"{name}: in two sources, {folder} and {tmp_path / name}; give each file once"
        ):
            read_documents([folder, tmp_path / name])


def test_text_is_kept_exactly(tmp_path: Path) -> None:
    text = "\r\n a\x00b\u2028c\tß🦊 \n\n"
    assert [d.text for d in read_documents([write(tmp_path / "x.txt", text)])] == [text]
    line = json.dumps({"text": text}) + "\r\n"
    assert [d.text for d in read_documents([write(tmp_path / "x.jsonl", line)])] == [text]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert [d.text for d in read_documents([write(tmp_path / "x.txt", b"\xef\xbb\xbfab")])] == ["ab"]


def test_jsonl_without_last_newline_and_with_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '\n{"body": "a\\u2028b", "n": 1}\n  \n{"body": ""}')
    found = list(read_documents([path], SourceOptions(text_field="body")))
    assert found == [
        Document(text="a\u2028b", source=f"{path}:2", record_number=2, next_record=2),
        Document(text="", source=f"{path}:4", record_number=4, next_record=4),
    ]


def test_suffixes_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path / "a.c", "c")
    write(tmp_path / "a.txt", "t")
    assert [d.text for d in read_documents([tmp_path], SourceOptions(suffixes=[".c"]))] == ["c"]
    write(tmp_path / "B.TXT", "B")
    assert [d.text for d in read_documents([tmp_path], SourceOptions(suffixes=[".TXT"]))] == ["B", "t"]
    for bad in ([], "txt", ["txt"]):
        with pytest.raises(DataError, match="suffixes = "):
            read_documents([tmp_path], SourceOptions(suffixes=bad))


def test_links_out_of_the_folder_are_not_followed_and_counted(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/secret.txt", "secret")
    inside = write(tmp_path / "in/a.txt", "a")
    (tmp_path / "in/b.txt").symlink_to(outside)
    (tmp_path / "in/c.txt").symlink_to(inside)
    (tmp_path / "in/d").symlink_to(outside.parent)
    reader = DocumentReader([tmp_path / "in"])
    assert [(d.text, Path(d.source).name) for d in reader] == [("a", "a.txt"), ("a", "c.txt")]
    assert reader.source_files().skipped_links == 2
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    assert [d.text for d in read_documents([tmp_path / "link"])] == [
        "secret"
    ]  # a source that is itself a link is meant


def test_counts_and_hashes(tmp_path: Path) -> None:
    first = write(tmp_path / "d/a.txt", "ä")
    second = write(tmp_path / "d/b.jsonl", '{"text": "x"}\n\n')
    reader = DocumentReader([tmp_path / "d"])
    assert reader.total_bytes == 2 + 15
    for _ in range(2):  # a second walk counts anew
        assert len(list(reader)) == 2
        sources = reader.source_files()
        assert (sources.files, sources.bytes, reader.read_bytes) == (2, 17, 17)
        assert [file.sha256 for file in sources.listed] == [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)
        ]
        lines = "".join(f"{file.sha256} {file.bytes} {file.path}\n" for file in sources.listed)
        assert sources.sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_many_files_are_recorded_as_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_data.sources.reader.MAX_LISTED_SOURCES", 3)
    for name in "abcd":
        write(tmp_path / f"{name}.txt", name)
    reader = DocumentReader([tmp_path])
    assert len(list(reader)) == 4
    assert reader.source_files().listed == ()
    assert reader.source_files().files == 4


def test_fsspec_urls() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/corpus/b.txt": b"b", "/corpus/a/x.jsonl": b'{"text": "a"}\n{"text": 1}', "/corpus/c.bin": b"c"})
    try:
        assert [d.text for d in read_documents(["memory://corpus/b.txt"])] == ["b"]
        documents = read_documents(["memory://corpus"])
        assert next(documents) == Document(
            text="a", source="memory:///corpus/a/x.jsonl:1", record_number=1, next_record=1
        )
        with pytest.raises(DataError, match=r"memory:///corpus/a/x\.jsonl:2: field 'text' holds int"):
            next(documents)
        with pytest.raises(DataError, match="cannot read memory://nowhere"):
            read_documents(["memory://nowhere"])
    finally:
        memory.rm("/corpus", recursive=True)
    with pytest.raises(DataError, match="nosuchthing"):
        read_documents(["nosuchthing://x"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"\n', r"x\.jsonl:2: not a JSON value: .*correct or remove the line"),
        ('{"text": "a"}\n[1]\n', r"x\.jsonl:2: no field 'text' \(found list\)"),
        ('{"Text": "a", "id": 1}\n', r"x\.jsonl:1: no field 'text' \(found fields 'Text', 'id'\); name the field"),
        ('{"text": null}\n', r"x\.jsonl:1: field 'text' is null"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"x\.jsonl:2: not UTF-8 at byte 10"),
        ("[" * 100_000, r"x\.jsonl:1: not a JSON value"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path / "x.jsonl", content)
    with pytest.raises(DataError, match=message):
        list(read_documents([path]))


def test_invalid_utf8_names_file_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "latin1.txt", "caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{path}: not UTF-8 at byte 3 \(.*iconv"):
        list(read_documents([path]))


def test_missing_source_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cannot read {tmp_path}/nowhere: No such file or directory; check the path"):
        read_documents([tmp_path, tmp_path / "nowhere"])


def test_one_path_instead_of_a_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass a list"):
        read_documents(str(tmp_path))


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt: neither a file nor a folder"):
        read_documents([tmp_path / "pipe.txt"])


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.open", refuse)  # the tests may run as root, to whom every file is readable
    with pytest.raises(DataError, match=rf"cannot read {path}: Permission denied; check the permissions"):
        list(read_documents([path]))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_for_real(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    path.chmod(0)
    with pytest.raises(DataError, match="check the permissions"):
        list(read_documents([path]))
