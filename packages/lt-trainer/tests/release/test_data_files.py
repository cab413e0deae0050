"""Stores in a release: whole with their tokens where all sources allow it, and made again by the script's commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_data import Tokenizer, TokenStore, append, pack, prepare, split, verify
from lt_data.store.manifest import Selection
from lt_trainer.config.data_section import DataOptions, SourceOptions
from lt_trainer.release.bundle import hash_file
from lt_trainer.release.data_files import StoreToRelease, store_names
from lt_trainer.release.facts import StoreFacts
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile, ReleaseInfo, SourceLicense
from lt_trainer.release.script import store_commands

INFO = ReleaseInfo(name="tiny", producer="Lab")
OPEN = LicenseFile(release=INFO, sources=(SourceLicense(path="*", license="CC0-1.0", redistribute=True),))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder `text` of 41 documents, one of them twice, two with other suffixes, and a tokenizer."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(39):
        (folder / f"{i:02}.txt").write_text(" ".join(f"word{(i * j) % 17}" for j in range(3, 30 + i)))
    (folder / "39").write_text("a file without a suffix")
    (folder / "98.json").write_text('{"text": "a record"}\n')
    (folder / "99.txt").write_bytes((folder / "07.txt").read_bytes())
    Tokenizer.train((path.read_text() for path in sorted(folder.iterdir())), vocab_size=300).save(
        tmp_path / "tokenizer"
    )
    return tmp_path


def packed(out: Path, licenses: LicenseFile = OPEN, *, packing: Any = "bfd", hidden: str = "/x") -> StoreToRelease:
    """Pack a store; return what is released of it."""
    store = TokenStore(out)
    pack(store, mode=packing, seq_len=64)
    data = DataOptions(store=str(out), packing=packing, seq_len=64)
    return StoreToRelease(out.name, store, data, licenses, TextFilter(folders=[hidden]), ())


def test_stores_in_a_release_are_whole_and_made_again(texts: Path, tmp_path: Path) -> None:
    """Of selected documents, from sources; of two stores joined, and of a part of one, as copies."""
    files, tokenizer, bundle = sorted((texts / "text").iterdir()), texts / "tokenizer", tmp_path / "bundle"
    selection = Selection(min_characters=200, drop_duplicates=True)
    prepare(files, tokenizer=tokenizer, out=texts / "selected", bos=False, selection=selection, shard_tokens=300)
    prepare(files, tokenizer=tokenizer, out=texts / "whole")
    split(TokenStore(texts / "whole"), holdout="20%", train=texts / "part", validation=texts / "held")
    prepare(files[:30], tokenizer=tokenizer, out=texts / "joined")
    append(texts / "joined", files[30:])
    script, fingerprints = ["set -e", "mkdir -p data"], {}
    for name, packing in (("selected", "concat"), ("whole", "bfd"), ("part", "bfd"), ("joined", "bfd")):
        released = packed(texts / name, packing=packing, hidden=str(texts))
        released.write(bundle)
        folder = bundle / "data" / name
        store = TokenStore(folder)
        assert verify(store) == []
        assert store.manifest.fingerprint == released.store.manifest.fingerprint
        assert str(texts) not in (folder / "manifest.json").read_text()
        assert sum(entry.tokens or 0 for entry in released.entries) == store.n_tokens
        assert sum(entry.documents or 0 for entry in released.entries) == store.n_documents
        assert all(hash_file(bundle / entry.file) == entry.sha256 for entry in released.entries)
        (pack_file,) = folder.glob("packs/*/pack.json")
        manifest, header = (json.loads(path.read_text()) for path in (folder / "manifest.json", pack_file))
        made = SimpleNamespace(stores={name: SimpleNamespace(joined=released.is_joined)})
        facts: Any = SimpleNamespace(info=OPEN, release=made)
        lines = store_commands(facts, StoreFacts(name, manifest, header, True, released.entries))
        assert any("cp -R" in line for line in lines) == (name in ("part", "joined"))
        script += lines
        fingerprints[name] = (store.manifest.fingerprint, header["fingerprint"])
    variables = os.environ | {"release": str(bundle), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", "\n".join(script)], check=True, cwd=tmp_path, env=variables)
    for name, (tokens, rows) in fingerprints.items():
        assert TokenStore(tmp_path / "data" / name).manifest.fingerprint == tokens
        (pack_file,) = (tmp_path / "data" / name).glob("packs/*/pack.json")
        assert json.loads(pack_file.read_text())["fingerprint"] == rows


def test_one_source_that_may_not_be_redistributed_keeps_all_tokens_out(texts: Path, tmp_path: Path) -> None:
    """A source that has changed is left out, too, and named."""
    text, folder = texts / "text", tmp_path / "bundle" / "data" / "store"
    prepare(sorted(text.iterdir())[:30], tokenizer=texts / "tokenizer", out=texts / "store")
    (text / "03.txt").write_text("changed")
    closed = SourceLicense(path="*/05.txt", license="LicenseRef-closed", url="https://example.org")
    released = packed(texts / "store", LicenseFile(release=INFO, sources=(closed, *OPEN.sources)))
    released.write(tmp_path / "bundle")
    assert not (folder / "shards").exists()
    assert [path.name for path in folder.glob("packs/*/*")] == ["pack.json"]
    lost, kept = released.entries[3], released.entries[5]
    assert (lost.path, kept.path) == (f"{text}/03.txt", f"{text}/05.txt")
    assert lost.left_out == "no file with its hash was found where the release was made"
    assert kept.left_out == "nothing says that it may be redistributed"
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
