"""Entries of folders that are no documents: hidden files, links to nothing, pipes, saved datasets that name others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, SourceOptions, Tokenizer, prepare
from lt_data.sources.reader import DocumentReader, read_documents


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def names(folder: Path, **options: Any) -> list[str]:
    return [Path(document.source).name for document in read_documents([folder], SourceOptions(**options))]


def test_hidden_files_are_not_read_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / ".corpus"  # the source itself is meant
    for name in ("a.txt", ".b.txt", ".git/c.txt", ".git/refs/d.txt", "e/.cache/f.txt", "e/g.txt"):
        write(folder / name, name)
    reader = DocumentReader([folder])
    assert [document.text for document in reader] == ["a.txt", "e/g.txt"]
    assert reader.ignored_files == "3 files (hidden 3)"
    assert [document.text for document in read_documents([f"file://{folder}"])] == ["a.txt", "e/g.txt"]
    assert [document.text for document in read_documents([folder / ".b.txt"])] == [".b.txt"]


@pytest.mark.parametrize("target", ["nowhere", "loop.txt", "b/loop"])
def test_a_link_to_nothing_is_named(tmp_path: Path, target: str) -> None:
    write(tmp_path / "a.txt", "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/loop").symlink_to("../loop.txt")
    (tmp_path / "loop.txt").symlink_to(target)
    with pytest.raises(DataError, match=rf"{tmp_path}/loop\.txt: a symbolic link to nothing; remove or correct it"):
        read_documents([tmp_path])
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [document.text for document in reader] == ["a"]
    assert reader.source_files().skipped_links == 1
    assert reader.notices()[:1] == [f"skipped {tmp_path}/loop.txt: a symbolic link to nothing; remove or correct it"]


def test_a_pipe_is_refused_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "in"
    write(folder / "a.txt", "a quick brown fox")
    os.mkfifo(folder / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt: neither a file nor a folder"):
        read_documents([folder / "b.txt"])
    with pytest.raises(DataError, match=r"b\.txt: not a regular file; move it away"):
        read_documents([folder])
    notices: list[str] = []
    manifest = prepare(
        [folder],
        options=SourceOptions(on_bad="skip"),
        tokenizer=tokenizer,
        out=tmp_path / "out",
        engine="hf",
        notify=notices.append,
    )
    assert manifest.documents == 1
    assert notices == [f"skipped {folder}/b.txt: not a regular file; move it away, or write it to a file"]
    for name in ("tokenizer.json", "elsewhere"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match="no tokenizer at"):
            Tokenizer.load(tmp_path / name)


SaveDataset = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> SaveDataset:
    """Makes a folder as `save_to_disk` does, beside a file that is not part of it."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["in the folder"]})
    write(tmp_path / "secret.arrow", "")
    for path, text in ((tmp_path / "secret.arrow", "secret"), (tmp_path / "sv/data.arrow", "secret")):
        path.parent.mkdir(exist_ok=True)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(pa.table({"text": [text]}))
    write(tmp_path / "sv/state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))

    def make(file: object, splits: Any = None) -> Path:
        folder = tmp_path / "saved"
        inner = folder if splits is None else folder / "train"
        inner.mkdir(parents=True)
        with pa.OSFile(str(inner / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        write(inner / "state.json", json.dumps({"_data_files": [{"filename": file}]}))
        write(inner / "dataset_info.json", "{}")
        if splits is not None:
            write(folder / "dataset_dict.json", json.dumps({"splits": splits}))
        return folder

    return make


def test_a_saved_dataset_is_read(save: SaveDataset) -> None:
    assert [document.text for document in read_documents([save("data.arrow", ["train"])])] == ["in the folder"]


@pytest.mark.parametrize("file", ["../secret.arrow", "/etc/passwd", "..", "", ".", 3, None, "a\0b"])
def test_a_saved_dataset_names_only_its_own_files(save: SaveDataset, file: object) -> None:
    folder = save(file)
    for source in (str(folder), f"file://{folder}"):
        with pytest.raises(DataError, match=r"state\.json: _data_files does not name files of the folder"):
            read_documents([source])


@pytest.mark.parametrize("splits", [["../sv"], ["/etc"], [".."], ["train", 3]])
def test_a_saved_dataset_has_its_splits_inside(save: SaveDataset, splits: list[Any]) -> None:
    folder = save("data.arrow", splits)
    for source in (str(folder), f"file://{folder}"):
        with pytest.raises(DataError, match=r"dataset_dict\.json: .* is not a folder of this one"):
            read_documents([source], SourceOptions(split=str(splits[0])))


@pytest.mark.parametrize("name", ["data.arrow", "state.json"])
def test_a_saved_dataset_has_no_links_out(save: SaveDataset, tmp_path: Path, name: str) -> None:
    folder = save("data.arrow")
    outside = tmp_path / "secret.arrow" if name == "data.arrow" else tmp_path / "sv/state.json"
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    with pytest.raises(DataError, match=rf"saved/{name}: a symbolic link leads out of"):
        read_documents([folder])


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"_data_files": 3}', '{"_data_files": [' + "[" * 900])
def test_a_saved_dataset_with_another_description(save: SaveDataset, content: str) -> None:
    folder = save("data.arrow")
    write(folder / "state.json", content)
    with pytest.raises(DataError, match=r"state\.json: .*; save the dataset again"):
        read_documents([folder])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.Table.from_arrays(
        [pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array([[1], [2]])], ["text", "text", "n"]
    )
    path = tmp_path / f"two.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(DataError, match=rf"two\.{kind}#1: several columns 'text'; rename all but one of them"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped == {"two columns of one name": 2}
    assert [str(document.ids) for document in read_documents([path], SourceOptions(tokens_field="n"))] == ["[1]", "[2]"]
