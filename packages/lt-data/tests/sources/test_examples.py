"""Every file of examples/data, run as a program on a small stand-in of what its recipe prepares."""

import gzip
import io
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import TokenStore

EXAMPLES = Path(__file__).parents[4] / "examples/data"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/data is not part of a package alone")


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Run:
    """Runs a file as a program, in this process, since importing what it needs takes longer than what it does."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture
def saved_tokenizer(tmp_path, tokenizer) -> Path:
    tokenizer.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def text_parquet(texts) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts}), out)
    return out.getvalue()


def arrow_rows(folder: Path) -> list[dict[str, Any]]:
    """What `load_from_disk` reads, in its order."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    return [row for name in names for row in pa.ipc.open_stream((folder / name).read_bytes()).read_all().to_pylist()]


def in_store(path: Path) -> list[int]:
    """All ids of a store, in order."""
    dtype = TokenStore(path).manifest.dtype
    return np.concatenate([np.fromfile(shard, dtype) for shard in sorted((path / "shards").glob("*.bin"))]).tolist()


def test_litespark(tmp_path, run, s3, saved_tokenizer, text_parquet, tokenizer, texts):
    (tmp_path / "part-0.parquet").write_bytes(text_parquet)
    s3.mkdir("litespark")
    arguments = ("--source", "part-0.parquet", "--tokenizer", saved_tokenizer, "--seq-len", 64, "--workers", 1)
    out = run("litespark.py", *arguments, "--upload", "s3://litespark/train")
    assert "rows of 65 tokens" in out
    assert "files sent to s3://litespark/train, 0 were there" in out
    (rows,) = (tmp_path / "data/litespark").rglob("*.ds")
    ids = np.fromfile(rows, "<u2")
    expected = in_store(tmp_path / "data/store")
    assert ids.size % 65 == 0
    assert ids[: len(expected)].tolist() == expected
    document = [tokenizer.bos_id, *tokenizer.encode_batch([texts[0]])[0].tolist(), tokenizer.eos_id]
    assert expected[: len(document)] == document
    key = f"litespark/train/{rows.relative_to(tmp_path / 'data/litespark').as_posix()}"
    assert s3.cat_file(key) == rows.read_bytes()
    again = run("litespark.py", *arguments, "--upload", "s3://litespark/train")
    assert "0 files sent" in again


def test_papers(tmp_path, run, saved_tokenizer, make_pdf, tokenizer):
    pytest.importorskip("pypdf", reason="pypdf is not installed")
    (tmp_path / "papers").mkdir()
    for i in range(12):
        pages = [f"Paper {i} page {page} " + "the quick brown fox " * (i % 4) for page in range(3)]
        (tmp_path / f"papers/{i:02}.pdf").write_bytes(make_pdf(pages))
    (tmp_path / "papers/broken.pdf").write_bytes(b"%PDF-1.4 and nothing else")
    words = f"papers --tokenizer {saved_tokenizer} --seq-len 256 --global-batch-size 4 --workers 1"
    out = run("papers.py", *words.split())
    assert out.startswith("12 papers, ")
    assert "not readable: {'damaged PDF': 1}" in out
    rows = arrow_rows(tmp_path / "data/hf")
    assert f"{len(rows)} rows: {len(rows) // 4} steps an epoch, {len(rows) % 4} rows left over" in out
    assert all(len(row["input_ids"]) == len(row["labels"]) == 256 for row in rows)
    kept = [id_ for row in rows for id_, bit in zip(row["input_ids"], row["attention_mask"], strict=True) if bit]
    assert sorted(kept) == sorted(in_store(tmp_path / "data/store"))
    decoded = "".join(tokenizer.decode(np.array(row["input_ids"]), skip_special_tokens=True) for row in rows)
    for i in range(12):
        assert f"Paper {i} page 0" in decoded


def test_wikicorpus(tmp_path, run, saved_tokenizer, text_parquet):
    (tmp_path / "wiki/train").mkdir(parents=True)
    for i in range(2):
        (tmp_path / f"wiki/train/{i:04}.parquet").write_bytes(text_parquet)
    arguments = ("--source", "wiki/train", "--tokenizer", saved_tokenizer, "--seq-len", 512, "--workers", 1)
    out = run("wikicorpus.py", *arguments, "--store", "store", "--out", "rows")
    expected = in_store(tmp_path / "store")
    rows = arrow_rows(tmp_path / "rows")
    assert [id_ for row in rows for id_ in row["input_ids"]] == expected[: 512 * len(rows)]
    assert all(row["labels"] == row["input_ids"] and set(row["attention_mask"]) == {1} for row in rows)
    assert out.startswith(f"{len(rows)} rows of 512 tokens in rows; {len(expected) % 512} tokens left over")
    assert len(rows) == len(expected) // 512 > 1


def test_slimpajama(tmp_path, run, hub, saved_tokenizer, texts, monkeypatch):
    lines = "".join(json.dumps({"text": text, "meta": {"set": "x"}}) + "\n" for text in texts).encode()
    hub({"org/slim/train/chunk1/a.jsonl": lines})
    arguments = ("--dataset", "org/slim", "--tokenizer", saved_tokenizer, "--seq-len", 64, "--workers", 1)
    out = run("slimpajama.py", *arguments)
    store = TokenStore(tmp_path / "data/store")
    n_bytes = sum(len(text.encode()) for text in texts[:6])
    assert out.startswith(f"6 documents, {store.n_tokens} tokens of {n_bytes} bytes")
    assert "rows of 64 tokens" in out
    before = in_store(tmp_path / "data/store")
    shutil.rmtree(tmp_path / "data/store")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run("slimpajama.py", *arguments) == out  # what was saved is read again, without `datasets`
    assert in_store(tmp_path / "data/store") == before


def test_smp(tmp_path, run, saved_tokenizer, texts):
    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts[:10]):
        (tmp_path / f"text/{i}.txt").write_bytes(text.encode())
    arguments = ("--tokenizer", saved_tokenizer, "--seq-len", 100, "--workers", 1)
    out = run("smp.py", "text", *arguments)
    assert out.startswith("10 documents, ")
    files = sorted((tmp_path / "data/smp").rglob("*.json.gz"))
    rows = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert all(len(row["input_ids"]) == len(row["attention_mask"]) == 100 for row in rows)
    padding = sum(row["attention_mask"].count(0) for row in rows)
    assert f"{len(rows)} rows in" in out
    again = run("smp.py", "data/smp", *arguments, "--out", "again", "--tokens")
    left = f"{{'ids that the attention mask hides': {padding}}}" if padding else "nothing"
    expected = in_store(tmp_path / "data/store")
    assert again == f"{len(rows)} documents, {len(expected)} tokens, left out: {left}\n"
    assert in_store(tmp_path / "again/store") == expected
