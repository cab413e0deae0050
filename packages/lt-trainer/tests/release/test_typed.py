"""Entries that a stranger may have written: other fields, other types and ways out of the folder are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lt_ckpt.finished_folder import is_valid_name
from lt_trainer.release.data_files import SOURCE_LIST, SourceEntry, name_in_bundle, read_source_list
from lt_trainer.release.facts import PROVENANCE, Provenance, read_provenance, write_provenance
from lt_trainer.release.typed import from_json, is_inside

ENTRY = SourceEntry(
    store="train",
    path="a.txt",
    bytes=1,
    sha256="0" * 64,
    documents=None,
    tokens=3,
    license="",
    redistribute=False,
    name="",
    url="",
    file="",
    left_out="",
)
PROVENANCE_VALUES = Provenance(
    lt={"lt-trainer": "0.1.0"},
    date="2026-01-02",
    run="run",
    step=8,
    earlier_steps=[6],
    removed_steps=[],
    commit="",
    has_patch=False,
    untracked=[],
    without_hash=[],
    stores={"train": {"field": "data.store", "fingerprint": "ab", "kind": "flat"}},
    changed_fields={"run.dir": "reproduced"},
    filtered={"<host>": 3},
    paper="",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_provenance(tmp_path, PROVENANCE_VALUES)
    assert read_provenance(tmp_path) == PROVENANCE_VALUES
    assert from_json(SourceEntry, dataclasses.asdict(ENTRY), "x") == ENTRY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", "1"),
        ("bytes", True),
        ("bytes", 1.0),
        ("tokens", "3"),
        ("license", None),
        ("redistribute", 1),
        ("path", ["a"]),
        ("more", 1),
        ("file", "../../etc/passwd"),
        ("file", "/etc/passwd"),
        ("file", "sources//x"),
        ("file", "sources/../x"),
        ("file", "sources/\0"),
    ],
)
def test_a_source_of_another_shape(field: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / SOURCE_LIST).write_text(json.dumps(dataclasses.asdict(ENTRY) | {field: value}) + "\n")
    with pytest.raises(ValueError, match=f"{SOURCE_LIST}:1: "):
        read_source_list(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "8"),
        ("earlier_steps", ["6"]),
        ("stores", {"../../x": {"field": "data.store", "fingerprint": "ab", "kind": "flat"}}),
        ("stores", {"train": "x"}),
        ("stores", {"train": {"field": 3}}),
        ("paper", "../paper"),
        ("lt", {"lt-trainer": 1}),
        ("has_patch", 0),
    ],
)
def test_a_provenance_of_another_shape(field: str, value: Any, tmp_path: Path) -> None:
    write_provenance(tmp_path, PROVENANCE_VALUES)
    values = json.loads((tmp_path / PROVENANCE).read_text()) | {field: value}
    (tmp_path / PROVENANCE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=PROVENANCE):
        read_provenance(tmp_path)


def test_names_of_sources_in_the_release() -> None:
    assert name_in_bundle("a/b-c.txt") == "b-c.txt"
    assert name_in_bundle("a/\x1b[1m b\n\udcff\u202e\\.txt") == "__1m_b____.txt"
    assert name_in_bundle("-rf") == "_rf"
    assert name_in_bundle("x/" + "é" * 200 + ".txt") == "_" * 176 + ".txt"
    for path in ("a/..", "a/", ".", "COMMIT", "a/b c", "https://x.org/a?b=c", "x/" + "y" * 255, "😀.txt"):
        assert is_valid_name(name_in_bundle(path)), path
    assert not is_inside("")
