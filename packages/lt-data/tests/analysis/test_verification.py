"""`lt data verify` finds every flipped bit, every lost byte, and packs that are not what they say."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, TokenStore, pack, prepare, verify
from lt_data.store.manifest import encode_manifest
from lt_data.store.source_files import SourceFile, SourceFiles


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer, texts) -> Path:
    """A small store of two shards with a pack of each mode."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    documents = [Document(text=text, source=f"text é {i}") for i, text in enumerate(texts[15:23])]
    prepare(documents, tokenizer=tokenizer, out=folder, shard_tokens=1500)
    store = TokenStore(folder)
    assert len(store.manifest.shards) >= 2
    for mode in ("bfd", "concat"):
        pack(store, seq_len=512, mode=mode)
    return folder


def found(folder: Path) -> list[str]:
    try:
        return verify(TokenStore(folder))
    except DataError as exc:
        return [str(exc)]


def test_a_whole_store_has_no_problems(whole):
    assert found(whole) == []


@settings(max_examples=60)
@given(st.data())
def test_each_cut_or_grown_file_is_found(whole, data):
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content) + 8).filter(lambda size: size != len(content)))
    try:
        path.write_bytes((content + bytes(8))[:size])
        assert found(whole) or size > len(content), f"{size} bytes of {path.relative_to(whole)}"
        path.unlink()
        assert found(whole), f"{path.relative_to(whole)} is gone"
    finally:
        path.write_bytes(content)


def test_all_problems_are_named(whole, tmp_path, run):
    folder = shutil.copytree(whole, tmp_path / "store")
    damaged = ["shards/00000.bin", "shards/00001.idx", "tokenizer/tokenizer.json", "packs/bfd-512/start.npy"]
    for name in damaged:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    code, out, err = run("verify", folder)
    assert code == 64, err
    for name in damaged[:3]:
        assert name in out
    assert "packs/bfd-512" in out
    assert err.splitlines()[-1].startswith(f"error: {folder}: ")


def test_a_manifest_whose_counts_do_not_add_up_does_not_open(whole, tmp_path, run):
    store = TokenStore(shutil.copytree(whole, tmp_path / "store"))
    manifest = store.manifest
    wrong = {
        "read.documents = 99: the documents stored and left out have 8": {"read": replace(manifest.read, documents=99)},
        "read.text_bytes = ": {"text_bytes": manifest.text_bytes - 1},
    }
    for problem, values in wrong.items():
        (store.path / "manifest.json").write_bytes(encode_manifest(replace(manifest, **values)))
        code, _, err = run("verify", store.path)
        assert code == 64
        assert f"manifest.json: {problem}" in err
        assert err.endswith("copy the store again or prepare it again\n")
    with pytest.raises(DataError, match="1 files of 6 bytes, but 1 files of 5 bytes are listed"):
        SourceFiles(files=1, bytes=6, listed=(SourceFile(path="a", bytes=5, sha256="0" * 64),))


def test_ids_beyond_the_vocabulary(whole, tmp_path):
    """Hashes that fit do not make ids good: who wrote them may have been wrong."""
    store = TokenStore(shutil.copytree(whole, tmp_path / "store"))
    highest = max(int(store.read_shard(i).max()) for i in range(len(store.manifest.shards)))
    smaller = replace(store.manifest, tokenizer=replace(store.manifest.tokenizer, vocab_size=highest))
    (store.path / "manifest.json").write_bytes(encode_manifest(smaller))
    told = [problem for problem in verify(TokenStore(store.path)) if "has id" in problem]
    assert told
    assert f"has id {highest}, the tokenizer's highest is {highest - 1}" in told[0]
