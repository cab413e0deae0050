"""Uploads to a hub: what is sent, once; what is never sent; and what a broken line, a refusal or damage leaves."""

import hashlib
import sys

import pytest
from typer.testing import CliRunner

from lt_ckpt import CheckpointError, fetch_model
from lt_ckpt.cli import app
from lt_ckpt.hub.upload import upload_to_hub

TOKEN = "hf_aVerySecretToken"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub to its httpx


@pytest.fixture
def folder(tmp_path, hub, model, monkeypatch):
    """The files of a model, in a folder, and a hub that has an empty repository and knows the token."""
    made = tmp_path / "export"
    made.mkdir()
    for name in model.wanted:
        (made / name).write_bytes(hub.files[name])
    (made / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n", encoding="utf-8")
    hub.files, hub.large, hub.tokens = {}, set(), {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changes(hub):
    """Requests that change something."""
    return [request for request in hub.log if "/upload/" in request.path or "/commit/" in request.path]


def test_a_new_repository_is_private_and_has_the_folder(hub, folder, tmp_path):
    hub.exists = False
    told = []
    report = upload_to_hub(folder, "hf://org/name", progress=lambda *at: told.append(at))
    assert hub.files == contents(folder)
    assert hub.is_private is True
    assert (report.makes_repository, report.commit, report.skipped) == (True, hub.commit, ())
    assert sorted(report.uploaded) == sorted(contents(folder))
    assert report.n_bytes == sum(map(len, contents(folder).values())) == told[-1][0] == told[-1][1]
    assert len(hub.commits) == 1, "one commit, or none"
    got = fetch_model("hf://org/name")
    assert all((got.path / name).read_bytes() == data for name, data in contents(folder).items() if name != "README.md")


def test_public_is_asked_for(hub, folder):
    hub.exists = False
    upload_to_hub(folder, "hf://org/name", public=True)
    assert hub.is_private is False


def test_the_second_time_nothing_is_sent(hub, folder):
    upload_to_hub(folder, "hf://org/name")
    hub.log.clear()
    report = upload_to_hub(folder, "hf://org/name")
    assert (report.uploaded, report.n_bytes, report.commit) == ((), 0, "")
    assert not changes(hub)


def test_others_are_replaced_on_request_alone(hub, folder):
    upload_to_hub(folder, "hf://org/name")
    hub.files["other.txt"] = b"stays"
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes() + b"\n")
    hub.log.clear()
    with pytest.raises(CheckpointError, match=r"'config\.json' with other content .1 such files.; .*--overwrite"):
        upload_to_hub(folder, "hf://org/name")
    assert not changes(hub)
    report = upload_to_hub(folder, "hf://org/name", overwrite=True)
    assert report.uploaded == ("config.json",)
    assert hub.files == {**contents(folder), "other.txt": b"stays"}


@pytest.mark.parametrize("exists", [True, False])
def test_a_dry_run_changes_nothing(hub, folder, exists):
    hub.exists = exists
    run = CliRunner().invoke(app, ["upload", str(folder), "hf://org/name", "--dry-run"])
    assert run.exit_code == 0, run.output
    assert "would send config.json" in run.output
    assert ("would make the private repository org/name" in run.output) is not exists
    assert {request.path.partition("?")[0] for request in hub.log} == {"/api/models/org/name/revision/main"}
    assert (hub.files, hub.exists) == ({}, exists)


def test_a_folder_of_the_repository(hub, folder):
    run = CliRunner().invoke(app, ["upload", str(folder), "hf://org/name@main/step-100"])
    assert run.exit_code == 0, run.output
    assert hub.files == {f"step-100/{name}": data for name, data in contents(folder).items()}
    assert f"commit {hub.commit}, verified" in run.output


def weight(folder):
    return next(path for path in folder.iterdir() if path.suffix == ".safetensors")


@pytest.mark.parametrize(
    "statuses",
    [
        {"PUT": [(500, {}), (503, {})]},
        {"PUT": [(0, {})]},
        {"POST:main": [(503, {})]},
        {"POST:batch": [(500, {}), (429, {})]},
    ],
)
def test_what_may_pass_is_tried_again(hub, folder, statuses):
    hub.statuses = {name: list(planned) for name, planned in statuses.items()}
    upload_to_hub(folder, "hf://org/name")
    assert hub.files == contents(folder)
    assert not any(hub.statuses.values())


def test_a_second_call_sends_what_the_first_did_not(hub, folder):
    """The objects of a first call that failed at its commit are there."""
    commit = "/api/models/org/name/commit/main"

    def refuse(request):
        if request.path == commit:
            hub.statuses["POST"] = [(403, {"X-Error-Message": "not now"})]

    hub.before = refuse
    with pytest.raises(CheckpointError, match="403"):
        upload_to_hub(folder, "hf://org/name")
    assert hub.files == {}
    hub.before = lambda request: None
    hub.statuses.clear()
    sent = len([r for r in hub.log if "/upload/" in r.path])
    upload_to_hub(folder, "hf://org/name")
    assert len([r for r in hub.log if "/upload/" in r.path]) == sent, "the weights were there already"
    assert hub.files == contents(folder)


def test_the_token_goes_to_the_hub_alone(hub, folder, monkeypatch):
    upload_to_hub(folder, "hf://org/name")
    told = {(r.server, r.headers.get("authorization")) for r in hub.log}
    assert told == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}
    hub.log.clear()
    for endpoint, reason in (("http://example.com", "no token is sent unencrypted"), (hub.endpoint, "takes a token")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        if endpoint == hub.endpoint:
            monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(CheckpointError, match=reason):
            upload_to_hub(folder, "hf://org/name")
    assert not hub.log


def test_a_damaged_folder_is_not_sent(hub, folder):
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in contents(folder).items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    content = bytearray(weight(folder).read_bytes())
    content[-1] ^= 1
    weight(folder).write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="SHA-256 differs from SHA256SUMS"):
        upload_to_hub(folder, "hf://org/name")
    weight(folder).unlink()
    with pytest.raises(CheckpointError, match="is missing, SHA256SUMS lists it"):
        upload_to_hub(folder, "hf://org/name")
    assert not hub.log


