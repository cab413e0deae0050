"""Generations of a store: documents are appended, and what was there stays."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lt_data
from lt_data import DataError, RowReader, Selection, Stream, Tokenizer, TokenStore
from lt_data.cli import app
from lt_data.store.joined import find_generation

Contents = Callable[[Path], dict[str, bytes]]
SEED = int(os.environ.get("LT_SEED", "0"))


def _write(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


@pytest.fixture
def base(fast_path: Path, texts: list[str], tokenizer: Tokenizer) -> Path:
    """A store of the first texts, with a limit of their length."""
    source = _write(fast_path, "first", texts[:20])
    selection = Selection(max_tokens=2000)
    out = fast_path / "store"
    lt_data.prepare([source], tokenizer=tokenizer, out=out, shard_tokens=4000, selection=selection, engine="hf")
    return out


def _append(store: Path, source: Path, **options: Any) -> lt_data.StoreManifest:
    return lt_data.append(store, [source], engine="hf", **options)


@pytest.fixture(params=["parsed", "indexed"])
def is_indexed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Generations with and without an index."""
    if request.param == "indexed":
        monkeypatch.setattr("lt_data.store.joined.MIN_INDEXED_SHARDS", 1)
    return request.param == "indexed"


@pytest.mark.usefixtures("is_indexed")
def test_generations(base: Path, fast_path: Path, texts: list[str], tokenizer: Tokenizer, contents: Contents) -> None:
    before, first = contents(base), TokenStore(base).manifest
    lt_data.pack(TokenStore(base), seq_len=64)
    manifests = [first]
    for number, part in enumerate((texts[22:40], texts[40:]), start=1):
        manifests.append(_append(base, _write(fast_path, f"more{number}", part)))
        store = TokenStore(base)
        assert store.manifest == manifests[-1]
        lt_data.pack(store, seq_len=64)
        assert lt_data.verify(store) == []
    assert {name: bytes_ for name, bytes_ in contents(base).items() if name in before} == before
    for number, manifest in enumerate(manifests):
        folder = base / f"generations/{number:05d}"
        generation = TokenStore(folder)
        assert generation.manifest.fingerprint == manifest.fingerprint
        assert find_generation(base, manifest.fingerprint[:16]) == folder
        assert lt_data.open_pack(generation, seq_len=64).store_fingerprint == manifest.fingerprint
        assert lt_data.verify(generation) == []
    assert find_generation(base, "0" * 16) is None
    newest = TokenStore(base)
    whole = [_write(fast_path, "whole", texts[:20]), fast_path / "more1.jsonl", fast_path / "more2.jsonl"]
    flat = fast_path / "flat"
    lt_data.prepare(whole, tokenizer=tokenizer, out=flat, selection=first.selection, engine="hf")
    expected = TokenStore(flat)
    assert newest.manifest.read == expected.manifest.read
    assert [newest[i].tolist() for i in range(newest.n_documents)] == [
        expected[i].tolist() for i in range(expected.n_documents)
    ]
    assert newest.document_source(newest.n_documents - 1) == expected.document_source(expected.n_documents - 1)
    reader = RowReader(newest, lt_data.pack(newest, seq_len=64))
    Stream(reader, global_batch_size=8, dp_rank=0, dp_size=1, seed=1).next()


def test_the_same_sources_are_appended_once(base: Path, fast_path: Path, texts: list[str], contents: Contents) -> None:
    source = _write(fast_path, "more", texts[30:])
    manifest = _append(base, source)
    before, notices = contents(base), []
    assert _append(base, source, notify=notices.append) == manifest
    assert (contents(base), len(notices)) == (before, 1)
    assert "has these sources already (generations/00001)" in notices[0]


def test_what_cannot_be_appended_to_is_refused(
    base: Path, fast_path: Path, texts: list[str], tokenizer: Tokenizer, contents: Contents
) -> None:
    source = _write(fast_path, "more", texts[30:])
    selection = Selection(drop_duplicates=True)
    lt_data.prepare([source], tokenizer=tokenizer, out=fast_path / "distinct", selection=selection, engine="hf")
    before = contents(fast_path)
    with pytest.raises(DataError, match=r"drop_duplicates, but it does not keep the hashes .*; prepare all sources"):
        _append(fast_path / "distinct", source)
    with pytest.raises(DataError, match="no text"):
        _append(base, _write(fast_path, "empty", []))
    (fast_path / "empty.jsonl").unlink()
    _append(base, source)
    with pytest.raises(DataError, match="a generation; append to the store"):
        _append(base / "generations/00001", source)
    with pytest.raises(DataError, match="of a job with other settings"):
        lt_data.prepare([source], tokenizer=tokenizer, out=base, engine="hf")
    assert {name: before[name] for name in before if name.startswith("distinct")} == {
        name: content for name, content in contents(fast_path).items() if name.startswith("distinct")
    }


