"""`lt data verify` finds every flipped bit, every lost byte, and packs that are not what they say."""

import hashlib
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer, TokenStore, pack, prepare, verify
from lt_data.__main__ import main
from lt_data.packing.pack_index import ARRAYS, PackHeader, PackIndex, _fingerprint
from lt_data.store.manifest import encode_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, texts: list[str]) -> Path:
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


def test_a_whole_store_has_no_problems(whole: Path) -> None:
    assert found(whole) == []


def is_same_json(path: Path, content: bytes) -> bool:
    """Whether only the spaces of a file of ours differ."""
    try:
        return path.suffix == ".json" and json.loads(path.read_bytes()) == json.loads(content)
    except ValueError:
        return False


@settings(max_examples=150)
@given(st.data())
def test_each_flipped_bit_is_found(whole: Path, data: st.DataObject) -> None:
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(changed)
        assert found(whole) or is_same_json(path, content), f"bit {bit} of {path.relative_to(whole)}"
    finally:
        path.write_bytes(content)


@settings(max_examples=60)
@given(st.data())
def test_each_cut_or_grown_file_is_found(whole: Path, data: st.DataObject) -> None:
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content) + 8).filter(lambda size: size != len(content)))
    try:
        path.write_bytes((content + bytes(8))[:size])
        assert found(whole) or is_same_json(path, content), f"{size} bytes of {path.relative_to(whole)}"
        path.unlink()
        assert found(whole), f"{path.relative_to(whole)} is gone"
    finally:
        path.write_bytes(content)


def test_all_problems_are_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(whole, tmp_path / "store")
    damaged = ["shards/00000.bin", "shards/00001.idx", "tokenizer/tokenizer.json", "packs/bfd-512/start.npy"]
    for name in damaged:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    argv, sys.argv = sys.argv, ["lt-data", "verify", str(folder)]
    try:
        code = main()
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    assert code == 64, err
    for name in damaged[:3]:
        assert name in out
    assert "packs/bfd-512" in out
    assert err.splitlines()[-1].startswith(f"error: {folder}: ")


def test_ids_beyond_the_vocabulary(whole: Path, tmp_path: Path) -> None:
    """Hashes that fit do not make ids good: who wrote them may have been wrong."""
    store = TokenStore(shutil.copytree(whole, tmp_path / "store"))
    highest = max(int(store.read_shard(i).max()) for i in range(len(store.manifest.shards)))
    smaller = replace(store.manifest, tokenizer=replace(store.manifest.tokenizer, vocab_size=highest))
    (store.path / "manifest.json").write_bytes(encode_manifest(smaller))
    told = [problem for problem in verify(TokenStore(store.path)) if "has id" in problem]
    assert told
    assert f"has id {highest}, the tokenizer's highest is {highest - 1}" in told[0]


def rewrite(folder: Path, index: PackIndex, arrays: dict[str, np.ndarray], **header: object) -> None:
    """Write a pack as a wrong program would: every fingerprint is right."""
    index = replace(index, **arrays)
    store = header.get("store_fingerprint", index.store_fingerprint)
    digests = {name: hashlib.sha256(np.ascontiguousarray(getattr(index, name)).data) for name in ARRAYS}
    fingerprint = _fingerprint(index.seq_len, index.mode, str(store), index.document.dtype, digests)
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", getattr(index, name))
    fields = {"seq_len": index.seq_len, "mode": index.mode, "rows": index.n_rows, "slices": index.start.size}
    most = int(np.diff(index.row_offsets).max())
    made = PackHeader(**fields, max_slices_per_row=most, store_fingerprint=str(store), fingerprint=fingerprint)
    (folder / "pack.json").write_text(json.dumps(asdict(made)), encoding="utf-8")


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@pytest.mark.parametrize("change", ["lost slice", "twice", "moved", "document", "rows joined", "valid"])
def test_a_pack_whose_hashes_fit_but_not_its_rows(mode: str, change: str, whole: Path, tmp_path: Path) -> None:
    store = TokenStore(shutil.copytree(whole, tmp_path / "store"))
    folder = store.path / "packs" / f"{mode}-512"
    index = PackIndex.load(folder)
    arrays = {name: np.array(getattr(index, name)) for name in ARRAYS}
    if change == "lost slice":
        for name in ("document", "start", "length"):
            arrays[name] = arrays[name][:-1]
        arrays["row_offsets"][-1] -= 1
        if arrays["row_offsets"][-1] == arrays["row_offsets"][-2]:
            arrays["row_offsets"], arrays["valid"] = arrays["row_offsets"][:-1], arrays["valid"][:-1]
    elif change == "twice":
        for name in ("document", "start", "length"):
            arrays[name][0] = arrays[name][1]
    elif change == "moved":
        arrays["start"][1] += 1
    elif change == "document":
        arrays["document"][0] = arrays["document"][0] + 1 if arrays["document"][0] == 0 else 0
    elif change == "rows joined":
        arrays["row_offsets"] = np.delete(arrays["row_offsets"], 1)
        arrays["valid"] = np.concatenate([[arrays["valid"][0] + arrays["valid"][1]], arrays["valid"][2:]]).astype("i4")
    else:
        arrays["valid"][-1] -= 1
    rewrite(folder, index, arrays)
    told = verify(store)
    assert told
    assert all(str(folder) in problem for problem in told)


def test_a_pack_of_another_store(whole: Path, tmp_path: Path) -> None:
    store = TokenStore(shutil.copytree(whole, tmp_path / "store"))
    folder = store.path / "packs" / "bfd-512"
    rewrite(folder, PackIndex.load(folder), {}, store_fingerprint="0" * 64)
    assert found(store.path) == [f"{folder}: belongs to another store; make it again"]
