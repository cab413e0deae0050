"""A model of a hub: what is fetched, who is told the token, what each refusal says."""

import json
import os
import stat
import sys

import numpy as np
import pytest

from lt_ckpt import CheckpointError, HFFolder, load_model_config
from lt_ckpt.hub.model import Address, cache_folder, fetch_model

TOKEN = "hf_aVerySecretToken"


def test_what_is_needed_comes_whole_and_nothing_else(hub, model, tmp_path):
    told = []
    got = fetch_model("hf://org/name", progress=lambda *args: told.append(args))
    assert got.commit == hub.commit
    assert (
        got.path
        == tmp_path / "cache" / "lt" / "hub" / "org--name" / hub.commit
        == cache_folder() / "org--name" / got.commit
    )
    assert got.about == {"hub": "org/name", "asked": "hf://org/name@main", "revision": hub.commit}
    assert sorted(name for name in os.listdir(got.path) if not name.startswith(".")) == model.wanted
    for name in model.wanted:
        assert (got.path / name).read_bytes() == hub.files[name]
    opened = HFFolder.open(got.path)
    for members in model.arrays.values():
        for key, array in members.items():
            assert opened.read(key).tobytes() == array.tobytes()
    total = sum(len(hub.files[name]) for name in model.wanted)
    assert told[-1] == (total, total, "bytes")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    asked = [request.file for request in hub.requests(server="hub")]
    assert sorted(asked) == sorted([*model.wanted, "main"]), "each file is asked for once"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((got.path / model.one).stat().st_mode) == 0o666 & ~umask


def test_the_progress_bars_of_the_library_are_off_meanwhile(hub, model, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    from lt_ckpt.hub import client

    seen, real = [], client.http_get

    def http_get(*args, **options):
        seen.append(are_progress_bars_disabled("huggingface_hub.http_get"))
        real(*args, **options)

    monkeypatch.setattr(client, "http_get", http_get)
    before = are_progress_bars_disabled("huggingface_hub.http_get")
    fetch_model("hf://org/name")
    assert set(seen) == {True}
    assert are_progress_bars_disabled("huggingface_hub.http_get") is before


def test_a_commit_that_is_here_costs_no_request(hub, model, monkeypatch):
    got = fetch_model("hf://org/name@main")
    hub.log.clear()
    assert fetch_model(f"hf://org/name@{hub.commit}").path == got.path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model(f"hf://org/name@{hub.commit}").path == got.path
    with pytest.raises(CheckpointError, match=f"HF_HUB_OFFLINE is set.* instead of main: {hub.commit}"):
        fetch_model("hf://org/name")
    assert hub.log == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch_model("hf://org/name")
    assert [request.file for request in hub.log] == ["main"], "a branch is looked up, nothing is fetched"
    (got.path / model.two).unlink()
    hub.log.clear()
    fetch_model(f"hf://org/name@{hub.commit}")
    assert [request.file for request in hub.requests(server="cdn")] == [model.two]
    assert (got.path / model.two).read_bytes() == hub.files[model.two]


def test_a_folder_of_a_repository_and_a_pull_request(hub, model, tmp_path):
    hub.files = {f"sub/folder/{name}": data for name, data in hub.files.items()} | {"config.json": b"another"}
    hub.large = {f"sub/folder/{name}" for name in hub.large}
    got = fetch_model("hf://org/name@refs/pr/1/sub/folder", cache=tmp_path / "own")
    assert got.path == tmp_path / "own" / "org--name" / hub.commit / "sub" / "folder"
    assert (got.path / "config.json").read_bytes() == b'{"model_type": "llama"}'
    HFFolder.open(got.path)
    assert hub.log[0].path == "/api/models/org/name/revision/refs%2Fpr%2F1?blobs=true"


def test_one_file_without_index(hub, model):
    hub.files["model.safetensors"] = hub.files.pop(model.one)
    del hub.files["model.safetensors.index.json"]
    hub.large = {"model.safetensors"}
    got = fetch_model("hf://org/name")
    assert not (got.path / model.two).exists(), "no index names it"
    assert HFFolder.open(got.path).read("a").tobytes() == model.arrays[model.one]["a"].tobytes()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/name", ("org/name", "main", "")),
        ("hf://org/name@v1.0", ("org/name", "v1.0", "")),
        ("hf://org/name/sub", ("org/name", "main", "sub")),
        ("hf://o.r-g/n_1@feature%2Fx/a/b", ("o.r-g/n_1", "feature/x", "a/b")),
        ("hf://org/name@refs/convert/x", ("org/name", "refs/convert/x", "")),
    ],
)
def test_addresses(url, expected):
    found = Address.parse(url)
    assert (found.repo, found.revision, found.subfolder) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("hf://org", "org/name", "hf://org/name@", "hf://org/name/", "hf://../name", "hf://org/..", "hf://org/a--b"),
        *("hf://org/name/../x", "hf://org/name@main/../x", "hf://org/name@a%0Ab", "hf://org/na\nme", "hf://-o/name"),
        *("hf://org/name//x", "hf://org/name@main//x", "hf://org/name/.git"),
    ],
)
def test_addresses_that_are_none(url):
    with pytest.raises(CheckpointError, match="must be hf://org/name"):
        Address.parse(url)


