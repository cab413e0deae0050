"""The quickstart's parts without training: folder, corpus, verdict."""

import json
from pathlib import Path

import pytest

from lt_trainer.quickstart.baselines import BaselineComparison, Score
from lt_trainer.quickstart.corpus import documents, standard_library, write_corpus
from lt_trainer.quickstart.main import check_results
from lt_trainer.quickstart.settings import MARKER_FILE, OWN_PATHS, QuickstartError, QuickstartFolder, QuickstartSettings
from lt_trainer.quickstart.training import ResumeCheck


def test_a_new_folder_is_claimed_and_recognised(tmp_path: Path) -> None:
    folder = QuickstartFolder(tmp_path / "a" / "b")
    assert folder.claim(QuickstartSettings(), overwrite=False) is False
    assert folder.claim(QuickstartSettings(), overwrite=False) is True


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(QuickstartError, match="not a quickstart folder"):
            QuickstartFolder(tmp_path).claim(QuickstartSettings(), overwrite=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    QuickstartFolder(tmp_path).claim(QuickstartSettings(), overwrite=False)
    with pytest.raises(QuickstartError, match=r"steps was 1000, is 20; |steps was 1000, is 20\); pass --overwrite"):
        QuickstartFolder(tmp_path).claim(QuickstartSettings(steps=20), overwrite=False)


def test_fresh_removes_what_a_quickstart_made_and_nothing_else(tmp_path: Path) -> None:
    folder = QuickstartFolder(tmp_path)
    folder.claim(QuickstartSettings(), overwrite=False)
    for name in OWN_PATHS:
        path = tmp_path / name
        if "." in name:
            path.write_text("made")
        else:
            path.mkdir()
            (path / "file").write_text("made")
    (tmp_path / "notes.txt").write_text("mine")
    assert folder.claim(QuickstartSettings(steps=20), overwrite=True) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([MARKER_FILE, "notes.txt"])
    assert json.loads((tmp_path / MARKER_FILE).read_text())["settings"]["steps"] == 20


def test_a_link_in_place_of_a_part_is_removed_without_its_target(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "precious").write_text("mine")
    folder = QuickstartFolder(tmp_path / "quickstart")
    folder.claim(QuickstartSettings(), overwrite=False)
    (folder.out / "run").symlink_to(target)
    folder.claim(QuickstartSettings(), overwrite=True)
    assert (target / "precious").read_text() == "mine"
    assert not (folder.out / "run").is_symlink()


def test_standard_library_is_the_same_each_time_and_in_order() -> None:
    first = [document.source for document in standard_library()]
    assert first == [document.source for document in standard_library()]
    assert first == sorted(first)
    assert {"abc.py", "json/decoder.py", "argparse.py"} <= set(first)
    assert not [name for name in first if name.startswith(("test/", "site-packages/", "encodings/"))]


def test_corpus_splits_whole_documents_and_loses_none(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(60):
        (source / f"{i:02}.txt").write_text(f"text number {i}")
    (source / "empty.txt").write_text(" \n")
    folder = QuickstartFolder(tmp_path / "out")
    folder.out.mkdir()
    counts = write_corpus(folder, str(source))
    halves = [
        [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for path in (folder.corpus_train, folder.corpus_validation)
    ]
    assert (counts.train_documents, counts.validation_documents) == (57, 3) == tuple(map(len, halves))
    assert sorted(halves[0] + halves[1]) == sorted(d.text for d in documents(str(source)) if d.text.strip())
    assert counts.train_bytes == sum(len(text) for text in halves[0])


def test_one_document_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(QuickstartError, match=r"1 document\(s\) with text; at least two"):
        write_corpus(QuickstartFolder(tmp_path), str(tmp_path / "one.txt"))


def verdict(
    *, model: float = 4.0, bigram: float = 5.0, shadow: tuple[float, ...] = (1.0, 2.0), logits: bool = True
) -> None:
    def score(name: str, nats: float) -> Score:
        return Score(name=name, nats_per_token=nats, bits_per_byte=nats)

    baselines = (score("bigram, seen tokens", bigram), score("bigram, all training data", 1.0))
    comparison = BaselineComparison(
        model=score("model", model), baselines=baselines, seen_tokens=9, validation_tokens=9
    )
    check_results(ResumeCheck(step=2, expected=shadow, resumed=(1.0, 2.0)), logits, comparison)


def test_the_verdict() -> None:
    verdict()
    with pytest.raises(QuickstartError, match=r"the model \(5.0000 nats/token\) does not beat a bigram .* \(5.0000\)"):
        verdict(model=5.0)
    with pytest.raises(QuickstartError, match="differ from those of the resume check"):
        verdict(shadow=(1.0, 2.0 + 1e-15 * 2))
    with pytest.raises(QuickstartError, match="differ from those of the resume check"):
        verdict(shadow=())
    with pytest.raises(QuickstartError, match="transformers computes different logits"):
        verdict(logits=False)
