"""The commands, run through the same `main` as the installed program."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lt_data.cli.prepare
from lt_data import SourceOptions, TokenStore, open_pack


@pytest.fixture
def corpus(tmp_path, texts, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "corpus" / f"{i:02d}.txt").write_bytes(text.encode())
    return tmp_path


def test_the_whole_road(corpus, run, texts):
    code, out, err = run("train-tokenizer", "corpus", "--vocab-size", 300, "--out", "tok")
    assert (code, out) == (0, "tokenizer of 300 ids in tok\n")
    assert "read: " in err
    code, out, _ = run("train-tokenizer", "corpus", "--vocab-size", 9999, "--out", "all")
    assert re.fullmatch(r"tokenizer of \d{3,4} ids in all \(9999 requested; the text has no more merges\)\n", out)
    code, out, err = run("prepare", "corpus", "--tokenizer", "tok", "--out", "store", "--no-bos", "--shard-tokens", 999)
    store = TokenStore("store")
    assert out.startswith(f"59 documents, {store.n_tokens} tokens of {store.manifest.text_bytes} bytes in store\n")
    assert "1 documents left out: empty" in out
    assert re.fullmatch(r"tokenizer tok: transformers .*--split-rule qwen2\)\nprepare: .* s\n", err, re.DOTALL)
    assert (code, store.manifest.bos, store.manifest.eos) == (0, False, True)
    assert run("pack", "store", "--seq-len", 128)[0] == 0
    code, out, _ = run("pack", "store", "--seq-len", 128, "--mode", "concat")
    rows = open_pack(store, seq_len=128, mode="concat").n_rows
    assert (code, out.split(",")[0]) == (0, f"{rows} rows of 128 tokens (concat)")
    code, out, _ = run("stats", "store")
    assert (code, "bytes per token" in out, "bfd-128" in out) == (0, True, True)
    code, out, _ = run("stats", "store", "--json")
    assert json.loads(out)["documents"] == 59 == len(texts) - 1
    assert run("verify", "store")[:2] == (0, f"store: 59 documents, {store.n_tokens} tokens, 2 packs: verified\n")


def test_user_errors_exit_with_64_and_one_line(corpus, run):
    for arguments in (
        ("stats", "nowhere"),
        ("train-tokenizer", "corpus", "--vocab-size", 3, "--out", "tok"),
        ("train-tokenizer", "corpus", "--vocab-size", 300, "--out", "corpus"),
        ("prepare", "nowhere", "--tokenizer", "corpus", "--out", "store"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (64, "")
        assert re.fullmatch(r"error: [^\n]*\n", err)


@pytest.mark.parametrize("arguments", [("pack",), ("nonsense",), ("pack", "store", "--seq-len", "many")])
def test_bad_usage_exits_with_64(run, arguments):
    code, _, err = run(*arguments)
    assert (code, "Usage" in err) == (64, True)


def test_our_errors_exit_with_70_and_a_traceback(run, monkeypatch):
    def broken(*_: object, **options: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(TokenStore, "__init__", broken)
    code, _, err = run("stats", "store")
    assert (code, "Traceback" in err, "a defect" in err) == (70, True, True)

    def plain_value_error(*_: object, **options: object) -> None:
        raise ValueError("not meant for users")

    monkeypatch.setattr(TokenStore, "__init__", plain_value_error)
    assert run("stats", "store")[0] == 70


def test_as_a_module_with_workers(corpus, run):
    """Spawned workers import the main module again; that must not run the command again."""
    run("train-tokenizer", "corpus", "--vocab-size", 300, "--out", "tok")
    command = [sys.executable, "-W", "error", "-m", "lt_data", "prepare", "corpus", "--tokenizer", "tok"]
    done = subprocess.run(
        [*command, "--out", "store", "--workers", "2"], capture_output=True, encoding="utf-8", check=False, cwd=corpus
    )
    assert done.returncode == 0, done.stderr
    assert run("prepare", "corpus", "--tokenizer", "tok", "--out", "other")[0] == 0
    assert TokenStore("store").manifest == TokenStore("other").manifest


@pytest.mark.parametrize("name", ["prepare", "append"])
def test_the_defaults_of_a_command_are_those_of_the_library(name: str):
    functions = (getattr(lt_data.cli.prepare, name), getattr(lt_data, name), SourceOptions)
    command, function, options = (inspect.signature(one).parameters for one in functions)
    library = {name: given.default or None for name, given in {**function, **options}.items()}
    shared = {name: given.default or None for name, given in command.items() if name in library}
    assert {"workers", "unit_bytes", "max_document_bytes", "on_bad", "text_field", "engine"} <= set(shared)
    assert shared == {name: library[name] for name in shared}