def test_the_token_goes_to_the_hub_and_not_to_the_cdn(hub, model, monkeypatch):
    hub.tokens, hub.private = {TOKEN}, True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch_model("hf://org/name")
    at_hub, at_cdn = hub.requests(server="hub"), hub.requests(server="cdn")
    assert {request.headers.get("authorization") for request in at_hub} == {f"Bearer {TOKEN}"}
    assert len(at_cdn) == 2
    assert not any(TOKEN in str(request) for request in at_cdn)


def test_the_same_host_at_another_port_is_another_host(hub, model, monkeypatch):
    hub.tokens = {TOKEN}
    hub.location = f"http://127.0.0.1:{hub.cdn_port}/blobs/{model.one}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CheckpointError):  # the other shard comes with the bytes of the first one
        fetch_model("hf://org/name")
    assert hub.requests(server="cdn")
    assert not any(TOKEN in str(request) for request in hub.requests(server="cdn"))


def test_a_redirect_within_the_hub_keeps_the_token(hub, model, monkeypatch):
    hub.tokens, hub.private = {TOKEN}, True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.statuses["main"] = [(307, {"Location": f"/api/models/org/name/revision/{hub.commit}?blobs=true"})]
    assert fetch_model("hf://org/name").commit == hub.commit
    assert [request.headers.get("authorization") for request in hub.log[:2]] == [f"Bearer {TOKEN}"] * 2


def test_the_token_of_a_login(hub, model, tmp_path, monkeypatch):
    hub.tokens, hub.private = {TOKEN}, True
    (tmp_path / "hf-home").mkdir()
    (tmp_path / "hf-home/token").write_text(f"{TOKEN}\n", encoding="utf-8")
    fetch_model("hf://org/name")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    with pytest.raises(CheckpointError, match=r"it needs a token.*HF_HUB_DISABLE_IMPLICIT_TOKEN is set"):
        fetch_model("hf://org/name", cache=tmp_path / "other")


def test_a_token_that_cannot_be_had(hub, tmp_path, monkeypatch):
    (tmp_path / "hf-home/token").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"hf-home/token or HF_OIDC_RESOURCE: no token can be had \(IsADirectory"):
        fetch_model("hf://org/name")
    from huggingface_hub import errors

    if hasattr(errors, "OIDCError"):  # from 2.0 on
        monkeypatch.setenv("HF_OIDC_RESOURCE", "org/name")
        with pytest.raises(CheckpointError, match=r"no token can be had \(OIDCError"):
            fetch_model("hf://org/name")
    assert hub.log == []


