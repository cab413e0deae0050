"""Entries that a stranger may have written: other fields, other types and ways out of the folder are refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lt_ckpt.finished_folder import is_valid_name
from lt_trainer.release.bundle import Release, check_inside
from lt_trainer.release.data_files import SOURCE_LIST, SourceEntry, name_in_release, read_source_list

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
    file="sources/train/000000-a.txt",
    left_out="",
)
RELEASE: dict[str, Any] = {
    "lt": {"lt-trainer": "0.1.0"},
    "commit": "",
    "code_license": "Apache-2.0",
    "date": "2026-01-02",
    "run": "run",
    "step": 8,
    "earlier_steps": [6],
    "python": "3.11.7",
    "stores": {"train": {"field": "data.store", "fingerprint": "ab", "joined": False}},
    "changed_fields": {"run.dir": "reproduced"},
    "filtered": {"<host>": 3},
    "paper": "",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", "x"),
        ("license", None),
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
    (tmp_path / SOURCE_LIST).write_text(ENTRY.model_dump_json() + "\n")
    assert read_source_list(tmp_path) == [ENTRY]
    changed = ENTRY.model_copy(update={field: value}) if field != "more" else ENTRY
    text = changed.model_dump_json(warnings=False) if field != "more" else ENTRY.model_dump_json()[:-1] + ',"more":1}'
    (tmp_path / SOURCE_LIST).write_text(text + "\n")
    with pytest.raises(ValidationError, match=field):
        read_source_list(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "x"),
        ("format", "another"),
        ("version", 2),
        ("lt", {"../../x": "0.1.0"}),
        ("stores", {"../../x": RELEASE["stores"]["train"]}),
        ("stores", {"train": {"field": 3}}),
        ("paper", "../paper"),
        ("python", "--help"),
        ("python", "3.11.7\n"),
    ],
)
def test_a_description_of_another_shape(field: str, value: Any) -> None:
    assert Release.model_validate(RELEASE).paper == ""
    with pytest.raises(ValidationError, match=field):
        Release.model_validate(RELEASE | {field: value})


def test_names_of_sources_in_the_release() -> None:
    assert name_in_release("a/b-c.txt") == "b-c.txt"
    assert name_in_release("a/\x1b[1m b\n\udcff\u202e\\.txt") == "__1m_b____.txt"
    assert name_in_release("-rf") == "-rf.txt", "as which a file without a suffix is read"
    assert name_in_release("x/" + "é" * 200 + ".txt") == "_" * 116 + ".txt"
    for path in ("a/..", "a/", ".", "COMMIT", "a/b c", "https://x.org/a?b=c", "x/" + "y" * 255, "😀.txt"):
        name = f"sources/train/000000-{name_in_release(path)}"
        assert is_valid_name(name), path
        assert check_inside(name) == name
