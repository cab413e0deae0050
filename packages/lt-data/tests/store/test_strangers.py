"""Stores and parts of strangers: a manifest that fits itself, but names, links or values that no job of ours writes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, ExportOptions, TokenStore, export
from lt_data.analysis.verification import verify
from lt_data.store.manifest import read_manifest

Contents = Callable[[Path], dict[str, bytes]]


def dump(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def rewrite(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and make its fingerprint and checksum fit again."""
    path = store / "manifest.json"
    values = json.loads(path.read_bytes())
    change(values)
    identity = {name: values[name] for name in ("format", "version", "bos", "eos", "dtype")}
    identity["shards"] = [{name: s[name] for name in s if name != "src_sha256"} for s in values["shards"]]
    values["fingerprint"] = hashlib.sha256(dump({**identity, "tokenizer": values["tokenizer"]["sha256"]})).hexdigest()
    del values["checksum"]
    values["checksum"] = hashlib.sha256(dump(values)).hexdigest()
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def test_what_rewrites_a_manifest_keeps_it_valid(store: TokenStore) -> None:
    before = (store.path / "manifest.json").read_bytes()
    rewrite(store.path, lambda values: None)
    assert (store.path / "manifest.json").read_bytes() == before


def set_shard(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["shards"][0].update({name: value})


def rename_tokenizer_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        files = values["tokenizer"]["files"]
        values["tokenizer"]["files"] = {name if old == "tokenizer.json" else old: sha for old, sha in files.items()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_shard("name", "../../victim"), "shard '../../victim' is not the name of a file in its folder"),
        (set_shard("name", "/etc/passwd"), "shard '/etc/passwd' is not the name"),
        (set_shard("name", ".."), "shard '..' is not the name"),
        (set_shard("name", 7), r"shards\[0\]\.name is an integer, not a string"),
        (set_shard("sha256", "../../x"), "is not a SHA-256 in hexadecimal"),
        (set_shard("documents", -1), "documents = -1: not a count"),
        (set_shard("tokens", 2**63), f"tokens = {2**63}: not a count"),
        (rename_tokenizer_file("../../evil"), r"tokenizer file '\.\./\.\./evil' is not the name"),
        (rename_tokenizer_file("/tmp/evil"), "tokenizer file '/tmp/evil' is not the name"),
        (rename_tokenizer_file("a\0b"), "tokenizer file .* is not the name"),
        (lambda values: values["tokenizer"]["files"].update({"x": "no"}), "'no' is not a SHA-256"),
        (lambda values: values["tokenizer"].update(vocab_size="300"), r"tokenizer\.vocab_size is a string"),
        (lambda values: values["sources"].update(sha256="<script>"), "'<script>' is not a SHA-256"),
        (lambda values: values.update(engine=[]), "engine is a list, not an object"),
        (lambda values: values.update(skipped={"x": None}), r"skipped\['x'\] is null, not an integer"),
        (lambda values: values["read"].update(tokens=True), r"read\.tokens is true or false, not an integer"),
        (lambda values: values.update(dtype="float16"), "dtype is a string, not one of 'uint16', 'uint32'"),
    ],
)
def test_a_manifest_is_refused(store: TokenStore, change: Callable[[dict[str, Any]], None], message: str) -> None:
    rewrite(store.path, change)
    with pytest.raises(DataError, match=rf"{store.path}/manifest\.json: .*{message}"):
        TokenStore(store.path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "holds a list"),
        (b"{}", "not the manifest"),
        (b"[" * 50_000 + b"]" * 50_000, "not JSON"),
        (b'{"format": "lt-data-store", "version": 1}', "no field"),
    ],
)
def test_a_manifest_that_is_none(store: TokenStore, content: bytes, message: str) -> None:
    (store.path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"manifest\.json: .*{message}"):
        read_manifest(store.path)


def test_a_pipe_is_not_waited_for(store: TokenStore) -> None:
    (store.path / "manifest.json").unlink()
    os.mkfifo(store.path / "manifest.json")
    with pytest.raises(DataError, match=r"manifest\.json: not a regular file"):
        TokenStore(store.path)


@pytest.mark.parametrize("name", ["shards", "shards/00000.bin", "shards/00001.idx"])
def test_a_link_out_of_a_store_is_not_followed(store: TokenStore, tmp_path: Path, name: str) -> None:
    moved = store.path.with_name(f"{store.path.name}-elsewhere")  # a name that begins like the store's
    (store.path / name).rename(moved)
    (store.path / name).symlink_to(moved)
    with pytest.raises(DataError, match=rf"store/{name}: a symbolic link leads out of .*; put the file itself there"):
        export(store.path, out=tmp_path / "exported", options=ExportOptions(to="smp"))
    assert not (tmp_path / "exported").exists()


def test_a_link_to_the_tokenizer_is_not_followed(store: TokenStore, tmp_path: Path) -> None:
    path = store.path / "tokenizer/tokenizer.json"
    path.rename(tmp_path / "secret.json")
    path.symlink_to("../../secret.json")
    opened = TokenStore(store.path)
    with pytest.raises(DataError, match=r"tokenizer\.json: a symbolic link leads out of"):
        opened.tokenizer()
    with pytest.raises(DataError, match=r"tokenizer\.json: a symbolic link leads out of"):
        opened.verify()
    assert any("leads out of" in problem for problem in verify(opened))


def test_a_link_inside_a_store_is_followed(store: TokenStore) -> None:
    (store.path / "shards/00000.bin").rename(store.path / "shards/first")
    (store.path / "shards/00000.bin").symlink_to("first")
    link = store.path.with_name("link")
    link.symlink_to(store.path)
    TokenStore(link).verify()


@pytest.fixture
def contents_of() -> Contents:
    """The files below a folder."""

    def read(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read