@pytest.mark.parametrize("text", ["se cret", "sécret"])
def test_a_token_that_can_be_none_is_refused_without_being_shown(hub, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", text)
    with pytest.raises(CheckpointError, match="cannot be a token") as caught:
        fetch_model("hf://org/name")
    assert "cret" not in str(caught.value)
    assert hub.log == []


@pytest.mark.parametrize(
    ("endpoint", "proxies", "sent"),
    [
        ("https://hub.example", {"https_proxy": "http://proxy.example"}, True),
        ("http://hub.example", {}, False),
        ("http://localhost:1", {}, True),
        ("http://[::1]:1", {}, True),
        ("http://localhost.example", {}, False),
        ("http://127.0.0.1.example", {}, False),
        ("http://localhost:1", {"http_proxy": "http://proxy.example"}, False),
        ("http://localhost:1", {"all_proxy": "http://proxy.example"}, False),
        ("http://localhost:1", {"http_proxy": "http://proxy.example", "no_proxy": "127.0.0.1"}, False),
        ("http://localhost:1", {"http_proxy": "http://proxy.example", "no_proxy": "x, LOCALHOST"}, True),
        ("http://127.0.0.1:1", {"http_proxy": "http://proxy.example", "no_proxy": "*"}, True),
    ],
)
def test_a_token_is_sent_unencrypted_to_this_machine_only(hub, endpoint, proxies, sent, monkeypatch):
    from lt_ckpt.hub.client import Hub

    for name, value in {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "no_proxy": "", "NO_PROXY": "", **proxies}.items():
        monkeypatch.setenv(name, value)
    found = Hub.from_environment()
    assert (found.token is not None, found.withheld == "") == (sent, sent)
    assert TOKEN not in repr(found)


@pytest.mark.parametrize("endpoint", ["http://hub.example", "http://localhost:1"])
def test_a_proxy_is_used_and_not_told_the_token(hub, monkeypatch, endpoint):
    hub.private = True
    monkeypatch.setenv("http_proxy", hub.endpoint)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    hub.renew_session()
    with pytest.raises(CheckpointError, match=r"no token is sent (unencrypted|to a proxy)") as caught:
        fetch_model("hf://org/name")
    assert TOKEN not in str(caught.value)
    assert [request.path for request in hub.log] == [f"{endpoint}/api/models/org/name/revision/main?blobs=true"]
    assert TOKEN not in str(hub.log)


def test_without_the_library_the_error_names_the_extra(hub, model, monkeypatch):
    got = fetch_model("hf://org/name")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        patch.delitem(sys.modules, "lt_ckpt.hub.client")
        with pytest.raises(CheckpointError, match=r"huggingface_hub is not installed: pip install 'lt-ckpt\[hub\]'"):
            fetch_model("hf://org/name")
        assert fetch_model(f"hf://org/name@{hub.commit}").path == got.path, "what is here needs no library"


def test_a_gated_model_says_what_to_accept_and_where(hub, model, monkeypatch):
    hub.tokens, hub.gated_for = {TOKEN}, set()
    with pytest.raises(CheckpointError) as caught:
        fetch_model("hf://org/name")
    message = str(caught.value)
    assert f"gated and no token was sent; open {hub.endpoint}/org/name, log in, accept its conditions" in message
    assert "set HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CheckpointError) as caught:
        fetch_model("hf://org/name")
    message = str(caught.value)
    assert "the account of the token given has no access" in message
    assert f"open {hub.endpoint}/org/name with that account and accept its conditions" in message
    assert TOKEN not in message
    assert [request.status for request in hub.requests("config.json")] == [401, 403], "asked once each"
    hub.gated_for.add(TOKEN)
    HFFolder.open(fetch_model("hf://org/name").path)


def test_what_is_not_there_or_not_allowed(hub, model, monkeypatch):
    cases = [
        (
            "hf://org/other",
            "no such model at http://127.0.0.1:.* it needs a token; check its name, or set HF_TOKEN",
        ),
        ("hf://org/name@v9", "the repository has no such revision; those that it has: http://127.0.0.1:.*/org/name"),
        (f"hf://org/name@{'f' * 40}", "no such revision"),
        ("hf://org/name/sub", "there is no sub/config.json"),
    ]
    for url, message in cases:
        with pytest.raises(CheckpointError, match=message):
            fetch_model(url)
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CheckpointError, match="the account of the token given may not see it"):
        fetch_model("hf://org/other")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(CheckpointError, match="the hub does not know the token given") as caught:
        fetch_model("hf://org/name")
    assert "hf_old" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = f"\x1b[31menable access for {TOKEN}"
    hub.statuses["main"] = [(403, {"X-Error-Message": said})]
    with pytest.raises(CheckpointError, match=r"answered 403 to the token given \('\[31menable access for \.\.\.'\)"):
        fetch_model("hf://org/name")
    del hub.files[model.one], hub.files[model.two], hub.files["model.safetensors.index.json"]
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .* only 'pytorch_model.bin'"):
        fetch_model("hf://org/name")


