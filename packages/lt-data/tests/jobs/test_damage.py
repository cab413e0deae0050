"""A damaged file is left out whole: no record of it is in a store, whatever the units, the workers and the kills."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lt_data
from lt_data import DataError, SourceOptions, TokenStore
from lt_data.store.manifest import Selection

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
import pyarrow.parquet as pq  # noqa: E402

SEED = int(os.environ.get("LT_SEED", "0"))
SKIP = SourceOptions(on_bad="skip")


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=3, write_page_checksum=True, compression="zstd")
    return out.getvalue()


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def zstd(content: bytes, *, write_checksum: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=write_checksum).compress(content)


FILES: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": lines,
    "b.jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "c.parquet": parquet,
    "d.jsonl.zst": lambda texts: zstd(lines(texts[:9])) + zstd(lines(texts[9:])),
    "e.json.gz": lambda texts: gzip.compress(json.dumps([{"text": text} for text in texts]).encode()),
    "f.jsonl.bz2": lambda texts: bz2.compress(lines(texts[:9])) + bz2.compress(lines(texts[9:])),
    "g.jsonl.xz": lambda texts: lzma.compress(lines(texts)),
    "h.parquet": parquet,
    "i.jsonl": lines,
}
UNPACK = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}


@pytest.fixture(scope="module")
def folder(memory) -> Path:
    """A file of each kind, of 20 documents, some of which are in several."""
    folder = memory / "damage"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for name, pack in FILES.items():
        texts = [" ".join(map(str, rng.integers(0, 10**9, int(n)))) for n in rng.integers(1, 9, 14)]
        texts += [f"in every file {i}" for i in range(6)]
        rng.shuffle(texts)
        (folder / name).write_bytes(pack(texts))
    return folder


@pytest.fixture(scope="module")
def store(folder, tokenizer, memory) -> Callable[..., TokenStore]:
    """Makes the store of the files, of which one has another content, or is left out."""

    def make(name: str, content: bytes | None, unit_bytes: int, drop_duplicates: bool) -> TokenStore:
        root = Path(tempfile.mkdtemp(dir=memory))
        changed = root / name
        if content is not None:
            changed.write_bytes(content)
        paths = [changed if each == name else folder / each for each in FILES]
        sources = [path for path in paths if path.exists()]
        selection = Selection(drop_duplicates=drop_duplicates)
        options = {"options": SKIP, "engine": "hf", "shard_tokens": 300, "selection": selection}
        lt_data.prepare(sources, tokenizer=tokenizer, out=root / "store", unit_bytes=unit_bytes, **options)
        return TokenStore(root / "store")

    return make


@pytest.fixture(scope="module")
def expected(store) -> Callable[..., Any]:
    """Gives the documents of the files but one, or of all."""
    return cache(lambda name, content, drop_duplicates: documents(store(name, content, 2**30, drop_duplicates)))


def documents(store: TokenStore) -> Any:
    manifest = store.manifest
    counts = (manifest.text_bytes, manifest.left_out, manifest.read, manifest.special_strings)
    return [ids.tolist() for ids in store], counts


def damaged(content: bytes, where: float, bit: int) -> bytes:
    """Flip a bit (0 to 7), or cut the file (8)."""
    place = int(where * len(content))
    rest = b"" if bit == 8 else bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
    return content[:place] + rest


@example(name="b.jsonl.gz", where=0.999, bit=0, unit_bytes=2**30, drop_duplicates=True)
@example(name="b.jsonl.gz", where=0.5, bit=3, unit_bytes=1500, drop_duplicates=True)
@example(name="d.jsonl.zst", where=0.6, bit=8, unit_bytes=1500, drop_duplicates=False)
@example(name="f.jsonl.bz2", where=0.56, bit=1, unit_bytes=2**30, drop_duplicates=False)
@example(name="c.parquet", where=0.05, bit=4, unit_bytes=600, drop_duplicates=True)
@example(name="h.parquet", where=0.4, bit=4, unit_bytes=600, drop_duplicates=False)
@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(FILES)[1:-1]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 8),
    unit_bytes=st.sampled_from([600, 1500, 2**30]),
    drop_duplicates=st.booleans(),
)
def test_a_store_is_that_of_the_files_without_the_damaged_one(
    store, expected, folder, name, where, bit, unit_bytes, drop_duplicates
):
    whole = (folder / name).read_bytes()
    content = damaged(whole, where, bit)
    found = store(name, content, unit_bytes, drop_duplicates)
    if found.manifest.skipped:
        assert found.manifest.skipped == {"damaged file": 1}
        assert documents(found) == expected(name, None, drop_duplicates)
    else:  # such as a bit of the time in the header of gzip
        unpack = UNPACK.get(Path(name).suffix)
        assert unpack is None or unpack(content) == unpack(whole)
        assert documents(found) == expected(name, whole, drop_duplicates)
    assert lt_data.verify(found) == []


@pytest.fixture
def job(folder, fast_path) -> dict[str, Any]:
    """Sources in several units, with damage in the midst of a table and at the end of a text; and their options."""
    for name in FILES:
        (fast_path / name).write_bytes((folder / name).read_bytes())
    for name, where in (("c.parquet", 0.4), ("b.jsonl.gz", 0.999)):
        (fast_path / name).write_bytes(damaged((folder / name).read_bytes(), where, 4))
    return {
        "sources": [fast_path / name for name in FILES],
        "options": SKIP,
        "engine": "hf",
        "unit_bytes": 600,
        "selection": Selection(drop_duplicates=True),
    }


@pytest.mark.parametrize("kills", [6, pytest.param(0, marks=pytest.mark.slow)])
def test_any_processes_and_kills_make_the_same_store(job, tokenizer, fast_path, contents, killed_at, kills):
    notices: list[str] = []
    manifest = lt_data.prepare(**job, tokenizer=tokenizer, out=fast_path / "store", notify=notices.append)
    undisturbed = contents(fast_path / "store")
    assert manifest.skipped == {"damaged file": 2}
    assert [notice for notice in notices if re.search(r"damaged file: for example .*[bc]\..*: damaged file", notice)]
    redone = {path.parent for path in (fast_path / "store").glob("units/*-redone/manifest.json")}
    assert len(redone) > 1
    assert not [path for path in redone if path.with_name(path.name.removesuffix("-redone")).exists()]
    lt_data.prepare(**job, tokenizer=tokenizer, out=fast_path / "workers", workers=3)
    assert contents(fast_path / "workers") == undisturbed
    calls = sorted(random.Random(SEED).sample(range(1, 350), kills)) if kills else range(1, 1000, 3)
    done = 0
    for call in calls:
        out = fast_path / f"killed-{call}"
        killed = killed_at(call, lambda out=out: lt_data.prepare(**job, tokenizer=tokenizer, out=out))
        done += killed
        assert lt_data.prepare(**job, tokenizer=tokenizer, out=out).fingerprint == manifest.fingerprint
        assert contents(out) == undisturbed, call
        shutil.rmtree(out)
        if not killed:
            break
    assert done >= (kills or 100)


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress, lzma.compress])
def test_damage_is_the_error_before_what_it_leads_to(fast_path, tokenizer, pack):
    """A broken line, a kept column of another type, a map that fails: the checksum at the end tells the cause."""
    suffix = {gzip.compress: ".gz", zstd: ".zst", bz2.compress: ".bz2", lzma.compress: ".xz"}[pack]
    good = fast_path / "good.jsonl"
    good.write_bytes(lines(["good"]))
    broken = [b"{\n", b'{"text": "a", "n": "b"}\n', b'{"text": null}\n']
    for number, line in enumerate(broken):
        content = pack(line + lines([f"document {i}" for i in range(500)]))
        path = fast_path / f"{number}.jsonl{suffix}"
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "keep": ["n:int"]}
        with pytest.raises(DataError, match=rf"{number}\.jsonl{suffix}: damaged file \(.*--on-bad skip"):
            lt_data.prepare([path], out=fast_path / "out", **options)
        sources = [path, good]
        manifest = lt_data.prepare(sources, out=fast_path / f"out{number}", options=SKIP, **options)
        assert (manifest.documents, manifest.skipped) == (1, {"damaged file": 1})


def test_content_without_a_checksum_is_said_once(fast_path, tokenizer):
    for number in range(3):
        (fast_path / f"{number}.jsonl.zst").write_bytes(zstd(lines(["a", "b"]), write_checksum=number == 2))
    (fast_path / "x.jsonl.xz").write_bytes(lzma.compress(lines(["c"]), check=lzma.CHECK_NONE))
    (fast_path / "y.jsonl.xz").write_bytes(lzma.compress(lines(["c"])))
    for unit_bytes in (1, 2**30):
        notices: list[str] = []
        options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "unit_bytes": unit_bytes}
        sources = sorted(path for path in fast_path.iterdir() if path.is_file())
        manifest = lt_data.prepare(sources, out=fast_path / str(unit_bytes), notify=notices.append, **options)
        assert manifest.sources.unchecked == {"xz": 1, "zstandard": 2}
        said = [notice.partition(":")[0] for notice in notices if "checksum" in notice]
        assert said == [
            f"{n} files compressed with {kind} have no checksum" for n, kind in ((1, "xz"), (2, "zstandard"))
        ]
