"""Stores in a release: whole with their tokens where all sources allow it, and made again by the script's commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_data import Selection, TokenStore, append, merge, pack, prepare, split, train_bpe, verify
from lt_trainer.config.data_section import DataOptions, SourceOptions
from lt_trainer.release.bundle import hash_file
from lt_trainer.release.data_files import StoreToRelease, store_names
from lt_trainer.release.facts import StoreFacts
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile, SourceLicense
from lt_trainer.release.script import store_commands

OPEN = LicenseFile(sources=(SourceLicense(path="*", license="CC0-1.0", redistribute=True),))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `text` of 41 documents, one of them twice, two with other suffixes, and a tokenizer."""
    root = tmp_path_factory.mktemp("texts")
    (root / "text").mkdir()
    for i in range(39):
        (root / "text" / f"{i:02}.txt").write_text(" ".join(f"word{(i * j) % 17}" for j in range(3, 30 + i)))
    (root / "text" / "39").write_text("a file without a suffix")
    (root / "text" / "98.json").write_text('{"text": "a record"}\n')
    (root / "text" / "99.txt").write_bytes((root / "text" / "07.txt").read_bytes())
    documents = (path.read_text() for path in sorted((root / "text").iterdir()))
    train_bpe(documents, vocab_size=300).save(root / "tokenizer")
    return root


def make_store(kind: str, texts: Path, out: Path) -> DataOptions:
    """Make and pack a store; return the section of a recipe that names it."""
    files, tokenizer = sorted((texts / "text").iterdir()), texts / "tokenizer"
    if kind == "parts":
        for i in range(3):
            prepare(files, tokenizer=tokenizer, out=out, part_index=i, num_parts=3, shard_tokens=500)
        merge(out)
    elif kind == "split":
        prepare(files, tokenizer=tokenizer, out=out.with_name("whole"))
        split(TokenStore.open(out.with_name("whole")), holdout="20%", train=out, validation=out.with_name("held"))
    elif kind == "selected":
        selection = Selection(min_characters=200, drop_duplicates=True)
        prepare(files, tokenizer=tokenizer, out=out, bos=False, selection=selection, shard_tokens=300)
    else:
        prepare(files[:30], tokenizer=tokenizer, out=out)
        if kind == "appended":
            append(out, files[30:])
    packing = "buckets" if kind == "buckets" else "bfd"
    options = {"min_seq_len": 16} if kind == "buckets" else {}
    pack(TokenStore.open(out), seq_len=64, mode=packing, **options)
    return DataOptions(store=str(out), seq_len=64, packing=packing, **options)


def describe(out: Path, data: DataOptions, licenses: LicenseFile = OPEN, hidden: str = "/nowhere") -> StoreToRelease:
    return StoreToRelease("train", TokenStore.open(out), data, licenses, TextFilter(folders=[hidden]), ())


@pytest.mark.parametrize("kind", ["plain", "parts", "split", "selected", "buckets", "appended"])
def test_a_store_in_a_release_is_whole_and_made_again(kind: str, texts: Path, tmp_path: Path) -> None:
    data = make_store(kind, texts, tmp_path / "store")
    released = describe(tmp_path / "store", data, hidden=str(texts))
    bundle = tmp_path / "bundle"
    released.write(bundle)
    folder = bundle / "data" / "train"
    store = TokenStore.open(folder)
    assert verify(store) == []
    assert store.manifest.fingerprint == released.store.manifest.fingerprint
    assert str(texts) not in (folder / "manifest.json").read_text()
    assert sum(entry.tokens or 0 for entry in released.entries) == store.n_tokens
    assert all(hash_file(bundle / entry.file) == entry.sha256 for entry in released.entries)
    (pack_file,) = folder.glob("packs/*/pack.json")
    manifest, header = (json.loads(path.read_text()) for path in (folder / "manifest.json", pack_file))
    facts: Any = SimpleNamespace(
        info=OPEN, release=SimpleNamespace(stores={"train": SimpleNamespace(joined=released.store.is_joined)})
    )
    script = store_commands(facts, StoreFacts("train", manifest, header, True, released.entries))
    variables = os.environ | {"release": str(bundle), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["set -e", "mkdir -p data", *script]
    subprocess.run(["bash", "-c", "\n".join(script)], check=True, cwd=tmp_path, env=variables)
    again = TokenStore.open(tmp_path / "data" / "train")
    assert again.manifest.fingerprint == store.manifest.fingerprint
    (again_file,) = (tmp_path / "data" / "train").glob("packs/*/pack.json")
    assert json.loads(again_file.read_text())["fingerprint"] == header["fingerprint"]
    assert any("cp -R" in line for line in script) == (kind == "appended")


def test_one_source_that_may_not_be_redistributed_keeps_all_tokens_out(texts: Path, tmp_path: Path) -> None:
    data = make_store("plain", texts, tmp_path / "store")
    closed = SourceLicense(path="*/05.txt", license="LicenseRef-closed", url="https://example.org")
    released = describe(tmp_path / "store", data, LicenseFile(sources=(closed, *OPEN.sources)))
    released.write(tmp_path / "bundle")
    folder = tmp_path / "bundle" / "data" / "train"
    assert not (folder / "shards").exists()
    assert [path.name for path in folder.glob("packs/*/*")] == ["pack.json"]
    (entry,) = (entry for entry in released.entries if entry.path.endswith("05.txt"))
    assert entry.left_out == "its redistribution was not allowed"
    assert "LicenseRef-closed is not a license that counts as open" in entry.problem
    assert len(list((tmp_path / "bundle" / "sources").rglob("*.txt"))) == 29


def test_a_source_that_is_no_longer_there_is_left_out_and_named(texts: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i:02}.txt").write_bytes((texts / "text" / f"{i:02}.txt").read_bytes())
    (tmp_path / "tokenizer").symlink_to(texts / "tokenizer")
    data = make_store("plain", tmp_path, tmp_path / "store")
    (text / "03.txt").write_text("changed")
    missing = [entry for entry in describe(tmp_path / "store", data).entries if entry.left_out]
    assert [entry.path for entry in missing] == [str(text / "03.txt")]
    assert "has no url" in missing[0].problem


def test_names_of_stores_follow_the_fields_of_the_recipe() -> None:
    data = DataOptions(mixture={"web": SourceOptions(store="a"), "code": SourceOptions(store="b")}, validation="v")
    assert store_names(data) == {
        "train-code": ("data.mixture.code.store", "b"),
        "train-web": ("data.mixture.web.store", "a"),
        "validation": ("data.validation", "v"),
    }
