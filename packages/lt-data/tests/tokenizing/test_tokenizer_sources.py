"""Tokenizers from folders, a hub and fsspec URLs."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from lt_data import DataError, Tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, tokenizer, monkeypatch) -> Path:
    """What the functions of huggingface_hub see: `org/tok`, whose list has the hashes of the trained tokenizer."""
    tokenizer.save(tmp_path / "cache")
    lists = []
    for name, content in {**tokenizer.files, "model.safetensors": b"not wanted"}.items():
        lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name == "tokenizer.json" else None
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lists.append(SimpleNamespace(rfilename=name, lfs=lfs, blob_id=blob))

    def model_info(_: object, repo: str, *, revision: str | None, files_metadata: bool) -> Any:
        if repo != "org/tok" or revision not in (None, "v1", COMMIT):
            raise OSError(f"404 for url https://hub/{repo}?signature=secret")
        return SimpleNamespace(sha=COMMIT, siblings=lists if files_metadata else [])

    def hf_hub_download(repo: str, name: str, *, revision: str | None) -> str:
        assert (repo, revision in (None, "v1", COMMIT)) == ("org/tok", True)
        return str(tmp_path / "cache" / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return tmp_path / "cache"


@pytest.mark.parametrize("address", ["org/tok", "hf://org/tok", "org/tok@v1", f"hf://org/tok@{COMMIT}"])
def test_from_the_hub(hub, tokenizer, address):
    loaded = Tokenizer.load(address)
    assert (loaded.files, loaded.name) == (tokenizer.files, f"org/tok@{COMMIT[:12]}")
    for file in hub.iterdir():
        content = file.read_bytes()
        file.write_bytes(content.replace(b'"', b"'", 1))
        with pytest.raises(DataError, match=rf"hf://org/tok@{COMMIT}: {file.name}: \d+ bytes that are not those of"):
            Tokenizer.load(address)
        file.write_bytes(content)


def test_what_the_hub_has_not(hub, tokenizer, monkeypatch):
    assert hub.is_dir()
    for address in ("org/other", "org/tok@v9", "hf://other"):
        with pytest.raises(
            DataError, match=r"cannot read hf://.*404 .*check the name, the network and, for a"
        ) as caught:
            Tokenizer.load(address)
        assert "secret" not in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"org/nothing: not in .* and HF_HUB_OFFLINE is set"):
        Tokenizer.load("org/nothing")
    found = {name: str(hub / name) for name in tokenizer.files}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name, **__: found.get(name))
    assert Tokenizer.load("org/tok").files == tokenizer.files


def test_a_folder_here_goes_before_the_hub(hub, tokenizer, tmp_path, monkeypatch):
    assert hub.is_dir()
    monkeypatch.chdir(tmp_path)
    tokenizer.save(tmp_path / "org/tok")
    assert Tokenizer.load("org/tok").name == "tok"
    (tmp_path / "org/empty").mkdir()
    (tmp_path / "org/empty/tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(DataError, match=r"no tokenizer at org/empty: .*there is a SentencePiece tokenizer\.model"):
        Tokenizer.load("org/empty")


def test_from_urls(tokenizer):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, content in {**tokenizer.files, "model.safetensors": b"x"}.items():
        memory.pipe_file(f"/tokenizers/deep/tok/{name}", content)
    try:
        for suffix in ("", "/", "/tokenizer.json"):
            loaded = Tokenizer.load(f"memory://tokenizers/deep/tok{suffix}")
            assert (loaded.files, loaded.name) == (tokenizer.files, "tok")
        with pytest.raises(DataError, match="no tokenizer at memory://tokenizers/deep"):
            Tokenizer.load("memory://tokenizers/deep")
    finally:
        memory.rm("/tokenizers", recursive=True)
    with pytest.raises(DataError, match=r"cannot read nosuch://x/y.*install the fsspec package for nosuch://"):
        Tokenizer.load("nosuch://x/y")


@pytest.mark.parametrize("folder", ["tok", "data/snapshots/tok", "models--org--name/snapshots/0123"])
def test_a_link_out_of_the_folder_publishes_nothing(tokenizer, tmp_path, folder):
    tokenizer.save(tmp_path / folder)
    secret = tmp_path / "data" / "credentials.json"
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("{}")
    (tmp_path / folder / "tokenizer_config.json").unlink()
    (tmp_path / folder / "tokenizer_config.json").symlink_to(secret)
    for source in (tmp_path / folder, tmp_path / folder / "tokenizer.json"):
        with pytest.raises(DataError, match=r"tokenizer_config\.json: a symbolic link leads out of"):
            Tokenizer.load(source)


def test_links_of_the_hubs_cache_and_a_named_file_are_followed(tokenizer, tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    tokenizer.save(blobs)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert Tokenizer.load(snapshot).files == tokenizer.files
    (tmp_path / "tokenizer.json").symlink_to(blobs / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").files["tokenizer.json"] == tokenizer.files["tokenizer.json"]
