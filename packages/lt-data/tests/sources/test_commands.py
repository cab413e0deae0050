"""The options of the commands that say what is read, and that a store holds exactly what the sources hold."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lt_data import Tokenizer, TokenStore
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


def ids_of(store: Path) -> list[int]:
    opened = TokenStore(store)
    return np.concatenate([opened[i] for i in range(opened.n_documents)]).tolist()


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    around = [[tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(texts) if ids.size]
    return [id_ for document in around for id_ in document]


def test_bad_input_stops_or_is_left_out_and_told(
    tmp_path: Path, run: Run, tokenizer: Tokenizer, texts: list[str]
) -> None:
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"body": text}) for text in texts]
    (tmp_path / "in/a.jsonl").write_text("\n".join([*lines[:9], "{", *lines[9:], '{"body": "\\ud800"}']))
    arguments = ("prepare", tmp_path / "in", "--tokenizer", tmp_path / "tok", "--text-field", "body")
    code, _, err = run(*arguments, "--out", tmp_path / "store")
    assert code == 64
    assert f"{tmp_path}/in/a.jsonl:10: not a JSON value" in err
    code, out, _ = run(*arguments, "--out", tmp_path / "store2", "--on-bad", "skip")
    assert code == 0
    assert ids_of(tmp_path / "store2") == expected(tokenizer, texts)
    manifest = TokenStore(tmp_path / "store2").manifest
    assert manifest.skipped == {"broken JSON line": 1, "half of a surrogate pair": 1}
    assert "broken JSON line" in out
    train = ("train-tokenizer", tmp_path / "in", "--vocab-size", 300, "--text-field", "body")
    code, _, err = run(*train, "--out", tmp_path / "new")
    assert code == 64
    assert "a.jsonl:10: not a JSON value" in err
    code, out, _ = run(*train, "--out", tmp_path / "new", "--on-bad", "skip")
    assert code == 0
    assert "1 skipped: broken JSON line\n" in out
    assert Tokenizer.load(tmp_path / "new").encode_batch(texts)[3].tolist() == tokenizer.encode_batch(texts)[3].tolist()


def test_ids_of_a_split_of_a_saved_dataset(tmp_path: Path, run: Run, tokenizer: Tokenizer) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    tokenizer.save(tmp_path / "tok")
    ids = [[5, 6, 7], [8], [], [9, 10]]
    for split, rows in (("train", ids), ("test", [[11, 12]])):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        out = io.BytesIO()
        table = pa.table({"input_ids": rows})
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        (folder / "data-00000-of-00001.arrow").write_bytes(out.getvalue())
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    arguments = ("prepare", tmp_path / "saved", "--tokenizer", tmp_path / "tok", "--tokens-field", "input_ids")
    code, _, err = run(*arguments, "--out", tmp_path / "store", "--no-bos", "--no-eos")
    assert (code, "choose one with split (--split)" in err) == (64, True)
    code, _, err = run(*arguments, "--out", tmp_path / "store", "--no-bos", "--no-eos", "--split", "train")
    assert code == 0, err
    assert ids_of(tmp_path / "store") == [5, 6, 7, 8, 9, 10]
    assert TokenStore(tmp_path / "store").n_documents == 3
    code, _, err = run(*arguments, "--out", tmp_path / "again", "--split", "test")
    assert ids_of(tmp_path / "again") == [tokenizer.bos_id, 11, 12, tokenizer.eos_id]
    train = ("train-tokenizer", tmp_path / "saved", "--split", "train", "--vocab-size", 300, "--out", tmp_path / "new")
    code, _, err = run(*train)
    assert (code, "for the ids in 'input_ids' give" in err) == (64, True)
