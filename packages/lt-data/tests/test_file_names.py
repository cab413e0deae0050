"""Names that a manifest, an index or a listing gives stay inside the folder that they are names in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_data import SourceOptions
from lt_data.errors import DataError
from lt_data.exports.export_list import ExportList, read_export_list
from lt_data.file_names import check_name
from lt_data.remote.file_list import FileList, ListedFile, decode_list
from lt_data.sources.reader import read_documents
from lt_data.store.manifest import read_manifest

HOSTILE_NAMES = (
    *("", ".", "..", "/", "/etc/passwd", "../up", "a/../../up", "a/..", "./a", "a//b", "a/", "//host/share", "a\0b"),
    *("C:", "C:/up", "c:up", "\\up", "a\\..\\..\\up", "\\\\host\\share\\up", None, 7, b"a", ["a"]),
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_leads_out_of_its_folder_is_refused_with_its_source(name):
    with pytest.raises(DataError) as caught:
        check_name(name, "s3://bucket/manifest.json")
    assert str(caught.value).startswith("s3://bucket/manifest.json: ")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a", "a/b/c.bin", "..a", "a..", ".hidden/...", "größe 1.json", "ab:c", "a b", "~"])
def test_other_names_are_returned_as_they_are(name):
    assert check_name(name, "manifest.json") == name


def _export_list(folder: Path, name: str) -> None:
    listed = ExportList(to="", tokenizer="", bos=True, eos=True, tokens=1, padding=0, files={name: ""})
    (folder / "lt-export.json").write_bytes(listed.encode())
    read_export_list(folder)


def _saved_dataset(folder: Path, name: str) -> None:
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    list(read_documents([folder], SourceOptions(tokens_field="input_ids")))


def _manifest_of_store(folder: Path, name: str) -> None:
    text = (folder / "store" / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"00000"', json.dumps(name)))
    assert json.loads(text) != json.loads((folder / "manifest.json").read_text())
    read_manifest(folder)


READERS: dict[str, Callable[[Path, str], object]] = {
    "list of an upload": lambda folder, name: decode_list(
        FileList(source="", files={"a": ListedFile(1, "")}).encode().replace(b'"a"', json.dumps(name).encode()), "list"
    ),
    "list of the caller": lambda folder, name: FileList(source="list", files={name: ListedFile(1, "")}),
    "list of an export": _export_list,
    "saved dataset": _saved_dataset,
    "manifest of a store": _manifest_of_store,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_names_that_lead_out_of_its_folder(reader, store, tmp_path):
    assert store.path == tmp_path / "store"
    for name in HOSTILE_NAMES:
        if isinstance(name, str):
            with pytest.raises(DataError) as caught:
                READERS[reader](tmp_path, name)
            assert repr(name) in str(caught.value), (reader, name)
