"""What a stranger put in the place of a file: every command refuses it at once, in a line that changes no terminal.

Each command that takes a path is given each thing of `lt_test_helpers.hostile` there, and in each file of a store, a
tokenizer and of other programs' folders. The slow test changes values of their JSON at random: LT_FUZZ chooses how many
times, LT_SEED which.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lt_data import Tokenizer, TokenStore, pack, prepare
from lt_data.__main__ import main
from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    FEW,
    PLACES,
    assert_harmless,
    assert_refused,
    make_fifo,
    mutate,
    replace,
    run_command,
    unusable_paths,
)

MANY = int(os.environ.get("LT_FUZZ", "2000"))
SEED = int(os.environ.get("LT_SEED", "0"))

COMMANDS: dict[str, list[str]] = {
    "prepare": ["prepare", "{bad}", "--tokenizer", "{tokenizer}", "--out", "{out}"],
    "prepare tokenizer": ["prepare", "{text}", "--tokenizer", "{bad}", "--out", "{out}"],
    "prepare out": ["prepare", "{text}", "--tokenizer", "{tokenizer}", "--out", "{bad}"],
    "train-tokenizer": ["train-tokenizer", "{bad}", "--vocab-size", "300", "--out", "{out}"],
    "train-tokenizer out": ["train-tokenizer", "{text}", "--vocab-size", "300", "--out", "{bad}"],
    "append": ["append", "{store}", "{bad}"],
    "append store": ["append", "{bad}", "{text}"],
    "merge": ["merge", "{out}", "--units", "{bad}"],
    "join": ["join", "{out}", "{bad}", "{store}"],
    "split": ["split", "{bad}", "--holdout", "10%", "--train", "{out}", "--validation", "{out}2"],
    "pack": ["pack", "{bad}", "--seq-len", "16"],
    "pack packs": ["pack", "{store}", "--seq-len", "16", "--packs", "{bad}"],
    "stats": ["stats", "{bad}"],
    "stats packs": ["stats", "{store}", "--packs", "{bad}"],
    "verify": ["verify", "{bad}"],
    "inspect": ["inspect", "{bad}"],
    "report": ["report", "{bad}", "--out", "{out}"],
    "export": ["export", "{bad}", "--to", "megatron", "--out", "{out}"],
    "upload": ["upload", "{bad}", "s3://bucket/prefix"],
    **{
        f"import {name}": ["import", "{bad}", "--from", name, "--tokenizer", "{tokenizer}", "--out", "{out}", *more]
        for name, more in {
            "megatron": (),
            "litespark": ("--boundaries", "bos", "--token-bytes", "4", "--pad-id", "0"),
        }.items()
    },
}
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "prepare out": ("directory",),
    "train-tokenizer out": ("directory",),
    "pack packs": ("directory",),
    "stats packs": ("directory",),
}
"""What is no mistake there: an empty folder, or one that is not there yet."""


@pytest.fixture
def places(tmp_path: Path, tokenizer: Tokenizer) -> dict[str, Path]:
    """A text, a tokenizer and a store with a pack, and where output goes."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    tokenizer.save(tmp_path / "tokenizer")
    prepare([text], tokenizer=tokenizer, out=tmp_path / "store")
    return {
        "text": text,
        "tokenizer": tmp_path / "tokenizer",
        "store": tmp_path / "store",
        "out": tmp_path / "out",
    }


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(command: str, places: dict[str, Path], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in files_of(places["store"])}
    kinds = {"fifo": PLACES["fifo"]} if command == "upload" else FEW  # it looks for S3 first, for seconds
    for number, (kind, make) in enumerate(kinds.items()):
        folder = tmp_path / f"{number} {ANSI.replace('/', '')}"
        folder.mkdir()
        bad = folder / "bad.jsonl"
        make(bad)
        outcome = run_command(main, *(word.format(bad=bad, **places) for word in COMMANDS[command]))
        if kind in HARMLESS.get(command, ()):
            assert_harmless(outcome)
            continue
        try:
            assert_refused(outcome)
        except AssertionError as exc:
            raise AssertionError(f"{command} with {kind}") from exc
        assert not places["out"].exists()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "upload"])
def test_a_path_that_may_not_be_looked_at(command: str, places: dict[str, Path], tmp_path: Path) -> None:
    with unusable_paths(tmp_path) as paths:
        for bad in paths.values():
            assert_refused(run_command(main, *(word.format(bad=bad, **places) for word in COMMANDS[command])))


def test_a_store_whose_name_is_no_text(places: dict[str, Path], tmp_path: Path) -> None:
    store = tmp_path / "\udcff"
    places["store"].rename(store)
    for words in (["stats", store], ["verify", store], ["report", store, "--out", tmp_path / "page.html"]):
        outcome = run_command(main, *words)
        assert_harmless(outcome)
        assert outcome.code == 0, outcome
    assert "<h1>\\udcff: token store</h1>" in (tmp_path / "page.html").read_text()