@pytest.mark.parametrize(
    "endpoint",
    ["https://user:pw@hub.example", "ftp://hub.example", "hub.example", "https://", "http://a:b", "https://a b"],
)
def test_an_endpoint_that_is_none(hub, endpoint, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(CheckpointError, match="HF_ENDPOINT") as caught:
        fetch_model("hf://org/name")
    assert "pw" not in str(caught.value)


def test_an_endpoint_that_is_no_hub(hub, model, monkeypatch):
    from lt_ckpt.hub import client

    for listing, message in (
        ([], "does not answer as a hub does"),
        ({"siblings": []}, "names no commit"),
        ({"sha": "../../x", "siblings": []}, "names no commit"),
        ({"sha": "f" * 40}, "siblings"),
        ({"sha": "f" * 40, "siblings": [1]}, "an entry without a name"),
        ({"sha": "f" * 40, "siblings": [{"rfilename": "config.json", "size": "5"}]}, "no size or no hash"),
        ({"sha": "f" * 40, "siblings": [{"rfilename": "config.json", "size": 5, "lfs": [1]}]}, "no size or no hash"),
        (
            {"sha": "f" * 40, "siblings": [{"rfilename": "config.json", "size": 10**11, "blobId": "f" * 40}]},
            "by hf-xet",
        ),
    ):
        hub.edit_list = lambda _, listing=listing: listing
        with pytest.raises(CheckpointError, match=message):
            fetch_model("hf://org/name")
    with pytest.raises(CheckpointError, match="answers for another commit"):
        fetch_model(f"hf://org/name@{hub.commit}")
    hub.edit_list = lambda listing: listing
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="an answer of more than 1000 bytes"):
        fetch_model("hf://org/name")
    monkeypatch.setattr(json, "dumps", lambda _: "[" * 100_000)
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 10**6)
    with pytest.raises(CheckpointError, match="does not answer as a hub does"):
        fetch_model("hf://org/name")


def test_the_hub_of_these_tests_is_one_to_others_too(hub, model, tmp_path):
    """What stands in for the hub answers Hugging Face's own client as the hub does, down to refusals."""
    theirs = pytest.importorskip("huggingface_hub")
    api = theirs.HfApi(endpoint=hub.endpoint, token=False)
    info = api.model_info("org/name", revision="main", files_metadata=True)
    assert info.sha == hub.commit
    assert {file.rfilename: file.size for file in info.siblings} == {n: len(data) for n, data in hub.files.items()}
    assert {file.rfilename for file in info.siblings if file.lfs} == hub.large
    for name in ("config.json", model.one):
        path = api.hf_hub_download("org/name", name, revision=hub.commit, local_dir=tmp_path / "theirs")
        assert (tmp_path / "theirs" / name).read_bytes() == hub.files[name], path
    with pytest.raises(theirs.errors.RevisionNotFoundError):
        api.model_info("org/name", revision="v9")
    with pytest.raises(theirs.errors.RepositoryNotFoundError):
        api.model_info("org/other")
    hub.gated_for = set()
    with pytest.raises(theirs.errors.GatedRepoError):
        api.get_hf_file_metadata(url=f"{hub.endpoint}/org/name/resolve/{hub.commit}/config.json")


def test_the_model_that_the_readers_open_is_the_one_that_was_sent(hub, model):
    got = HFFolder.open(fetch_model("hf://org/name").path)
    assert np.frombuffer(got.read("b"), "<f8").reshape(200, 500)[3, 4] == model.arrays[model.two]["b"][3, 4]


def test_the_configuration_alone(hub, model, monkeypatch):
    """What a plan needs of a model of 140 GB is one small file; the weights come later, and it is not fetched twice."""
    assert load_model_config("hf://org/name") == {"model_type": "llama"}
    assert sorted(request.file for request in hub.log) == ["config.json", "main"]
    hub.log.clear()
    assert load_model_config(f"hf://org/name@{hub.commit}") == {"model_type": "llama"}
    assert [request.file for request in hub.log] == [hub.commit], "not all of it is here: the list has to be asked for"
    got = fetch_model("hf://org/name")
    assert [request for request in hub.requests("config.json") if request.server == "hub"] == []
    assert sorted(name for name in os.listdir(got.path) if not name.startswith(".")) == model.wanted
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_model_config(f"hf://org/name@{hub.commit}") == {"model_type": "llama"}
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        load_model_config("hf://org/name@main")


def test_named_chat_templates_come_with_the_model(hub, model):
    name = "additional_chat_templates/tool_use.jinja"
    hub.files = {**hub.files, name: b"{{ tools }}", "additional_chat_templates/notes.txt": b"x"}
    got = fetch_model("hf://org/name")
    assert HFFolder.open(got.path).tokenizer_files()[name] == b"{{ tools }}"
    assert os.listdir(got.path / "additional_chat_templates") == ["tool_use.jinja"]
    hub.log.clear()
    assert fetch_model(f"hf://org/name@{hub.commit}").path == got.path
    assert hub.log == []
