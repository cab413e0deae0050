"""Joined stores: one manifest over stores that stay where they are."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import lt_data
from lt_data import DataError, Document, RowReader, Selection, Stream, Tokenizer, TokenStore
from lt_data.cli import app
from lt_data.store.joined import PART_FOLDERS
from lt_data.store.joined_manifest import JoinedManifest
from lt_data.store.manifest import checksum_of, encode_manifest


def _prepare(texts: list[str], tokenizer: Tokenizer, out: Path, **options: object) -> TokenStore:
    documents = [Document(text=text, source="text") for text in texts]
    lt_data.prepare(documents, tokenizer=tokenizer, out=out, **{"shard_tokens": 2000, **options})  # type: ignore[arg-type]
    return TokenStore(out)


@pytest.fixture
def stores(tmp_path: Path, texts: list[str], tokenizer: Tokenizer) -> Path:
    """A folder with the texts in the stores a, b/c and d."""
    folder = tmp_path / "stores"
    for name, part in {"a": texts[:20], "b/c": texts[20:21] + texts[22:40], "d": texts[40:]}.items():
        _prepare(part, tokenizer, folder / name)
    return folder


@pytest.fixture(params=["parsed", "indexed"])
def is_indexed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Stores are joined with and without an index."""
    if request.param == "indexed":
        monkeypatch.setattr("lt_data.store.joined.MIN_INDEXED_SHARDS", 1)
    return request.param == "indexed"


