"""Duplicates of other units: what is left is the store of one process, to readers, packs, exports and checks."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import (
    DataError,
    DocumentReader,
    ExportOptions,
    RowReader,
    SourceOptions,
    TokenStore,
    append,
    export,
    join,
    merge,
    pack,
    prepare,
    prepare_documents,
    split,
    stats,
    upload,
    verify,
)
from lt_data.analysis.inspection import inspect_document
from lt_data.preparation import duplicates
from lt_data.preparation.deduplication import HASH_DTYPE
from lt_data.preparation.store_writer import ENTRY_DTYPE
from lt_data.store import joined
from lt_data.store.extents import EXTENTS_FILE, Extents, extents_of_mask

Contents = Callable[[Path], dict[str, bytes]]

SEED = int(os.environ.get("LT_SEED", "24"))
KILLS = int(os.environ.get("LT_KILLS", "50"))
UNIT_BYTES = 700


@pytest.fixture(scope="module")
def options_(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "keep": ["lang"], "shard_tokens": 150}


@pytest.fixture(scope="module")
def sources(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus and, last, a file of which every document is in an earlier one."""
    folder = tmp_path_factory.mktemp("sources") / "in"
    shutil.copytree(corpus, folder)
    (folder / "9.jsonl").write_bytes((folder / "0.jsonl").read_bytes() + (folder / "4.jsonl").read_bytes())
    return folder


