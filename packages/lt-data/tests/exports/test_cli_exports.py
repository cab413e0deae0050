"""`lt data export` and `lt data import`, run as the installed program."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lt_data import TokenStore
from lt_data.__main__ import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-data", *map(str, arguments)])
        code = main()
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return call


def test_there_and_back(store: TokenStore, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    code, text, err = run("export", store.path, "--to", "litespark", "--seq-len", 128, "--out", out, "--pad-id", 5)
    rows, padding = -(-store.n_tokens // 129), -store.n_tokens % 129
    size = sum(path.stat().st_size for path in out.rglob("*.*"))
    expected = f"{rows} rows of 129 tokens, {store.n_tokens} tokens, {padding} of padding in {out} ({size} bytes)\n"
    assert (code, text) == (0, expected)
    assert err.startswith("export: ")
    back = tmp_path / "back"
    tokenizer = store.path / "tokenizer"
    code, text, err = run(
        "import", out, "--from", "litespark", "--boundaries", "bos", "--tokenizer", tokenizer, "--out", back
    )
    assert code == 0
    assert text == (
        f"{store.n_documents} documents, {store.n_tokens} tokens in {back}\n{padding} padding positions left out\n"
    )
    assert err.startswith("import: ")
    found = TokenStore(back)
    np.testing.assert_array_equal(found.lengths, store.lengths)
    np.testing.assert_array_equal(found.tokens(0, found.n_tokens), store.tokens(0, store.n_tokens))


def test_rows_say_what_is_lost(store: TokenStore, tmp_path: Path, run: Run) -> None:
    rows, rest = divmod(store.n_tokens, 50)
    code, text, _ = run(
        *("export", store.path, "--to", "hf", "--seq-len", 50, "--last-row", "drop", "--labels", "copy"),
        *("--split", "test", "--out", tmp_path / "out"),
    )
    assert code == 0
    assert f"{rest} tokens dropped with the last row\n" in text
    assert f"{rows} labels dropped: readers of hf shift the labels within a row\n" in text
    assert '"_split": "test"' in (tmp_path / "out" / "state.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "{store}", "--to", "csv", "--out", "{new}"), "to = 'csv': one of hf, megatron"),
        (("export", "{new}", "--to", "hf", "--out", "{new}"), "cannot read the token store's"),
        (("export", "{store}", "--to", "hf", "--out", "{store}"), "exists and is not an empty folder"),
        (("import", "{new}", "--from", "csv", "--tokenizer", "{tok}", "--out", "{new}"), "format = 'csv': one of"),
        (
            ("import", "{new}", "--from", "megatron", "--tokenizer", "{tok}", "--out", "{new}"),
            "one .idx file",
        ),
        (("import", "{new}", "--from", "megatron", "--tokenizer", "{new}", "--out", "{new}"), "no tokenizer at"),
    ],
)
def test_wrong_input(store: TokenStore, tmp_path: Path, run: Run, arguments: tuple[str, ...], message: str) -> None:
    places = {"store": store.path, "new": tmp_path / "new", "tok": store.path / "tokenizer"}
    code, out, err = run(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (64, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()