def test_a_map_and_columns_go_on(fast_path: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    first, more = _write(fast_path, "first", texts[:9]), _write(fast_path, "more", texts[9:])
    out = fast_path / "store"
    lt_data.prepare([first], tokenizer=tokenizer, out=out, keep=["n:int"], engine="hf")
    _append(out, more)
    store = TokenStore(out)
    assert store.manifest.columns[0].name == "n"
    assert lt_data.verify(store) == []


def _killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run in a child that dies at a call that changes the disk; return True if it did."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    made = 0

    def follow(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            result = real(*args, **kwargs)
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return count

    try:
        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, follow(getattr(os, name)))
        work()
    finally:
        os._exit(0)


def _check_kills(base: Path, fast_path: Path, texts: list[str], contents: Contents, calls: list[int]) -> int:
    source = _write(fast_path, "more", texts[22:])
    kept = fast_path / "kept"
    shutil.copytree(base, kept)
    expected = _append(base, source)
    undisturbed = contents(base)
    kills = 0
    for call in calls:
        shutil.rmtree(base)
        shutil.copytree(kept, base)
        first = TokenStore(base).manifest
        kills += _killed_at(call, lambda: _append(base, source))
        found = TokenStore(base)
        assert found.manifest.fingerprint in (expected.fingerprint, first.fingerprint)
        found.verify()
        assert _append(base, source) == expected
        assert contents(base) == undisturbed
    return kills


@pytest.mark.usefixtures("is_indexed")
def test_a_killed_append_is_finished_by_the_same_command(
    base: Path, fast_path: Path, texts: list[str], contents: Contents
) -> None:
    rng = random.Random(SEED)
    assert _check_kills(base, fast_path, texts, contents, sorted(rng.sample(range(1, 70), 16))) > 8


@pytest.mark.slow
@pytest.mark.usefixtures("is_indexed")
def test_append_killed_at_every_call(base: Path, fast_path: Path, texts: list[str], contents: Contents) -> None:
    kills = _check_kills(base, fast_path, texts, contents, [*range(1, 120)])
    assert 40 < kills < 119  # the last calls were not reached


def test_the_command_appends(base: Path, fast_path: Path, texts: list[str]) -> None:
    source = _write(fast_path, "more", texts[22:])
    result = CliRunner().invoke(app, ["append", str(base), str(source), "--engine", "hf"], catch_exceptions=False)
    store = TokenStore(base)
    assert result.exit_code == 0
    assert f"{store.n_documents} documents, {store.n_tokens} tokens" in result.output


def test_a_joined_store_can_be_appended_to(base: Path, fast_path: Path, texts: list[str]) -> None:
    root = fast_path / "root"
    root.mkdir()
    base.rename(root / "a")
    lt_data.join(root, [root / "a"])
    manifest = _append(root, _write(fast_path, "more", texts[30:]))
    assert TokenStore(root).manifest == manifest
    assert lt_data.verify(TokenStore(root)) == []
    assert not (root / "a/generations").exists()
    moved = root.rename(fast_path / "moved")
    assert TokenStore(moved).manifest == manifest


def test_a_large_generation_is_read_by_its_index(
    base: Path, fast_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an index a generation has the content of one without, and no manifest of a part is parsed."""
    parsed = fast_path / "parsed"
    shutil.copytree(base, parsed)
    first, second = _write(fast_path, "more1", texts[22:40]), _write(fast_path, "more2", texts[40:])
    _append(parsed, first)
    _append(parsed, second)
    monkeypatch.setattr("lt_data.store.joined.MIN_INDEXED_SHARDS", len(TokenStore(base).manifest.shards) + 1)
    _append(base, first)
    _append(base, second)
    assert [path.parent.name for path in sorted(base.rglob("joined.index"))] == ["00001", "00002"]
    lt_data.join(fast_path / "joined", [base])
    assert (fast_path / "joined/joined.index").read_bytes() == (base / "generations/00002/joined.index").read_bytes()
    by_manifests = TokenStore(parsed)
    with monkeypatch.context() as patched:
        patched.setattr("lt_data.store.joined._load_part", None)  # parses a part's manifest
        by_index = TokenStore(base)
        older = TokenStore(base / "generations/00001")
        with pytest.raises(TypeError):
            TokenStore(parsed)
    assert older.manifest == TokenStore(parsed / "generations/00001").manifest
    assert by_index.manifest == by_manifests.manifest
    assert by_index.manifest.fingerprint == by_manifests.manifest.fingerprint
    assert by_index.lengths.tolist() == by_manifests.lengths.tolist()
    assert by_index.tokens(0, by_index.n_tokens).tolist() == by_manifests.tokens(0, by_manifests.n_tokens).tolist()
    n = by_index.n_documents
    assert [*map(by_index.document_source, range(n))] == [*map(by_manifests.document_source, range(n))]
    packs = [lt_data.pack(store, seq_len=64) for store in (by_index, by_manifests)]
    assert packs[0].fingerprint == packs[1].fingerprint
    assert lt_data.verify(by_index) == lt_data.verify(older) == []


def test_a_damaged_or_missing_index_of_a_generation_is_one_error(
    base: Path, fast_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_data.store.joined.MIN_INDEXED_SHARDS", 1)
    _append(base, _write(fast_path, "more", texts[22:]))
    path = base / "generations/00001/joined.index"
    content = path.read_bytes()
    path.write_bytes(content[:400] + b"?" + content[401:])
    with pytest.raises(DataError, match=r"00001/joined\.index: SHA-256 differs from generation\.json"):
        TokenStore(base)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read the index .*00001/joined\.index: No such file"):
        TokenStore(base)
    assert TokenStore(base / "generations/00000").n_documents