@pytest.fixture(scope="module")
def flat(sources: Path, options_: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The store of one process, of the same ranges of files."""
    out = tmp_path_factory.mktemp("flat") / "store"
    options = dict(options_)
    reader = DocumentReader(
        [sources], SourceOptions(on_bad=options.pop("options").on_bad, keep_fields=options["keep"])
    ).divided(UNIT_BYTES)
    prepare_documents(reader, out=out, **options)
    return TokenStore(out)


@pytest.fixture(scope="module")
def store(sources: Path, options_: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The same in units, some of which keep nothing."""
    out = tmp_path_factory.mktemp("units") / "store"
    prepare([sources], out=out, unit_bytes=UNIT_BYTES, **options_)
    store = TokenStore(out)
    dropped = store.manifest.dropped
    assert dropped is not None
    assert dropped.documents > 20
    kept = [mask.sum() for n in range(len(store.manifest.shards)) if (mask := store.kept_documents(n)) is not None]
    assert 0 in kept
    return store


def test_the_totals_are_those_of_one_process(store: TokenStore, flat: TokenStore) -> None:
    counts = ("text_bytes", "read", "left_out", "skipped", "special_strings")
    for name in ("documents", "tokens", *counts, "selection", "kept"):
        assert getattr(store.manifest, name) == getattr(flat.manifest, name), name
    assert (store.n_documents, store.n_tokens) == (flat.n_documents, flat.n_tokens)


def test_the_documents_are_those_of_one_process(store: TokenStore, flat: TokenStore) -> None:
    assert np.array_equal(store.lengths, flat.lengths)
    assert np.array_equal(store.offsets, flat.offsets)
    fresh = TokenStore(store.path)  # by the mapped index, without offsets
    for number in range(flat.n_documents):
        assert np.array_equal(store[number], flat[number])
        assert np.array_equal(fresh[number], flat[number])
        assert fresh.document_span(number) == flat.document_span(number)
        assert store.document_source(number) == flat.document_source(number)
        assert store.document_columns(number) == flat.document_columns(number)
    sources = [store.shard_sources(number) for number in range(len(store.manifest.shards))]
    assert sum(len(each) for each in sources if each is not None) == flat.n_documents
    columns = [store.shard_columns(number) for number in range(len(store.manifest.shards))]
    assert sum(batch.num_rows for batch in columns) == flat.n_documents
    with pytest.raises(IndexError):
        store[flat.n_documents]


@given(first=st.integers(0, 3000), length=st.integers(0, 3000))
def test_any_range_of_tokens_and_documents(store: TokenStore, flat: TokenStore, first: int, length: int) -> None:
    first, length = min(first, flat.n_tokens), min(length, max(0, flat.n_tokens - first))
    assert np.array_equal(store.tokens(first, length), flat.tokens(first, length))
    documents = sorted((first % (flat.n_documents + 1), length % (flat.n_documents + 1)))
    assert np.array_equal(store.read_lengths(*documents), flat.read_lengths(*documents))


@pytest.mark.parametrize("mode", ["bfd", "concat", "buckets"])
def test_packs_and_rows_are_those_of_one_process(store: TokenStore, flat: TokenStore, mode: Any) -> None:
    options = {"seq_len": 64, "mode": mode, **({"min_seq_len": 16} if mode == "buckets" else {})}
    packs = [pack(each, name=f"{mode}-test", **options) for each in (store, flat)]
    for name in ("row_offsets", "document", "start", "length", "labels", "valid"):
        assert np.array_equal(getattr(packs[0], name), getattr(packs[1], name)), name
    assert packs[0].fingerprint != packs[1].fingerprint
    lengths = [length for length, _ in packs[0].buckets] if packs[0].buckets else [64]
    rng = np.random.default_rng(0)
    for length in lengths:
        readers = [
            RowReader(each, index.bucket(length) if mode == "buckets" else index)
            for each, index in zip((store, flat), packs, strict=True)
        ]
        if not readers[0].n_rows:
            continue
        for rows in (np.arange(readers[0].n_rows), rng.integers(0, readers[0].n_rows, 9)):
            assert np.array_equal(*(reader.read_tokens(rows) for reader in readers))
            one, other = (reader.read_rows(rows) for reader in readers)
            for name in ("input_ids", "labels", "position_ids", "doc_ids"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert verify(store) == []


EXPORTS: list[dict[str, Any]] = [
    {"to": "megatron"},
    {"to": "hf", "seq_len": 32},
    {"to": "smp"},
    {"to": "litespark", "seq_len": 32},
]


@pytest.mark.parametrize("export_options", EXPORTS, ids=lambda each: "-".join(map(str, each.values())))
def test_exports_are_those_of_one_process(
    export_options: dict[str, Any], store: TokenStore, flat: TokenStore, tmp_path: Path, contents: Contents
) -> None:
    for folder, each in (("units", store), ("flat", flat)):
        export(each, out=tmp_path / folder, options=ExportOptions(**export_options))
    found, expected = contents(tmp_path / "units"), contents(tmp_path / "flat")
    for both, each in ((found, store), (expected, flat)):
        both.pop("lt-export.json", None)  # has the hashes of the others
        for name in both:  # litespark names the store in its own description
            both[name] = both[name].replace(each.manifest.fingerprint[:16].encode(), b"fingerprint")
    assert found == expected


def test_splits_statistics_and_inspection(store: TokenStore, flat: TokenStore, tmp_path: Path) -> None:
    sides = [
        split(each, holdout="30%", train=tmp_path / f"{n}t", validation=tmp_path / f"{n}v")
        for n, each in enumerate((store, flat))
    ]
    for one, other in zip(*sides, strict=True):
        assert [shard.sha256 for shard in one.shards] == [shard.sha256 for shard in other.shards]
        assert [shard.arrow_sha256 for shard in one.shards] == [shard.arrow_sha256 for shard in other.shards]
        assert (one.text_bytes, one.read, one.left_out) == (other.text_bytes, other.read, other.left_out)
    found, expected = (stats(each) for each in (store, flat))
    for name in ("documents", "tokens", "mean_length"):
        assert getattr(found, name) == getattr(expected, name)
    last = flat.n_documents - 1
    assert inspect_document(store, last).text == inspect_document(flat, last).text


def test_a_flat_store_of_the_units(store: TokenStore, flat: TokenStore, tmp_path: Path, contents: Contents) -> None:
    manifest = merge(tmp_path / "merged", units=store.path)
    assert replace(manifest, merged_from=1, engine={}) == replace(flat.manifest, engine={})
    found, expected = contents(tmp_path / "merged"), contents(flat.path)
    shards = {name for name in expected if name.startswith("shards/")}
    assert {name for name in found if name.startswith("shards/")} == shards
    assert all(found[name] == expected[name] for name in shards)
    with pytest.raises(DataError, match="not a store that was made in several units"):
        merge(tmp_path / "again", units=flat.path)


@pytest.mark.parametrize("documents", [1, 7])
def test_ranges_of_any_size_find_the_same(
    documents: int,
    store: TokenStore,
    sources: Path,
    options_: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: Contents,
) -> None:
    monkeypatch.setattr(duplicates, "RANGE_DOCUMENTS", documents)
    seen: list[str] = []
    run = {"unit_bytes": UNIT_BYTES, "progress": lambda *at: seen.append(at[2]), **options_}
    prepare([sources], out=tmp_path / "store", **run)
    assert "ranges of hashes" in seen
    assert {n: c for n, c in contents(tmp_path / "store").items() if not n.startswith("packs")} == {
        n: c for n, c in contents(store.path).items() if not n.startswith("packs")
    }


def test_the_index_of_a_large_store(
    store: TokenStore, sources: Path, options_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "MIN_INDEXED_SHARDS", 2)
    prepare([sources], out=tmp_path / "store", unit_bytes=UNIT_BYTES, **options_)
    assert (tmp_path / "store" / "joined.index").is_file()
    indexed = TokenStore(tmp_path / "store")
    assert indexed.manifest.fingerprint == store.manifest.fingerprint
    assert indexed.manifest.left_out == store.manifest.left_out
    assert np.array_equal(indexed.lengths, store.lengths)
    assert verify(indexed) == []


def test_a_damaged_list_is_found(store: TokenStore, tmp_path: Path) -> None:
    """Each single damaged byte is refused, or at least found by `verify`; nothing reads outside of a shard."""
    shutil.copytree(store.path, tmp_path / "store")
    path = tmp_path / "store" / EXTENTS_FILE
    good = path.read_bytes()
    rng = random.Random(SEED)
    refused = accepted = 0
    for _ in range(60):
        content = bytearray(good)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
        try:
            damaged = TokenStore(tmp_path / "store")
        except DataError as exc:
            refused += EXTENTS_FILE in str(exc)
            continue
        accepted += 1
        assert any(EXTENTS_FILE in problem for problem in verify(damaged))
        damaged.tokens(0, damaged.n_tokens)
    assert refused + accepted == 60
    assert refused > 20
    for content in (good[:-1], good + b"\0", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match="bytes, the manifest says"):
            TokenStore(tmp_path / "store")
    path.unlink()
    with pytest.raises(DataError, match=EXTENTS_FILE):
        TokenStore(tmp_path / "store")


def test_what_does_not_know_of_dropped_documents_refuses(store: TokenStore, flat: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves out duplicates of its parts, so it cannot be a part itself"):
        join(tmp_path / "joined", [store.path, flat.path])
    with pytest.raises(DataError, match="leaves out duplicates of its parts; make a flat store"):
        upload(store.path, "s3://bucket/store")
    with pytest.raises(DataError, match="made with drop_duplicates"):
        append(store.path, [flat.path / "manifest.json"])
    assert not (tmp_path / "joined").exists()


def test_a_list_of_hashes_that_was_changed_is_refused(
    sources: Path, options_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a unit says of its documents is compared with its manifest before anything is left out."""
    run = {**options_, "out": tmp_path / "store", "unit_bytes": UNIT_BYTES}
    with monkeypatch.context() as patch:
        patch.setattr("lt_data.preparation.units._join", lambda *_: (_ for _ in ()).throw(DataError("stopped")))
        with pytest.raises(DataError, match="stopped"):
            prepare([sources], **run)
    victim = sorted((tmp_path / "store" / "units").glob("0*-of-*/part/documents"))[1]
    content = bytearray(victim.read_bytes())
    content[20] ^= 1
    victim.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"part/documents: SHA-256 differs from the manifest"):
        prepare([sources], **run)
    assert not (tmp_path / "store" / "manifest.json").exists()


HASHES = st.lists(st.lists(st.sampled_from([bytes([i]) * 16 for i in range(1, 200, 7)]), unique=True), max_size=6)


@given(units=HASHES, n_ranges=st.integers(1, 9))
def test_the_first_unit_with_a_document_keeps_it(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[bytes]], n_ranges: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    parts, seen = [], set[bytes]()
    expected: list[list[int]] = []
    for number, hashes in enumerate(units):
        part = folder / str(number)
        (part / "part").mkdir(parents=True)
        entries = np.zeros(len(hashes), ENTRY_DTYPE)
        entries["hash"] = np.array(hashes, HASH_DTYPE)
        (part / "part" / "documents").write_bytes(entries.tobytes())
        duplicates.write_by_hash(part)
        parts.append(part)
        expected.append([i for i, value in enumerate(hashes) if value in seen])
        seen |= set(hashes)
    assert sum(map(duplicates.count_documents, parts)) == sum(map(len, units))
    files = []
    for index in range(n_ranges):
        files.append(folder / f"found-{index}")
        found = duplicates.find_duplicates(parts, index, n_ranges)
        files[-1].write_bytes(duplicates.encode_duplicates(found))
    assert [duplicates.read_duplicates(files, number).tolist() for number in range(len(units))] == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=20))
def test_extents_are_the_kept_documents(documents: list[tuple[bool, int]]) -> None:
    kept, lengths = np.array([each[0] for each in documents]), np.array([each[1] for each in documents])
    found = extents_of_mask(kept, lengths)
    ids = [n for first, size in zip(found.document, found.documents, strict=True) for n in range(first, first + size)]
    assert ids == np.flatnonzero(kept).tolist()
    assert found.tokens.sum() == lengths[kept].sum()
    columns = {"first_token": np.append(0, np.cumsum(found.tokens)), "shard_token": np.append(found.token, 0)}
    extents = Extents(
        **columns,
        first_document=np.append(0, np.cumsum(found.documents)),
        shard_document=np.append(found.document, 0),
        shard=np.append(np.zeros(found.token.size, int), 1),
    )
    mask = extents.kept_documents(0, kept.size)
    assert mask is not None
    assert mask.tolist() == kept.tolist()
    tokens = np.repeat(kept, lengths)
    places = [i for _, begin, end in extents.split(0, extents.n_tokens) for i in range(begin, end)]
    assert places == np.flatnonzero(tokens).tolist()


def command(sources: Path, tokenizer: Path, out: Path) -> list[str]:
    options = ["--unit-bytes", str(UNIT_BYTES), "--engine", "hf", "--drop-duplicates", "--on-bad", "skip"]
    return [
        *(sys.executable, "-m", "lt_data", "prepare", str(sources), "--tokenizer", str(tokenizer), "--out", str(out)),
        *options,
    ]


def kill_at_random(command: list[str], out: Path, expected: dict[str, bytes], contents: Contents, kills: int) -> None:
    rng = random.Random(SEED)
    running: list[subprocess.Popen[bytes]] = []
    done = 0
    while done < kills:
        running = [job for job in running if job.poll() is None]
        running += [subprocess.Popen(command) for _ in range(3 - len(running))]
        time.sleep(rng.uniform(0.2, 0.7))
        if (out / "manifest.json").exists():
            assert [job.wait(timeout=120) for job in running] == [0] * len(running)
            assert contents(out) == expected
            shutil.rmtree(out)
            continue
        victim = rng.choice(running)
        if victim.poll() is None:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            done += 1
    for job in running:
        job.kill()
        job.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert contents(out) == expected


@pytest.mark.parametrize("kills", [3, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills(kills: int, sources: Path, options: dict[str, Any], tmp_path: Path, contents: Contents) -> None:
    options["tokenizer"].save(tmp_path / "tok")
    run = command(sources, tmp_path / "tok", tmp_path / "undisturbed")
    subprocess.run(run, check=True, capture_output=True)
    assert TokenStore(tmp_path / "undisturbed").manifest.dropped is not None
    again = command(sources, tmp_path / "tok", tmp_path / "store")
    kill_at_random(again, tmp_path / "store", contents(tmp_path / "undisturbed"), contents, kills)
