"""A reader of token stores written from docs/reference/data-formats.md alone, against the library."""

import hashlib
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import lt_data
from lt_data import Tokenizer, TokenStore

Contents = Callable[[Path], dict[str, bytes]]
GOLDEN = Path(__file__).parent.parent / "data"
REASONS = {"empty", "too few characters", "too many characters", "duplicate", "too few tokens", "too many tokens"}


def canonical(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_index(content: bytes, code: int) -> list[tuple[int, int]]:
    """(offset in bytes, tokens) of each document."""
    assert content[:9] == b"MMIDIDX\0\0"
    version, found, n, boundaries = struct.unpack_from("<QBQQ", content, 9)
    assert (version, found, boundaries) == (1, code, n + 1)
    assert len(content) == 34 + 20 * n + 8
    lengths = struct.unpack_from(f"<{n}i", content, 34)
    offsets = struct.unpack_from(f"<{n}q", content, 34 + 4 * n)
    assert struct.unpack_from(f"<{n + 1}q", content, 34 + 12 * n) == tuple(range(n + 1))
    return list(zip(offsets, lengths, strict=True))


def read_store(files: dict[str, bytes]) -> list[list[int]]:
    """The documents of a store, all of it checked on the way."""
    manifest = json.loads(files["manifest.json"])
    assert manifest["format"] == "lt-data-store"
    assert manifest["version"] == 1
    size, letter, code = {"uint16": (2, "H", 8), "uint32": (4, "I", 4)}[manifest["dtype"]]
    documents: list[list[int]] = []
    (part,) = manifest["parts"]
    assert part["path"] == "."
    for number, shard in enumerate(part["shards"]):
        assert shard["name"] == f"{number:05d}"
        content = files[f"shards/{shard['name']}.bin"]
        index = files[f"shards/{shard['name']}.idx"]
        assert len(content) == size * shard["tokens"]
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert hashlib.sha256(index).hexdigest() == shard["idx_sha256"]
        if "src_sha256" in shard:
            sources = files[f"shards/{shard['name']}.src"]
            assert hashlib.sha256(sources).hexdigest() == shard["src_sha256"]
            numbers = struct.unpack(f"<{shard['documents']}Q", sources)
            assert max(numbers) >> 40 < part["sources"]["files"]
        places = read_index(index, code)
        assert len(places) == shard["documents"]
        end = 0
        for offset, tokens in places:
            assert offset == end
            assert tokens >= 1
            documents.append(list(struct.unpack_from(f"<{tokens}{letter}", content, offset)))
            end = offset + size * tokens
        assert end == len(content)
    assert len(documents) == manifest["documents"]
    assert sum(map(len, documents)) == manifest["tokens"]
    assert max(map(max, documents)) < manifest["tokenizer"]["vocab_size"]

    digest = hashlib.sha256()
    for name in sorted(manifest["tokenizer"]["files"]):
        content = files[f"tokenizer/{name}"]
        assert hashlib.sha256(content).hexdigest() == manifest["tokenizer"]["files"][name]
        digest.update(f"{name} {len(content)}\n".encode() + content)
    assert digest.hexdigest() == manifest["tokenizer"]["sha256"]
    names = {name: manifest[name] for name in ("format", "bos", "eos", "dtype")}
    names["shards"] = [{name: s[name] for name in s if name != "src_sha256"} for s in part["shards"]]
    assert manifest["fingerprint"] == canonical({**names, "version": 1, "tokenizer": manifest["tokenizer"]["sha256"]})
    assert manifest["checksum"] == canonical({name: manifest[name] for name in manifest if name != "checksum"})
    check_counts(manifest)
    listed = part["sources"].get("listed", [])
    if len(listed) == part["sources"]["files"]:
        lines = "".join(f"{file['sha256']} {file['bytes']} {file['path']}\n" for file in listed)
        assert hashlib.sha256(lines.encode()).hexdigest() == part["sources"]["sha256"]
        assert sum(file["bytes"] for file in listed) == part["sources"]["bytes"]
    return documents


def check_counts(manifest: dict[str, Any]) -> None:
    assert set(manifest["left_out"]) <= REASONS
    for name in ("documents", "text_bytes", "tokens"):
        assert manifest["read"][name] == manifest[name] + sum(out[name] for out in manifest["left_out"].values())
    for reason, amount in manifest["left_out"].items():
        assert amount["documents"] > 0
        if "tokens" not in reason and reason != "empty":
            assert amount["tokens"] == 0
    assert set(manifest["selection"]) == {
        "min_characters",
        "max_characters",
        "min_tokens",
        "max_tokens",
        "drop_duplicates",
    }


def read_pack(files: dict[str, bytes], name: str) -> list[list[tuple[int, int]]]:
    """The slices (start, tokens) of each row."""
    arrays: dict[str, tuple[int, ...]] = {}
    pack = json.loads(files[f"packs/{name}/pack.json"])
    assert pack["format"] == "lt-data-pack"
    for array, letter in {"row_offsets": "q", "start": "q", "length": "i"}.items():
        content = files[f"packs/{name}/{array}.npy"]
        assert content[:8] == b"\x93NUMPY\x01\x00"
        begin = 10 + struct.unpack_from("<H", content, 8)[0]
        arrays[array] = struct.unpack_from(
            f"<{(len(content) - begin) // struct.calcsize(letter)}{letter}", content, begin
        )
    slices = list(zip(arrays["start"], arrays["length"], strict=True))
    offsets = arrays["row_offsets"]
    rows = [slices[begin:end] for begin, end in pairwise(offsets)]
    assert all(sum(tokens for _, tokens in row) <= pack["seq_len"] for row in rows)
    return rows


def same_as_the_library(folder: Path, contents: Contents) -> None:
    found = read_store(contents(folder))
    store = TokenStore(folder)
    assert found == [store[i].tolist() for i in range(store.n_documents)]


@pytest.mark.usefixtures("small_batches")
def test_stores_and_units(
    fast_path: Path, corpus: Path, options: dict[str, Any], contents: Contents, whole: dict[str, bytes]
) -> None:
    lt_data.prepare([corpus], out=fast_path / "store", **options)
    same_as_the_library(fast_path / "store", contents)
    assert read_store(contents(fast_path / "store")) == read_store(whole)
    lt_data.prepare([corpus], out=fast_path / "units", **options, unit_bytes=2000)
    for unit in (fast_path / "units/units").iterdir():
        same_as_the_library(unit, contents)


def test_wide_ids(fast_path: Path, contents: Contents, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.files["tokenizer.json"])
    vocab = {token: id_ for token, id_ in model["model"]["vocab"].items() if len(token) == 1 or token.startswith("<|")}
    model["model"] |= {"vocab": vocab | {"x": 70_000}, "merges": []}
    wide = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})
    documents = [lt_data.Document(text=text, source="") for text in ("axa", "x")]
    lt_data.prepare(documents, tokenizer=wide, engine="hf", out=fast_path / "store", bos=False)
    same_as_the_library(fast_path / "store", contents)
    assert read_store(contents(fast_path / "store"))[1] == [70_000, 1]


@pytest.mark.parametrize(("name", "lengths"), [("store-v1", [14, 27, 3, 27]), ("store-v1-selection", [14, 27, 27])])
def test_golden_stores_and_their_packs(contents: Contents, name: str, lengths: list[int]) -> None:
    files = contents(GOLDEN / name)
    documents = read_store(files)
    assert [len(document) for document in documents] == lengths
    tokens = [token for document in documents for token in document]
    for pack in ("bfd-16", "concat-16"):
        rows = read_pack(files, pack)
        assert rows
        covered = sorted(position for row in rows for start, n in row for position in range(start, start + n))
        assert covered == list(range(len(tokens)))
