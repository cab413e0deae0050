"""The quickstart's parts without training: folder, corpus."""

import json
from pathlib import Path

import pytest

from lt_trainer.quickstart.corpus import standard_library, write_corpus
from lt_trainer.quickstart.settings import MARKER_FILE, OWN_PATHS, QuickstartError, claim_folder

SETTINGS = {"source": "", "preset": "tiny-2m", "steps": 1000}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "summary.json").write_text("mine")
    with pytest.raises(QuickstartError, match="not a quickstart"):
        claim_folder(tmp_path, SETTINGS, overwrite=overwrite)
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_overwrite_removes_what_a_quickstart_made_and_nothing_else(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "quickstart", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    assert [claim_folder(out, SETTINGS, overwrite=False) for _ in range(2)] == [False, True]
    for path in (out / name for name in (*OWN_PATHS, "notes.txt")):
        path.write_text("made") if "." in path.name else path.mkdir()
    (out / "run").rmdir()
    (out / "run").symlink_to(elsewhere)
    assert claim_folder(out, SETTINGS | {"steps": 20}, overwrite=True) is False
    assert sorted(path.name for path in out.iterdir()) == sorted([MARKER_FILE, "notes.txt"])
    assert json.loads((out / MARKER_FILE).read_text())["steps"] == 20
    assert (elsewhere / "precious").read_text() == "mine"


def test_standard_library_is_in_order_without_what_differs_between_machines() -> None:
    names = [document.source for document in standard_library()]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if name.startswith(("test/", "site-packages/", "encodings/"))]


def test_corpus_splits_whole_documents_and_loses_none(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(60):
        (source / f"{i:02}.txt").write_text(f"text number {i}")
    (source / "empty.txt").write_text(" \n")
    assert write_corpus(tmp_path / "corpus", str(source)) == (57, 3)
    lines = [(tmp_path / "corpus" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "validation")]
    assert list(map(len, lines)) == [57, 3]
    assert {json.loads(line)["text"] for half in lines for line in half} == {f"text number {i}" for i in range(60)}
