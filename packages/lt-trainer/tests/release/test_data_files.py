"""Stores in a release: whole with their tokens where all sources allow it, and made again by the script's commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_data import Selection, TokenStore, append, pack, prepare, split, train_bpe, verify
from lt_trainer.config.data_section import DataOptions, SourceOptions
from lt_trainer.release.bundle import hash_file
from lt_trainer.release.data_files import StoreToRelease, store_names
from lt_trainer.release.facts import StoreFacts
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile, ReleaseInfo, SourceLicense
from lt_trainer.release.script import store_commands

INFO = ReleaseInfo(name="tiny", producer="Lab")
OPEN = LicenseFile(release=INFO, sources=(SourceLicense(path="*", license="CC0-1.0", redistribute=True),))


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
    if kind == "split":
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


@pytest.mark.parametrize("kind", ["plain", "selected", "buckets", "appended", "split"])
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
    assert sum(entry.documents or 0 for entry in released.entries) == store.n_documents
    assert all(hash_file(bundle / entry.file) == entry.sha256 for entry in released.entries)
    (pack_file,) = folder.glob("packs/*/pack.json")
    manifest, header = (json.loads(path.read_text()) for path in (folder / "manifest.json", pack_file))
    facts: Any = SimpleNamespace(
        info=OPEN, release=SimpleNamespace(stores={"train": SimpleNamespace(joined=released.store.is_joined)})
    )
    script = store_commands(facts, StoreFacts("train", manifest, header, True, released.entries))
    assert any("cp -R" in line for line in script) == (kind in ("appended", "split"))
    variables = os.environ | {"release": str(bundle), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["set -e", "mkdir -p data", *script]
    subprocess.run(["bash", "-c", "\n".join(script)], check=True, cwd=tmp_path, env=variables)
    again = TokenStore.open(tmp_path / "data" / "train")
    assert again.manifest.fingerprint == store.manifest.fingerprint
    (again_file,) = (tmp_path / "data" / "train").glob("packs/*/pack.json")
    assert json.loads(again_file.read_text())["fingerprint"] == header["fingerprint"]


def test_one_source_that_may_not_be_redistributed_keeps_all_tokens_out(texts: Path, tmp_path: Path) -> None:
    """A source that has changed is left out, too, and named."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i:02}.txt").write_bytes((texts / "text" / f"{i:02}.txt").read_bytes())
    (tmp_path / "tokenizer").symlink_to(texts / "tokenizer")
    data = make_store("plain", tmp_path, tmp_path / "store")
    (text / "03.txt").write_text("changed")
    closed = SourceLicense(path="*/05.txt", license="LicenseRef-closed", url="https://example.org")
    released = describe(tmp_path / "store", data, LicenseFile(release=INFO, sources=(closed, *OPEN.sources)))
    released.write(tmp_path / "bundle")
    folder = tmp_path / "bundle" / "data" / "train"
    assert not (folder / "shards").exists()
    assert [path.name for path in folder.glob("packs/*/*")] == ["pack.json"]
    lost, kept = released.entries[3], released.entries[5]
    assert (lost.path, kept.path) == (f"{text}/03.txt", f"{text}/05.txt")
    assert (lost.left_out, kept.left_out) == (
        "no file with its hash was found where the release was made",
        "nothing says that it may be redistributed",
    )
    assert "LicenseRef-closed is not a license that counts as open" in kept.problem
    assert "and has no url" in lost.problem
    assert len(list((tmp_path / "bundle" / "sources").rglob("*.txt"))) == 28


def test_names_of_stores_follow_the_fields_of_the_recipe() -> None:
    data = DataOptions(mixture={"web": SourceOptions(store="a"), "code": SourceOptions(store="b")}, validation="v")
    assert store_names(data) == {
        "train-code": ("data.mixture.code.store", "b"),
        "train-web": ("data.mixture.web.store", "a"),
        "validation": ("data.validation", "v"),
    }
