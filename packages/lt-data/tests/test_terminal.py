"""Nothing that others wrote changes a terminal: file names, special tokens, sources and documents are escaped."""

import json
import sys
from pathlib import Path

import pytest

from lt_data import TokenStore, pack
from lt_data.__main__ import main
from lt_data.display.terminal import escape_controls

EVIL = "\x1b]0;title\x07\x1b[31mred\x1b[8m\r\x9b2J\u202egnp"
SAFE = r"\x1b]0;title\x07\x1b[31mred\x1b[8m\r\x9b2J\u202egnp"


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["lt-data", *arguments])
    return main()


def test_escapes():
    assert escape_controls(EVIL) == SAFE
    assert escape_controls("a\n\tb\\n東京 é\xa0\udcff\x7f") == "a\n\tb\\n東京 é\\xa0\\udcff\\x7f"
    assert escape_controls("a\n\tb", keep="") == r"a\n\tb"


@pytest.fixture
def evil_tokenizer(tokenizer, tmp_path) -> Path:
    """A tokenizer with a special token that is an escape sequence."""
    model = json.loads(tokenizer.files["tokenizer.json"])
    template = model["added_tokens"][0]
    model["added_tokens"].append({**template, "id": tokenizer.vocab_size, "content": "<\x1b[31m\n>"})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    return path


@pytest.fixture
def evil_store(evil_tokenizer, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / EVIL
    folder.mkdir()
    (folder / f"{EVIL}.txt").write_text(f"a document {EVIL} with <\x1b[31m\n>", encoding="utf-8")
    (folder / "bad.txt").write_bytes(b"\xff")
    out = tmp_path / f"store {EVIL}"
    command = ["prepare", str(folder), "--tokenizer", str(evil_tokenizer), "--out", str(out), "--engine", "hf"]
    assert run(*command, "--on-bad", "skip", "--no-bos", "--no-eos", monkeypatch=monkeypatch) == 0
    pack(TokenStore(out), seq_len=64)
    return out


def test_no_command_writes_an_escape(evil_store, monkeypatch, capsys, tmp_path):
    capsys.readouterr()
    for command in (
        ["stats", str(evil_store), "--global-batch-size", "1"],
        ["inspect", str(evil_store)],
        ["inspect", str(evil_store), "--full-text"],
        ["verify", str(evil_store)],
        ["report", str(evil_store), "--out", str(tmp_path / f"{EVIL}.html")],
        ["export", str(evil_store), "--to", "smp", "--out", str(tmp_path / f"export {EVIL}")],
        ["stats", str(tmp_path / f"none {EVIL}")],
    ):
        run(*command, monkeypatch=monkeypatch)
        written = capsys.readouterr()
        shown = written.out + written.err
        assert shown
        assert "Traceback" not in shown, command
        assert [line for line in shown.replace("\t", "").splitlines() if not line.isprintable()] == [], command
        assert r"\x1b" in shown, command