def test_a_pipe_at_a_file_address(places: dict[str, Path], tmp_path: Path) -> None:
    """fsspec's local files are checked like those of a path; links to files are read as there."""
    (tmp_path / "folder").mkdir()
    pipe, link = tmp_path / "folder" / "pipe.txt", tmp_path / "folder" / "link.txt"
    make_fifo(pipe)
    words = ["--tokenizer", places["tokenizer"], "--out", places["out"]]
    assert_refused(run_command(main, "prepare", f"file://{pipe}", *words))
    assert_refused(run_command(main, "prepare", f"file://{pipe.parent}", *words))
    pipe.unlink()
    link.symlink_to("/etc/passwd")
    shutil.copy(places["text"], link.parent)
    outcome = run_command(main, "prepare", f"file://{link.parent}", *words)
    assert (outcome.code, "2 documents" in outcome.out) == (0, True), outcome


SOURCES = {
    ".txt": PLACES,
    ".jsonl": PLACES | CONTENTS,
    ".jsonl.gz": {"binary": CONTENTS["binary"]},
    ".jsonl.zst": {"binary": CONTENTS["binary"]},
    ".parquet": {"binary": CONTENTS["binary"]},
}


@pytest.mark.parametrize("suffix", SOURCES)
def test_a_source_below_a_folder(suffix: str, places: dict[str, Path], tmp_path: Path) -> None:
    """A folder of a stranger, with something else in it, whose name is made of escapes."""
    for kind, make in SOURCES[suffix].items():
        folder = tmp_path / f"{ANSI.replace('/', '')} {kind}"
        folder.mkdir()
        shutil.copy(places["text"], folder)
        make(folder / f"{ANSI.replace('/', '')}{suffix}")
        outcome = run_command(
            main, "prepare", folder, "--tokenizer", places["tokenizer"], "--out", places["out"], "--engine", "hf"
        )
        assert_harmless(outcome)
        assert outcome.code in (0, 64), (kind, outcome)
        if kind in ("fifo", "socket"):
            assert outcome.code == 64, (kind, outcome)
        shutil.rmtree(places["out"], ignore_errors=True)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer/tokenizer.json", "packs/bfd-16/pack.json", "shards"])
def test_a_file_of_a_store_of_another_kind(name: str, places: dict[str, Path], tmp_path: Path) -> None:
    pack(TokenStore(places["store"]), seq_len=16)
    for kind, make in (PLACES | CONTENTS if name == "manifest.json" else FEW).items():
        store = tmp_path / "copy"
        shutil.copytree(places["store"], store)
        if name == "shards":
            for path in (store / "shards").glob("*"):
                replace(path, make)
        else:
            assert (store / name).is_file()
            replace(store / name, make)
        for words in (["verify", store], ["inspect", store]):
            outcome = run_command(main, *words)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (kind, words, outcome)
        shutil.rmtree(store)


@pytest.mark.parametrize("form", ["megatron", "litespark"])
def test_a_file_of_another_programs_folder(form: str, places: dict[str, Path], tmp_path: Path) -> None:
    words = [] if form == "megatron" else ["--pad-id", "0", "--seq-len", "16"]
    assert run_command(main, "export", places["store"], "--to", form, "--out", tmp_path / "made", *words).code == 0
    names = [path.relative_to(tmp_path / "made") for path in files_of(tmp_path / "made")]
    more = ["--boundaries", "rows", "--pad-id", "0"] if form == "litespark" else []
    for name in names:
        for kind, make in {kind: FEW[kind] for kind in ("fifo", "link to a device", "binary", "nested lists")}.items():
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "made", copy)
            replace(copy / name, make)
            words = ["import", copy, "--from", form, "--tokenizer", places["tokenizer"], "--out", places["out"]]
            outcome = run_command(main, *words, *more)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (kind, name, outcome)
            shutil.rmtree(places["out"], ignore_errors=True)
            shutil.rmtree(copy)


def test_a_pipe_below_a_folder_to_upload(places: dict[str, Path]) -> None:
    make_fifo(places["store"] / "more")
    outcome = run_command(main, "upload", places["store"], "s3://bucket/x")
    assert_refused(outcome)


@pytest.mark.slow
def test_values_of_json_changed_at_random(places: dict[str, Path], tmp_path: Path) -> None:
    pack(TokenStore(places["store"]), seq_len=16)
    rng = random.Random(SEED)
    store = places["store"]
    names = ["manifest.json", "tokenizer/tokenizer.json", "packs/bfd-16/pack.json"]
    whole = {name: (store / name).read_text() for name in names}
    for number in range(MANY):
        name = rng.choice(names)
        value = json.loads(whole[name])
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate(rng, value)
        try:
            (store / name).write_text(json.dumps(value))
        except (TypeError, ValueError):
            continue
        for words in (["stats", store], ["verify", store], ["inspect", store]):
            outcome = run_command(main, *words)
            assert_harmless(outcome)
            assert outcome.code in (0, 64), (number, name, words, outcome)
        (store / name).write_text(whole[name])
