"""Models of a hub: what is fetched, found damaged and refused; what an upload sends and what it never does."""

import hashlib
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_ckpt import CheckpointError
from lt_ckpt.cli import app
from lt_ckpt.hf.folder import read_stored_arrays
from lt_ckpt.hub.address import Address
from lt_ckpt.hub.model import fetch_config, fetch_model
from lt_ckpt.hub.upload import upload_to_hub

TOKEN = "hf_aVerySecretToken"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
WANTED = sorted(["additional_chat_templates/tool_use.jinja", *SMALL, *SHARDS])
URL = "hf://org/name"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub to its httpx


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_needed_comes_once_and_nothing_else(hub, capfd):
    assert fetch_config(URL)[0] == {"model_type": "llama"}
    assert hub.fetched() == ["config.json"]
    told = []
    got = fetch_model(URL, progress=lambda *args: told.append(args))
    assert contents(got.path) == {name: hub.files[name] for name in WANTED}
    assert got.about == {"hub": "org/name", "asked": "hf://org/name@main", "revision": hub.commit}
    total = sum(len(hub.files[name]) for name in WANTED)
    assert told[-1] == (total, total, "bytes")
    assert hub.fetched() == WANTED
    assert fetch_model(f"{URL}@{hub.commit}").path == got.path
    assert fetch_model(f"{URL}@refs/pr/1").path == got.path
    assert hub.fetched() == WANTED
    assert capfd.readouterr() == ("", ""), "the library's bars are of a terminal"


def test_a_folder_of_a_repository_and_another_cache(hub, tmp_path):
    hub.files = {f"sub/folder/{name}": data for name, data in hub.files.items()} | {"config.json": b"another"}
    got = fetch_model(f"{URL}/sub/folder", cache=tmp_path / "own")
    assert got.path.is_relative_to(tmp_path / "own")
    assert contents(got.path) == {name: hub.files[f"sub/folder/{name}"] for name in WANTED}


def test_a_repository_with_two_models_is_refused(hub):
    hub.files["model.safetensors"] = b"other weights"
    folder = fetch_model(URL).path
    with pytest.raises(CheckpointError, match=r"has model\.safetensors, which transformers reads, and model\.safe"):
        read_stored_arrays(folder)


def test_weights_of_one_file_and_those_that_are_missing(hub):
    hub.files["model.safetensors"] = hub.files.pop(SHARDS[0])
    with pytest.raises(CheckpointError, match=rf"names '{SHARDS[0]}', which the repository does not have"):
        fetch_model(URL)
    hub.commit = "1" * 40
    del hub.files["model.safetensors.index.json"]
    assert "model.safetensors" in contents(fetch_model(URL).path)
    hub.commit = "2" * 40
    del hub.files["model.safetensors"]
    assert contents(fetch_model(URL).path)["pytorch_model.bin"] == b"a pickle"
    hub.commit = "3" * 40
    del hub.files["pytorch_model.bin"]
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model.bin"):
        fetch_model(URL)
    hub.commit = "4" * 40
    del hub.files["config.json"]
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        fetch_model(URL)


@pytest.mark.parametrize("name", [SHARDS[1], "config.json"])
@pytest.mark.parametrize("offline", [False, True])
def test_a_flipped_byte_is_found(hub, name, offline, tmp_path, monkeypatch):
    hub.served[name] = hub.files[name][:-1] + b"!"  # on its way
    with pytest.raises(CheckpointError, match=rf"{name}: is not what the hub has"):
        fetch_model(URL, cache=tmp_path / "other")
    del hub.served[name]
    path = fetch_model(URL).path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError, match=rf"{name}: is not what the hub has"):
        fetch_model(URL)
    if name == "config.json":
        with pytest.raises(CheckpointError, match="is not what the hub has"):
            fetch_config(URL)


def test_offline_is_what_the_cache_has(hub, monkeypatch):
    offline = pytest.MonkeyPatch()
    with offline.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match=r"is not in the cache .* HF_HUB_OFFLINE is set"):
            fetch_model(URL)
    got = fetch_model(URL)
    hub.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for url in (URL, f"{URL}@{hub.commit}"):
        assert fetch_model(url).path == got.path
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        upload_to_hub(got.path, URL)
    assert hub.log == []