@pytest.fixture
def indexed(stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stores, joined with an index."""
    monkeypatch.setattr("lt_data.store.joined.MIN_INDEXED_SHARDS", 1)
    lt_data.join(stores, _paths(stores))
    return stores


def _paths(stores: Path) -> list[Path]:
    return [stores / "a", stores / "b/c", stores / "d"]


def _edit(folder: Path, **changes: object) -> None:
    """Change fields of a joined manifest, with a checksum that fits."""
    path = folder / "manifest.json"
    values = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "checksum"} | changes
    path.write_text(json.dumps(values | {"checksum": checksum_of(values)}), encoding="utf-8")


def _flat_copy(joined: TokenStore, out: Path) -> TokenStore:
    """The flat store that the fingerprint of a joined one is defined by."""
    (out / "shards").mkdir(parents=True)
    for number, shard in enumerate(joined.manifest.shards):
        for kind in ("bin", "idx"):
            shutil.copy(joined.shard_path(number, kind), out / f"shards/{shard.name}.{kind}")  # type: ignore[arg-type]
    shutil.copytree(joined.tokenizer_folder, out / "tokenizer")
    (out / "manifest.json").write_bytes(encode_manifest(joined.manifest))
    return TokenStore(out)


def test_a_joined_store_is_read_as_the_flat_store_of_its_shards(stores: Path, tmp_path: Path, is_indexed: bool) -> None:
    before = {path: path.read_bytes() for path in stores.rglob("*") if path.is_file()}
    manifest = lt_data.join(stores, _paths(stores))
    joined = TokenStore(stores)
    assert {path: path.read_bytes() for path in stores.rglob("*") if path.is_file()} == {
        **before,
        **{stores / name: (stores / name).read_bytes() for name in ("manifest.json", "joined.index")[: 1 + is_indexed]},
    }
    assert joined.manifest == manifest
    assert manifest.is_consistent
    parts = [TokenStore(path) for path in _paths(stores)]
    assert [joined[i].tolist() for i in range(joined.n_documents)] == [
        part[i].tolist() for part in parts for i in range(part.n_documents)
    ]
    flat = _flat_copy(joined, tmp_path / "flat")
    assert flat.manifest.fingerprint == manifest.fingerprint
    readers = [RowReader(store, lt_data.pack(store, seq_len=64)) for store in (joined, flat)]
    batches = [Stream(reader, global_batch_size=16, dp_rank=0, dp_size=1, seed=3).next() for reader in readers]
    assert batches[0].state == batches[1].state
    assert (batches[0].rows.input_ids == batches[1].rows.input_ids).all()
    assert lt_data.stats(joined) == lt_data.stats(flat)
    assert lt_data.verify(joined) == lt_data.verify(flat) == []
    joined.verify()
    assert joined.tokenizer().sha256 == manifest.tokenizer.sha256
    assert pickle.loads(pickle.dumps(joined))[40].tolist() == flat[40].tolist()
    for store, name in ((joined, "from joined"), (flat, "from flat")):
        lt_data.split(store, holdout="20%", train=tmp_path / name / "train", validation=tmp_path / name / "rest")
        lt_data.export(store, options=lt_data.ExportOptions(to="megatron"), out=tmp_path / name / "megatron")
    for name in ("train/shards/00000.bin", "rest/manifest.json", "megatron/tokens.bin"):
        assert (tmp_path / "from joined" / name).read_bytes() == (tmp_path / "from flat" / name).read_bytes()


@pytest.mark.parametrize(("kind", "size"), [("bin", 1), ("idx", 1), ("bin", 0)])
def test_a_shard_cut_short_is_named_at_its_first_use(indexed: Path, kind: str, size: int) -> None:
    path = indexed / f"b/c/shards/00000.{kind}"
    path.write_bytes(path.read_bytes()[:-1] if size else b"")
    store = TokenStore(indexed)
    assert store[0].size
    with pytest.raises(DataError, match=rf"b/c/shards/00000\.{kind}: \d+ bytes, the manifest says \d+"):
        store[20]
    assert any(f"b/c/shards/00000.{kind}" in problem for problem in lt_data.verify(store))


def test_a_folder_of_shards_that_leads_out_is_refused_at_its_first_use(indexed: Path, tmp_path: Path) -> None:
    (indexed / "d/shards").rename(tmp_path / "secret")
    (indexed / "d/shards").symlink_to(tmp_path / "secret")
    store = TokenStore(indexed)
    with pytest.raises(DataError, match="d/shards: a symbolic link leads out"):
        store[store.n_documents - 1]
    with pytest.raises(DataError, match="d/shards: a symbolic link leads out"):
        store.read_shard(len(store.manifest.shards) - 1)


def test_a_damaged_or_missing_index_is_one_error(indexed: Path) -> None:
    path = indexed / "joined.index"
    content = path.read_bytes()
    for damaged in (content[:-1], content[:400] + b"?" + content[401:], content[:-9] + bytes(9), content + b"0", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"joined\.index: (SHA-256 differs|more than the)"):
            TokenStore(indexed)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read the index .*joined\.index: No such file"):
        TokenStore(indexed)


def test_an_index_of_other_shards_is_found_by_verify(indexed: Path) -> None:
    content = (indexed / "joined.index").read_bytes()
    at = content.index(bytes.fromhex(TokenStore(indexed).manifest.shards[0].sha256))
    content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    (indexed / "joined.index").write_bytes(content)
    _edit(indexed, index={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)})
    store = TokenStore(indexed)
    message = f"{indexed / 'manifest.json'}: the index has other shards or totals than its parts; join the stores again"
    assert message in lt_data.verify(store)
    with pytest.raises(DataError, match="the index has other shards"):
        store.verify()


@pytest.mark.parametrize("version", [1, 4])
def test_an_index_needs_its_version(indexed: Path, version: int) -> None:
    _edit(indexed, version=version)
    with pytest.raises(DataError, match=rf"format version {version}; this lt-data reads 1, with an index 2"):
        TokenStore(indexed)


def test_the_fingerprint_is_a_function_of_the_shards_alone(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PART_FOLDERS, f"{tmp_path / 'nothing'}{os.pathsep}{stores}")
    a, b, d = _paths(stores)
    whole = lt_data.join(tmp_path / "whole", [a, b, d])
    lt_data.join(tmp_path / "two", [a, b])
    nested = lt_data.join(tmp_path / "nested", [tmp_path / "two", d])
    assert nested == whole
    assert json.loads((tmp_path / "nested/manifest.json").read_bytes())["parts"] == [
        {"path": os.path.realpath(part), "sha256": _sha256(part)} for part in (a, b, d)
    ]
    assert lt_data.join(tmp_path / "one", [d]).fingerprint == TokenStore(d).manifest.fingerprint
    moved = tmp_path / "moved"
    lt_data.join(stores, [a, b, d])
    stores.rename(moved)
    assert TokenStore(moved).manifest.fingerprint == whole.fingerprint
    assert lt_data.join(tmp_path / "other", [moved / "d", moved / "a"]).fingerprint != whole.fingerprint


def _sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def test_a_part_that_changed_is_named(stores: Path, texts: list[str], tokenizer: Tokenizer, is_indexed: bool) -> None:
    lt_data.join(stores, _paths(stores))
    shutil.rmtree(stores / "b/c")
    with pytest.raises(DataError, match=r"b/c/manifest\.json: No such file"):
        TokenStore(stores)
    _prepare(texts[:3], tokenizer, stores / "b/c")
    with pytest.raises(DataError, match=r"b/c: changed since it was joined to .*; restore this part, or join"):
        TokenStore(stores)


def test_damage_in_a_part_is_found_by_verify(stores: Path) -> None:
    lt_data.join(stores, _paths(stores))
    damaged = stores / "d/shards/00001.bin"
    content = bytearray(damaged.read_bytes())
    content[9] ^= 1
    damaged.write_bytes(content)
    (stores / "b/c/tokenizer/tokenizer.json").write_bytes(b"{}")
    problems = lt_data.verify(TokenStore(stores))
    assert list(dict.fromkeys(problem.split(":")[0] for problem in problems)) == [
        str(stores / "b/c/tokenizer/tokenizer.json"),
        str(damaged),
    ]


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/", "", "a//b", "./a", "..", "a/."])
def test_a_strangers_manifest_reads_nothing_outside(stores: Path, tmp_path: Path, path: str) -> None:
    (stores / "d").rename(tmp_path / "secret")
    lt_data.join(stores, [stores / "a"])
    (part,) = json.loads((stores / "manifest.json").read_bytes())["parts"]
    _edit(stores, parts=[part | {"path": path}])
    with pytest.raises(DataError, match="neither a path inside the folder nor an absolute one"):
        TokenStore(stores)


def test_parts_elsewhere_are_opened_only_where_the_person_allows_it(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    (stores / "d").rename(secret)
    (stores / "link").symlink_to(secret)
    notices: list[str] = []
    joined = lt_data.join(tmp_path / "joined", [stores / "a", secret], notify=notices.append)
    assert len(notices) == 1
    assert PART_FOLDERS in notices[0]
    lt_data.join(stores, [stores / "a"])
    (part,) = json.loads((stores / "manifest.json").read_bytes())["parts"]
    _edit(stores, parts=[part | {"path": "link"}])
    opened: list[str] = []
    monkeypatch.setattr(
        "lt_data.store.joined.read_file",
        lambda path, **_: opened.append(str(path)) or Path(path).read_bytes(),  # type: ignore[func-returns-value]
    )
    for folder in (tmp_path / "joined", stores):
        for allowed in ("", str(tmp_path / "sec"), "relative"):
            monkeypatch.setenv(PART_FOLDERS, allowed)
            with pytest.raises(DataError, match=f"lies outside of .*{PART_FOLDERS}"):
                TokenStore(folder)
    assert not any("secret" in path or "link" in path or "stores/a/" in path for path in opened)
    monkeypatch.setenv(PART_FOLDERS, str(tmp_path))
    assert TokenStore(tmp_path / "joined").manifest == joined


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint or totals"),
        ({"tokens": 1}, "fingerprint or totals"),
        ({"version": 2}, "update lt-data"),
        ({"parts": []}, "names no part"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_manifest_is_one_error(stores: Path, changes: dict[str, object], message: str) -> None:
    lt_data.join(stores, _paths(stores))
    _edit(stores, **changes)
    with pytest.raises(DataError, match=message):
        TokenStore(stores)


def test_a_flipped_checksum_is_one_error(stores: Path) -> None:
    lt_data.join(stores, _paths(stores))
    values = json.loads((stores / "manifest.json").read_bytes()) | {"checksum": "0" * 64}
    (stores / "manifest.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match="checksum does not match"):
        TokenStore(stores)


def test_stores_that_do_not_fit_are_refused(stores: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    a = stores / "a"
    _prepare(texts[:9], tokenizer, stores / "no-eos", eos=False)
    _prepare(texts[:9], lt_data.Tokenizer.train(texts, vocab_size=290), stores / "other")
    for stores_to_join, message in (
        ([a, stores / "no-eos"], r"no-eos cannot be joined to .*a: eos \(True and False\)"),
        ([a, stores / "other"], r"other cannot be joined to .*: tokenizer \("),
        ([a, a], "named twice"),
        ([a, stores / "missing"], "missing"),
        ([], "give a list of stores"),
        (["s3://bucket/store"], "download it first"),
    ):
        with pytest.raises(DataError, match=message):
            lt_data.join(stores / "out", stores_to_join)
        assert not (stores / "out").exists()
    lt_data.join(stores / "out", [a])
    with pytest.raises(DataError, match="holds a store already"):
        lt_data.join(stores / "out", [a])


def test_duplicates_of_different_parts_are_not_called_dropped(
    tmp_path: Path, texts: list[str], tokenizer: Tokenizer
) -> None:
    selection = Selection(drop_duplicates=True, max_tokens=900)
    for name in "ab":
        _prepare(texts[:9], tokenizer, tmp_path / name, selection=selection)
    manifest = lt_data.join(tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert manifest.selection == replace(selection, drop_duplicates=False)
    found = lt_data.stats(TokenStore(tmp_path), duplicates=True).duplicates
    assert found is not None
    assert 2 * found.documents == manifest.documents


def test_documents_know_their_sources(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_indexed: bool
) -> None:
    for name, n in (("a", 3), ("b", 2)):
        (tmp_path / "text" / name).mkdir(parents=True)
        for i in range(n):
            lines = "".join(json.dumps({"text": f"{name} {i} {line}"}) + "\n" for line in range(4))
            (tmp_path / f"text/{name}/{i}.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        lt_data.prepare([f"text/{name}"], tokenizer=tokenizer, out=f"stores/{name}", shard_tokens=30)
    lt_data.join("stores", ["stores/b", "stores/a"])
    joined = TokenStore("stores")

    def sources(store: TokenStore) -> list[str]:
        return [str(store.document_source(i)) for i in range(store.n_documents)]

    expected = [
        f"text/{name}/{i}.jsonl:{line}" for name, n in (("b", 2), ("a", 3)) for i in range(n) for line in range(1, 5)
    ]
    assert sources(joined) == expected
    assert [file.path for file in joined.source_files] == [f"text/b/{i}.jsonl" for i in range(2)] + [
        f"text/a/{i}.jsonl" for i in range(3)
    ]
    assert lt_data.verify(joined) == []
    lt_data.split(joined, holdout="40%", train="train", validation="rest")
    assert sorted([*sources(TokenStore("train")), *sources(TokenStore("rest"))]) == sorted(expected)
    damaged = Path("stores/a/shards/00000.src")
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    assert lt_data.verify(joined) == ["stores/a/shards/00000.src: SHA-256 differs from the manifest"]


def test_unknown_text_bytes_stay_unknown(tmp_path: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    _prepare(texts[:9], tokenizer, tmp_path / "a")
    ids = [Document(ids=np.arange(5), source="ids")]
    lt_data.prepare(ids, tokenizer=tokenizer, out=tmp_path / "b", shard_tokens=2000, engine="hf")
    manifest = lt_data.join(tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert (manifest.text_bytes, manifest.read.text_bytes) == (0, 0)
    assert manifest.is_consistent


def test_the_command_joins(stores: Path) -> None:
    result = CliRunner().invoke(app, ["join", str(stores), *map(str, _paths(stores))], catch_exceptions=False)
    store = TokenStore(stores)
    assert result.exit_code == 0
    assert result.output.startswith(f"{store.n_documents} documents, {store.n_tokens} tokens")


def test_encoding_is_stable(stores: Path) -> None:
    lt_data.join(stores, _paths(stores))
    content = (stores / "manifest.json").read_bytes()
    assert JoinedManifest.from_dict(json.loads(content), "manifest.json").encode() == content
