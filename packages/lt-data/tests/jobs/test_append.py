"""Generations of a store: documents are appended, and what was there stays."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lt_data
from lt_data import DataError, RowReader, Stream, TokenStore
from lt_data.cli import app
from lt_data.store.generations import generation_file, locate_generation
from lt_data.store.manifest import Selection, StoreManifest

SEED = int(os.environ.get("LT_SEED", "0"))


def write(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


@pytest.fixture
def base(fast_path, texts, tokenizer) -> Path:
    """A store of the first texts, with a limit of their length."""
    source, out = write(fast_path, "first", texts[:20]), fast_path / "store"
    selection = Selection(max_tokens=2000)
    lt_data.prepare([source], tokenizer=tokenizer, out=out, shard_tokens=4000, selection=selection, engine="hf")
    return out


def append(store: Path, source: Path, **options: Any) -> StoreManifest:
    return lt_data.append(store, [source], engine="hf", **options)


def test_generations(base, fast_path, texts, tokenizer, contents):
    first = TokenStore(base)
    lt_data.pack(first, seq_len=64)
    before, manifests = contents(base), [first.manifest]
    for number, part in enumerate((texts[22:40], texts[40:]), start=1):
        manifests.append(append(base, write(fast_path, f"more{number}", part)))
        store = TokenStore(base)
        assert store.manifest == manifests[-1]
        lt_data.pack(store, seq_len=64)
        assert lt_data.verify(store) == []
    kept = {name: content for name, content in before.items() if name != "manifest.json"}
    assert {name: content for name, content in contents(base).items() if name in kept} == kept
    assert generation_file(base, 0).read_bytes() == before["manifest.json"]
    for number, manifest in enumerate(manifests):
        generation = TokenStore(generation_file(base, number))
        assert generation.manifest == manifest
        assert locate_generation(base, manifest.fingerprint[:16]) == generation_file(base, number)
        assert lt_data.open_pack(generation, seq_len=64).store_fingerprint == manifest.fingerprint
        assert lt_data.verify(generation) == []
    assert locate_generation(base, "0" * 16) is None
    whole = [write(fast_path, "whole", texts[:20]), fast_path / "more1.jsonl", fast_path / "more2.jsonl"]
    lt_data.prepare(whole, tokenizer=tokenizer, out=fast_path / "flat", selection=manifests[0].selection, engine="hf")
    newest, expected = TokenStore(base), TokenStore(fast_path / "flat")
    assert newest.manifest.read == expected.manifest.read
    assert [ids.tolist() for ids in newest] == [ids.tolist() for ids in expected]
    assert newest.document_source(len(newest) - 1) == expected.document_source(len(expected) - 1)
    reader = RowReader(newest, lt_data.pack(newest, seq_len=64))
    Stream(reader, global_batch_size=8, dp_rank=0, dp_size=1, seed=1).next()


def test_the_same_sources_are_appended_once(base, fast_path, texts, contents):
    source = write(fast_path, "more", texts[30:])
    manifest = append(base, source)
    before, notices = contents(base), []
    assert append(base, source, notify=notices.append) == manifest
    assert (contents(base), notices) == (before, [f"{base} has these sources already"])
    with pytest.raises(DataError, match="a generation; append to the store"):
        append(generation_file(base, 1), source)
    with pytest.raises(DataError, match="no text"):
        append(base, write(fast_path, "empty", []))
    assert TokenStore(base).manifest == manifest


def without_leftovers(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if ".tmp-" not in name}


@pytest.mark.parametrize("kills", [12, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_append_is_finished_by_the_same_command(base, fast_path, texts, contents, killed_at, kills):
    """At calls that a seed chooses, or at every one."""
    source, kept = write(fast_path, "more", texts[22:]), fast_path / "kept"
    shutil.copytree(base, kept)
    expected = append(base, source)
    undisturbed, done = contents(base), 0
    calls = sorted(random.Random(SEED).sample(range(1, 50), kills)) if kills else range(1, 120)
    for call in calls:
        shutil.rmtree(base)
        shutil.copytree(kept, base)
        first = TokenStore(base).manifest
        killed = killed_at(call, lambda: append(base, source))
        done += killed
        found = TokenStore(base)
        assert found.manifest.fingerprint in (expected.fingerprint, first.fingerprint)
        found.verify()
        assert append(base, source) == expected
        assert without_leftovers(contents(base)) == undisturbed
        if not killed:
            break
    assert done > 5


def test_a_joined_store_can_be_appended_to(base, fast_path, texts):
    root = fast_path / "root"
    root.mkdir()
    base.rename(root / "a")
    lt_data.join(root, [root / "a"])
    source = write(fast_path, "more", texts[30:])
    result = CliRunner().invoke(app, ["append", str(root), str(source), "--engine", "hf"], catch_exceptions=False)
    moved = TokenStore(root.rename(fast_path / "moved"))
    assert result.exit_code == 0
    assert f"{len(moved)} documents, {moved.n_tokens} tokens" in result.output
    assert lt_data.verify(moved) == []