@pytest.mark.parametrize(
    ("url", "refuses", "message"),
    [
        (URL, {"/resolve/": (403, "GatedRepo")}, "the model is gated: open its page, log in .* set HF_TOKEN"),
        ("hf://org/other", {}, "there is no such model, or it is private: check its name, or set HF_TOKEN"),
        (f"{URL}@v9", {}, "no such branch, tag or commit"),
        (URL, {"/revision/": (403, "")}, "answered 403 .*said of"),
    ],
)
def test_each_refusal_is_one_line(hub, url, refuses, message, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuses = refuses
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch_model(url)
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_endpoint_that_is_away_and_a_library_that_is_missing(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"is not in the cache .*the hub does not answer"):
        fetch_model(URL)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'lt-ckpt\[hub\]'"):
        fetch_model(URL)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/name", ("org/name", "main", "")),
        ("hf://org/name/sub", ("org/name", "main", "sub")),
        ("hf://o.r-g/n_1@feature%2Fx/a/b", ("o.r-g/n_1", "feature/x", "a/b")),
        ("hf://org/name@refs/convert/x", ("org/name", "refs/convert/x", "")),
        *[(f"hf://{wrong}", None) for wrong in ("org", "org/name@", "org/name/", "../name", "org/..", "org/a--b")],
        *[(f"hf://org/name{wrong}", None) for wrong in ("/../x", "@main/../x", "@a%0Ab", "\n", "//x", "/.git")],
    ],
)
def test_addresses(url, expected):
    if expected is None:
        with pytest.raises(CheckpointError, match="must be hf://org/name"):
            Address.parse(url)
        return
    found = Address.parse(url)
    assert (found.repo, found.revision, found.subfolder) == expected


@pytest.fixture
def folder(tmp_path, hub, monkeypatch):
    """The files of a model, in a folder, and a hub that has an empty repository and knows the token."""
    made = tmp_path / "export"
    for name in WANTED:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(hub.files[name])
    hub.files = {}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


@pytest.mark.parametrize("public", [False, True])
def test_a_new_repository_has_the_folder_and_is_private_unless_asked(hub, folder, public):
    hub.exists = False
    report = upload_to_hub(folder, URL, public=public)
    assert hub.files == contents(folder)
    assert hub.is_private is not public
    assert (report.commit, list(report.uploaded), report.skipped) == (hub.commit, WANTED, ())
    assert report.n_bytes == sum(map(len, hub.files.values()))
    assert contents(fetch_model(URL).path) == contents(folder)
    hub.log.clear()
    again = upload_to_hub(folder, URL)
    assert (again.uploaded, again.commit) == ((), "")
    assert not [path for _, path in hub.log if "/upload/" in path or "/commit/" in path]


def test_others_are_replaced_on_request_alone(hub, folder):
    upload_to_hub(folder, URL)
    hub.files["other.txt"] = b"stays"
    (folder / "config.json").write_bytes(b"{}\n")
    before = dict(hub.files)
    with pytest.raises(CheckpointError, match=r"'config\.json' with other content .1 such files.; .*--overwrite"):
        upload_to_hub(folder, URL)
    assert hub.files == before
    assert upload_to_hub(folder, URL, overwrite=True).uploaded == ("config.json",)
    assert hub.files == {**contents(folder), "other.txt": b"stays"}


def test_a_folder_of_the_repository(hub, folder):
    run = CliRunner().invoke(app, ["upload", str(folder), f"{URL}@main/step-100"])
    assert run.exit_code == 0, run.output
    assert hub.files == {f"step-100/{name}": data for name, data in contents(folder).items()}
    assert f"commit {hub.commit}, verified" in run.output


def test_a_damaged_folder_and_a_link_out_of_it_are_not_sent(hub, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    (folder / "notes.txt").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"notes\.txt: is a link to .*outside"):
        upload_to_hub(folder, URL)
    (folder / "notes.txt").unlink()
    (folder / "notes").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="notes: neither a file nor a folder"):
        upload_to_hub(folder, URL)
    (folder / "notes").unlink()
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in contents(folder).items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    data = bytearray((folder / SHARDS[0]).read_bytes())
    data[-1] ^= 1
    (folder / SHARDS[0]).write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA256SUMS"):
        upload_to_hub(folder, URL)
    assert not hub.log


def test_other_bytes_at_the_hub_afterwards_are_found(hub, folder):
    hub.damage = lambda data: data[:-1] + b"?"
    with pytest.raises(CheckpointError, match="is not there as it is in the folder"):
        upload_to_hub(folder, URL)


def test_what_an_upload_is_refused(hub, folder, monkeypatch):
    with pytest.raises(CheckpointError, match="no such branch"):
        upload_to_hub(folder, f"{URL}@other")
    hub.refuses = {"/commit/": (412, "")}
    with pytest.raises(CheckpointError, match="answered 412"):
        upload_to_hub(folder, URL)
    assert hub.files == {}
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(CheckpointError, match=r"answered 401 .*: set HF_TOKEN") as caught:
        upload_to_hub(folder, URL)
    assert "hf_old" not in str(caught.value)
    os.environ.pop("HF_TOKEN")
    with pytest.raises(CheckpointError, match="there is no token: set HF_TOKEN"):
        upload_to_hub(folder, URL)
