"""Packs outside of the store: of a store that cannot be written, or by choice."""

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lt_data
from lt_data import DataError, TokenStore
from lt_data.cli import app


def test_packs_of_several_stores_share_a_folder(store: TokenStore, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    packs = tmp_path / "packs"
    opened = TokenStore(store.path, packs=packs)
    index = lt_data.pack(opened, seq_len=64)
    assert index.folder == packs / store.manifest.fingerprint[:16] / "bfd-64"
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before
    assert lt_data.open_pack(pickle.loads(pickle.dumps(opened)), seq_len=64).fingerprint == index.fingerprint
    assert [pack.name for pack in lt_data.stats(opened).packs] == ["bfd-64"]
    assert lt_data.stats(store).packs == ()
    array = index.folder / "start.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"\1")
    assert len(lt_data.verify(opened)) == 1
    with pytest.raises(DataError, match=f"no pack bfd-64; make it with: lt data pack {store.path} --seq-len 64"):
        lt_data.open_pack(store, seq_len=64)
    with pytest.raises(DataError, match=f"no pack bfd-32 in {packs}; .* --packs {packs}$"):
        lt_data.open_pack(opened, seq_len=32)


def test_a_pack_of_another_store_is_refused(store: TokenStore, tmp_path: Path) -> None:
    lt_data.split(store, holdout="50%", train=tmp_path / "train", validation=tmp_path / "rest")
    train, rest = (TokenStore(tmp_path / name, packs=tmp_path / "packs") for name in ("train", "rest"))
    folder = lt_data.pack(train, seq_len=64).folder
    assert folder is not None
    moved = rest.pack_folder("bfd-64")
    shutil.copytree(folder, moved)
    for make in (lt_data.open_pack, lt_data.pack):
        with pytest.raises(DataError, match=re.escape(f"{moved} belongs to another store")):
            make(rest, seq_len=64)


def test_a_store_that_cannot_be_written_names_the_remedy(store: TokenStore, tmp_path: Path) -> None:
    (store.path / "packs").touch()  # stops root too
    with pytest.raises(
        DataError,
        match=r"cannot create .*packs/.*: Not a directory; .*; or give another folder for packs \(--packs, in a",
    ):
        lt_data.pack(store, seq_len=64)
    lt_data.pack(TokenStore(store.path, packs=tmp_path / "packs"), seq_len=64)


@pytest.mark.skipif(os.geteuid() == 0, reason="as root: a test of permissions needs another user")
def test_a_read_only_store_names_the_remedy(store: TokenStore, tmp_path: Path) -> None:
    store.path.chmod(0o555)
    with pytest.raises(DataError, match=r"Permission denied; .*; or give another folder for packs"):
        lt_data.pack(store, seq_len=64)
    lt_data.pack(TokenStore(store.path, packs=tmp_path / "packs"), seq_len=64)


def test_a_folder_that_cannot_be_written_is_noticed_before_packing(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as on a read-only file system
    monkeypatch.setattr("lt_data.packing.packs.build_index", lambda *_, **__: pytest.fail("packed first"))
    with pytest.raises(DataError, match=r"not writable; check the permissions; or give another folder for packs"):
        lt_data.pack(store, seq_len=64)


def test_the_commands_take_the_folder(store: TokenStore, tmp_path: Path) -> None:
    packs = ["--packs", str(tmp_path / "packs")]
    for command, shown in (
        (["pack", str(store.path), "--seq-len", "64"], "rows of 64 tokens"),
        (["stats", str(store.path)], "bfd-64"),
        (["steps-per-epoch", str(store.path), "--global-batch-size", "8"], "steps"),
        (["inspect", str(store.path), "--row", "0"], "document"),
        (["verify", str(store.path)], "1 packs: verified"),
        (["report", str(store.path), "--out", str(tmp_path / "report.html")], "report.html"),
    ):
        result = CliRunner().invoke(app, [*command, *packs], catch_exceptions=False)
        assert result.exit_code == 0
        assert shown in result.output
    assert "bfd-64" in (tmp_path / "report.html").read_text(encoding="utf-8")