def test_other_bytes_at_the_hub_are_found(hub, folder):
    hub.damage = lambda data: data[:-1] + b"?"
    with pytest.raises(CheckpointError, match=r"safetensors' is not there as it is in the folder"):
        upload_to_hub(folder, "hf://org/name")


def test_a_file_that_the_repository_ignores_is_found(hub, folder):
    hub.ignored = {"config.json"}
    with pytest.raises(CheckpointError, match=r"'config\.json' is not there .*\.gitignore"):
        upload_to_hub(folder, "hf://org/name")


def test_a_commit_of_others_meanwhile_is_not_overwritten(hub, folder):
    def commit(request):
        if request.path.endswith("/preupload/main"):
            hub.commit = "f" * 40

    hub.before = commit
    with pytest.raises(CheckpointError, match="412"):
        upload_to_hub(folder, "hf://org/name")
    assert hub.files == {}


def test_what_cannot_be_asked_for(hub, folder, tmp_path, monkeypatch):
    wrong = {
        "hf://org": "must be hf://org/name",
        f"hf://org/name@{'a' * 40}": "a commit cannot be changed",
        "hf://org/name@other": "no such branch",
    }
    for url, message in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            upload_to_hub(folder, url)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="contains no file"):
        upload_to_hub(tmp_path / "empty", "hf://org/name")
    hub.tokens = set()
    with pytest.raises(CheckpointError, match="does not know the token given"):
        upload_to_hub(folder, "hf://org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        upload_to_hub(folder, "hf://org/name")
    run = CliRunner().invoke(app, ["upload", str(folder), "s3://bucket/name", "--public"])
    assert isinstance(run.exception, CheckpointError)
    assert not changes(hub)


def test_without_the_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "lt_ckpt.hub.upload", raising=False)
    run = CliRunner().invoke(app, ["upload", str(folder), "hf://org/name"])
    assert 'pip install "lt-ckpt[hub]"' in str(run.exception)
