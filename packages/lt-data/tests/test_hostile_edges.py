"""What a stranger put in the place of a file: every command refuses it at once, in a line that changes no terminal.

Each command that takes a path is given each thing of `lt_test_helpers.hostile` there.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lt_data import prepare
from lt_data.__main__ import main
from lt_test_helpers.hostile import ANSI, FEW, PLACES, assert_harmless, assert_refused, run_command

COMMANDS: dict[str, list[str]] = {
    "prepare": ["prepare", "{bad}", "--tokenizer", "{tokenizer}", "--out", "{out}"],
    "prepare tokenizer": ["prepare", "{text}", "--tokenizer", "{bad}", "--out", "{out}"],
    "prepare out": ["prepare", "{text}", "--tokenizer", "{tokenizer}", "--out", "{bad}"],
    "train-tokenizer": ["train-tokenizer", "{bad}", "--vocab-size", "300", "--out", "{out}"],
    "train-tokenizer out": ["train-tokenizer", "{text}", "--vocab-size", "300", "--out", "{bad}"],
    "append": ["append", "{store}", "{bad}"],
    "append store": ["append", "{bad}", "{text}"],
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
    "import": ["import", "{bad}", "--from", "megatron", "--tokenizer", "{tokenizer}", "--out", "{out}"],
}
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "prepare out": ("directory",),
    "train-tokenizer out": ("directory",),
    "pack packs": ("directory",),
    "stats packs": ("directory",),
}
"""What is no mistake there: an empty folder, or one that is not there yet."""


@pytest.fixture
def places(tmp_path, tokenizer) -> dict[str, Path]:
    """A text, a tokenizer and a store with a pack, and where output goes."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    tokenizer.save(tmp_path / "tokenizer")
    prepare([text], tokenizer=tokenizer, out=tmp_path / "store")
    return {"text": text, "tokenizer": tmp_path / "tokenizer", "store": tmp_path / "store", "out": tmp_path / "out"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(command, places, tmp_path):
    before = {path: path.read_bytes() for path in places["store"].rglob("*") if path.is_file()}
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
