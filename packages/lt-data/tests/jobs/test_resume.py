"""An interrupted job resumes after its last finished shard, with the result of an uninterrupted run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lt_data
from lt_data import DataError, Document, StoreManifest, Tokenizer, TokenStore, prepare, prepare_documents
from lt_data.preparation.build_folder import describe_differences

Contents = Callable[[Path], dict[str, bytes]]


def cut_after(reports: int) -> Callable[[int, int, str], None]:
    """A progress function that interrupts the work at its n-th report."""
    seen = 0

    def report(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == reports:
            raise KeyboardInterrupt

    return report


def cut_off(corpus: Path, out: Path, options: dict[str, Any], reports: int) -> bool:
    """Run until the n-th report; whether it was cut off before its end."""
    try:
        prepare([corpus], out=out, progress=cut_after(reports), **options)
    except KeyboardInterrupt:
        return True
    return False


def test_the_corpus_has_everything(whole_manifest: StoreManifest) -> None:
    assert len(whole_manifest.shards) > 5
    assert set(whole_manifest.left_out) == {
        "duplicate",
        "empty",
        "too few characters",
        "too few tokens",
        "too many characters",
        "too many tokens",
    }
    assert whole_manifest.skipped == {"broken JSON line": 5}
    assert whole_manifest.special_strings["<|eos|>"] > 10
    assert whole_manifest.is_consistent


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("batch_bytes", [100, 4000])
def test_goes_on_to_the_same_bytes_wherever_it_was_cut(
    fast_path: Path,
    corpus: Path,
    options: dict[str, Any],
    whole: dict[str, bytes],
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
) -> None:
    """The second run has batches of another size than the first."""
    cuts = 0
    kept = set()
    while True:
        out = fast_path / str(cuts)
        if not cut_off(corpus, out, options, cuts + 1):
            break
        cuts += 1
        at_work = out.with_name(f"{out.name}.building")
        finished = {path.name: path.stat() for path in (at_work / "store/shards").glob("*") if at_work.exists()}
        journaled = (at_work / "journal").read_bytes().count(b"\n") - 1 if at_work.exists() else 0
        kept.add(journaled)
        notices: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr("lt_data.tokenizing.encode._BATCH_BYTES", batch_bytes)
            prepare([corpus], out=out, notify=notices.append, **options)
        assert contents(out) == whole
        assert not at_work.exists()
        said = [notice for notice in notices if "resuming" in notice]
        assert [f"after {journaled} finished shards" in notice for notice in said] == ([True] if journaled else [])
        for number in range(journaled):  # the finished shards are the same files, not written again
            for name in (f"{number:05d}.bin", f"{number:05d}.idx"):
                now = (out / "shards" / name).stat()
                assert (now.st_ino, now.st_mtime_ns) == (finished[name].st_ino, finished[name].st_mtime_ns)
    assert cuts > 15
    assert len(kept) > 4


@pytest.mark.usefixtures("small_batches")
def test_what_was_read_ahead_and_left_out_is_counted_once(
    fast_path: Path, corpus: Path, options: dict[str, Any], contents: Contents
) -> None:
    """To choose an engine the beginning is read before anything is written: what is left out there lies ahead."""
    options = {**options, "engine": "auto"}
    prepare([corpus], out=fast_path / "whole", **options)
    gone_on = 0
    for reports in range(2, 18):
        out = fast_path / str(reports)
        assert cut_off(corpus, out, options, reports)
        notices: list[str] = []
        prepare([corpus], out=out, notify=notices.append, **options)
        gone_on += any("resuming after" in notice for notice in notices)
        assert contents(out) == contents(fast_path / "whole"), reports
    assert gone_on > 8


@pytest.mark.usefixtures("small_batches")
def test_cut_again_and_again(
    fast_path: Path, corpus: Path, options: dict[str, Any], whole: dict[str, bytes], contents: Contents
) -> None:
    out = fast_path / "store"
    cuts = 0
    while cut_off(corpus, out, {**options, "shard_tokens": 150}, 8):
        cuts += 1
        assert cuts < 100
    assert cuts > 1
    assert contents(out) == whole


@pytest.mark.parametrize(("length", "shown"), [(80, "x" * 80), (81, "x" * 77 + "...")])
def test_what_changed_is_told_in_at_most_80_characters(length: int, shown: str) -> None:
    assert describe_differences({"a": "x" * length, "b": 1}, {"a": None, "b": 1}) == [f"a was {shown} and is None"]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bos": False}, "bos was True and is False"),
        ({"shard_tokens": 301}, "shard_tokens was 150 and is 301"),
        ({"special_tokens_as": "ids"}, "special_tokens_as was text and is ids"),
        ({"selection": lt_data.Selection(max_tokens=50)}, "max_tokens was 110 and is 50"),
        ({"options": lt_data.SourceOptions()}, "on_bad was skip and is error"),
        ({"options": lt_data.SourceOptions(on_bad="skip", text_field="body")}, "listing of the sources was "),
        ({"tokenizer": "other"}, "tokenizer was "),
    ],
)
def test_another_job_is_refused_with_what_changed(
    fast_path: Path,
    corpus: Path,
    options: dict[str, Any],
    whole: dict[str, bytes],
    contents: Contents,
    change: dict[str, Any],
    said: str,
) -> None:
    if "tokenizer" in change:
        change = {"tokenizer": lt_data.train_bpe(["other text"], vocab_size=260)}
    out = fast_path / "store"
    assert cut_off(corpus, out, options, 14)
    before = contents(fast_path)
    with pytest.raises(
        DataError, match=rf"an interrupted job with other settings: .*{said}.*start over \(--no-resume\)"
    ):
        prepare([corpus], out=out, **{**options, **change})
    assert contents(fast_path) == before
    prepare([corpus], out=out, **options)
    assert contents(out) == whole


@pytest.mark.usefixtures("small_batches")
def test_a_job_that_stopped_at_bad_input_goes_on_without_it(
    fast_path: Path, options: dict[str, Any], contents: Contents
) -> None:
    lines = [json.dumps({"text": f"text {number} " * 5}) for number in range(200)]
    lines[150] = "{"
    (fast_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = {**options, "keep": []}
    prepare([fast_path / "in.jsonl"], out=fast_path / "whole", **options)
    out = fast_path / "store"
    with pytest.raises(DataError, match=r"in.jsonl:151: not a JSON value.* finished shards are kept"):
        prepare([fast_path / "in.jsonl"], out=out, **{**options, "options": lt_data.SourceOptions()})
    notices: list[str] = []
    prepare([fast_path / "in.jsonl"], out=out, notify=notices.append, **options)
    assert any("resuming after" in notice for notice in notices)
    assert contents(out) == contents(fast_path / "whole")


@pytest.mark.usefixtures("small_batches")
def test_sources_that_changed_are_refused_and_fresh_starts_again(
    fast_path: Path, corpus: Path, options: dict[str, Any], contents: Contents
) -> None:
    copied = fast_path / "in"
    copied.mkdir()
    for path in corpus.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    out = fast_path / "store"
    assert cut_off(copied, out, options, 14)
    with (copied / "3.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "one more document"}) + "\n")
    with pytest.raises(DataError, match=r"bytes of the sources was .* and is .*listing of the sources was"):
        prepare([copied], out=out, **options)
    prepare([copied], out=out, no_resume=True, **options)
    prepare([copied], out=fast_path / "again", **options)
    assert contents(out) == contents(fast_path / "again")
    assert sorted(path.name for path in fast_path.iterdir()) == ["again", "in", "store"]


@pytest.mark.usefixtures("small_batches")
def test_an_error_in_the_middle_keeps_what_is_finished(
    fast_path: Path, corpus: Path, options: dict[str, Any], contents: Contents
) -> None:
    out = fast_path / "store"
    with pytest.raises(DataError, match=r"0\.jsonl:6: .*"):
        prepare([corpus], out=out, **{**options, "options": lt_data.SourceOptions()})
    assert list(fast_path.iterdir()) == []  # nothing was finished
    (fast_path / "in").mkdir()
    for number in range(8):
        (fast_path / f"in/{number}.txt").write_text(f"{number} some words " * 30, encoding="utf-8")
    (fast_path / "in/7.txt").write_bytes(b"\xff" * 570)
    few = {**options, "options": lt_data.SourceOptions(), "selection": None, "shard_tokens": 300}
    with pytest.raises(
        DataError, match=r"7\.txt: not UTF-8.*\d finished shards are kept in .*store\.building: run the same"
    ):
        prepare([fast_path / "in"], out=out, **few)
    good = fast_path / "in/7.txt"
    good.write_text("x" * 570, encoding="utf-8")  # mended to the same size: the listing is the same
    prepare([fast_path / "in"], out=out, **few)
    prepare([fast_path / "in"], out=fast_path / "again", **few)
    assert contents(out) == contents(fast_path / "again")


def test_documents_of_a_caller_begin_again(fast_path: Path, tokenizer: Tokenizer, corpus: Path) -> None:
    def documents(n: int) -> list[Document]:
        return [Document(text=f"{i} words and words", source=str(i)) for i in range(n)]

    out = fast_path / "store"
    with pytest.raises(KeyboardInterrupt):
        prepare_documents(documents(200), tokenizer=tokenizer, out=out, shard_tokens=50, progress=cut_after(1))
    assert list(fast_path.iterdir()) == []
    # Cut off by a kill, it leaves a folder that the next job clears away.
    prepare_documents(documents(30), tokenizer=tokenizer, out=out, shard_tokens=50)
    assert TokenStore(out).n_documents == 30


@pytest.mark.usefixtures("small_batches")
def test_a_caller_does_not_take_over_a_job_that_can_go_on(
    fast_path: Path,
    corpus: Path,
    options: dict[str, Any],
    tokenizer: Tokenizer,
    whole: dict[str, bytes],
    contents: Contents,
) -> None:
    out = fast_path / "store"
    assert cut_off(corpus, out, options, 14)
    documents = [Document(text="a", source="")]
    with pytest.raises(DataError, match=r"holds another interrupted job; finish it, or start over \(--no-resume\)"):
        prepare_documents(documents, tokenizer=tokenizer, out=out)
    prepare([corpus], out=out, **options)
    assert contents(out) == whole


def test_a_folder_that_is_not_ours_is_not_touched(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    foreign = fast_path / "store.building"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work", encoding="utf-8")
    for fresh in (False, True):
        with pytest.raises(DataError, match=r"store\.building: holds other files \(thesis\.tex\); move them away"):
            prepare([corpus], out=fast_path / "store", no_resume=fresh, **options)
    assert os.listdir(foreign) == ["thesis.tex"]


@pytest.mark.usefixtures("small_batches")
def test_a_finished_shard_that_is_gone_is_noticed(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    out = fast_path / "store"
    assert cut_off(corpus, out, options, 14)
    shard = fast_path / "store.building/store/shards/00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"00001\.bin: size differs from the journal; start over"):
        prepare([corpus], out=out, **options)
    shard.unlink()
    with pytest.raises(DataError, match=r"cannot resume after the shard .*00001\.bin"):
        prepare([corpus], out=out, **options)
    prepare([corpus], out=out, no_resume=True, **options)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("edited", [0, 1, 2])
def test_sources_that_were_edited_since_the_interruption_are_an_error(
    fast_path: Path, tokenizer: Tokenizer, edited: int, contents: Contents
) -> None:
    # Three files; the job is cut off within the second, of which the shards hold the beginning.
    folder = fast_path / "in"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": f"{number} {i} some words"}) + "\n" for i in range(40)]
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "shard_tokens": 100}
    prepare([folder], out=fast_path / "whole", **settings)
    out = fast_path / "store"
    with pytest.raises(KeyboardInterrupt):
        prepare([folder], out=out, progress=cut_after(3), **settings)
    path = folder / f"{edited}.jsonl"
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace(f'"{edited} 1 some', f'"{edited} 1 sane'), encoding="utf-8")
    if edited == 1:
        for _ in range(2):
            with pytest.raises(
                DataError,
                match=r"1\.jsonl: its first \d+ bytes are not those that the interrupted job read; restore the file, "
                r"or start over \(--no-resume\)",
            ):
                prepare([folder], out=out, **settings)
        path.write_text("", encoding="utf-8")
        with pytest.raises(DataError, match="listing of the sources was"):
            prepare([folder], out=out, **settings)
        path.write_text(content, encoding="utf-8")
    prepare([folder], out=out, **settings)
    made, whole = (json.loads(contents(store)["manifest.json"]) for store in (out, fast_path / "whole"))
    assert (made == whole) == (edited != 2)  # the first is not read again, the last was not read before
    assert made["sources"]["listed"][0] == whole["sources"]["listed"][0]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("cut", [2, 9])
def test_an_edit_is_noticed_in_any_later_resume(fast_path: Path, tokenizer: Tokenizer, cut: int) -> None:
    (fast_path / "in").mkdir()
    for number in range(90):
        (fast_path / f"in/{number:02}.txt").write_text(f"{number} some words " * 3, encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "shard_tokens": 70}
    out = fast_path / "store"
    with pytest.raises(KeyboardInterrupt):
        prepare([fast_path / "in"], out=out, progress=cut_after(cut), **settings)
    with pytest.raises(KeyboardInterrupt):  # before another shard is finished
        prepare([fast_path / "in"], out=out, progress=cut_after(1), **settings)
    record = json.loads((fast_path / "store.building/journal").read_bytes().splitlines()[-1].split(b" ", 1)[1])
    (file, *_), *_ = record["read_prefixes"][-1:]
    path = fast_path / f"in/{file:02}.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("some", "sane"), encoding="utf-8")
    with pytest.raises(DataError, match=rf"{file:02}\.txt: its first \d+ bytes are not those"):
        prepare([fast_path / "in"], out=out, **settings)
