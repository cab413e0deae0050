"""Tokenizers from a hub and from S3, each a server in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from lt_data import DataError, Tokenizer, TokenStore, hub_client, prepare
from lt_data.tokenizing import files
from lt_data.tokenizing.hub_files import HubRepository, is_short_address

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# A hub: two models, one of them gated; tokenizer.json lies behind a redirect to another host, as large files do. It
# writes each request, with whether it carried a token, into a file. Faults are counted down from the file `faults`.
HUB = """
import json, sys, hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
folder, commit = Path(sys.argv[1]), sys.argv[2]
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, status, content=b"", cut=0, **headers):
        self.send_response(status)
        for name, value in headers.items(): self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - cut])
    def do_GET(self):
        token = self.headers.get("Authorization", "")
        host = self.headers["Host"].split(":")[0]
        with (folder / "log").open("a") as log: log.write(f"{host} {self.path} {token}\\n")
        faults = json.loads((folder / "faults").read_text())
        fault = faults.pop(0) if faults else None
        (folder / "faults").write_text(json.dumps(faults))
        path = self.path.partition("?")[0]
        if fault == 503: return self.answer(503)
        if isinstance(fault, dict): return self.answer(200, fault["answer"].encode())
        if "gated/" in path and token != "Bearer hf_right": return self.answer(401)
        if path in (f"/api/models/{org}/tok/revision/{r}" for org in ("org", "gated") for r in ("main", "v1", commit)):
            files = []
            for file in sorted((folder / "files").iterdir()):
                content = file.read_bytes()
                entry = {"rfilename": file.name, "size": len(content)}
                entry["blobId"] = hashlib.sha1(b"blob %d\\0" % len(content) + content).hexdigest()
                if file.name == "tokenizer.json":
                    entry["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                files.append(entry)
            return self.answer(200, json.dumps({"sha": commit, "siblings": files}).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/cdn/"):
            if not (folder / "files" / name).is_file(): return self.answer(404)
            content = (folder / "files" / name).read_bytes()
            if fault == "wrong": content = b"X" + content[1:]
            if fault == "short": content = content[:-1]
            return self.answer(200, content, cut=5 if fault == "cut" else 0)
        if path in (f"/org/tok/resolve/{commit}/{name}", f"/gated/tok/resolve/{commit}/{name}"):
            if name == "tokenizer.json":
                return self.answer(302, Location=f"http://localhost:{self.server.server_port}/cdn/{name}")
            return self.answer(200, (folder / "files" / name).read_bytes())
        self.answer(404)
    def do_HEAD(self): self.answer(405)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def renew_session() -> None:
    """Close the library's connections; it knows the proxies of the moment when it opened the first one."""
    if hasattr(huggingface_hub, "close_session"):  # from 1.0 on
        huggingface_hub.close_session()


class Hub:
    """The server's folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environ = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder / "home"), "no_proxy": "*"}

    def faults(self, *faults: object) -> None:
        (self.folder / "faults").write_text(json.dumps(faults), encoding="utf-8")

    def log(self) -> list[str]:
        return (self.folder / "log").read_text(encoding="utf-8").splitlines()

    def fetch(self, address: str, **environ: str) -> tuple[str, dict[str, bytes]]:
        names = ["tokenizer.json", "absent.json", "tokenizer_config.json"]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            renew_session()
            return HubRepository.parse(address).fetch(names, max_bytes=10**6)


@pytest.fixture(scope="module")
def hub_process(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    tokenizer.save(folder / "files")
    (folder / "files/model.safetensors").write_bytes(b"not wanted")
    (folder / "faults").write_text("[]", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", HUB, str(folder), COMMIT], stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        yield Hub(folder, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def hub(hub_process: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (hub_process.folder / "log").write_text("", encoding="utf-8")
    hub_process.faults()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in hub_process.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # What the library read of the environment when it was imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(hub_process.folder / "home/token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    for module in (file_download, _http, hub_client):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    renew_session()
    yield hub_process
    renew_session()


@pytest.mark.parametrize("address", ["org/tok", "hf://org/tok", "org/tok@v1", f"hf://org/tok@{COMMIT}"])
def test_from_the_hub(hub: Hub, tokenizer: Tokenizer, address: str, tmp_path: Path) -> None:
    loaded = Tokenizer.load(address)
    assert loaded.files == tokenizer.files
    assert loaded.name == f"org/tok@{COMMIT[:12]}"
    asked = [line.split()[1].partition("?")[0] for line in hub.log()]
    revision = address.partition("@")[2] or "main"
    assert asked == [
        f"/api/models/org/tok/revision/{revision}",
        f"/org/tok/resolve/{COMMIT}/tokenizer.json",
        "/cdn/tokenizer.json",
        f"/org/tok/resolve/{COMMIT}/tokenizer_config.json",
    ]


def test_a_store_needs_the_hub_only_once(hub: Hub, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox", encoding="utf-8")
    prepare([tmp_path / "a.txt"], tokenizer="hf://org/tok@v1", out=tmp_path / "store")
    assert {path.name for path in (tmp_path / "store/tokenizer").iterdir()} == set(tokenizer.files)
    asked = len(hub.log())
    store = TokenStore(tmp_path / "store")
    assert store.tokenizer().decode(store[0][1:-1]) == "the quick brown fox"
    assert store.manifest.tokenizer.name == f"org/tok@{COMMIT[:12]}"
    assert len(hub.log()) == asked


def test_a_folder_here_goes_before_the_hub(
    hub: Hub, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save(tmp_path / "org/tok")
    assert Tokenizer.load("org/tok").name == "tok"
    assert hub.log() == []
    (tmp_path / "org/empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer at org/empty"):
        Tokenizer.load("org/empty")


def test_the_token_goes_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"gated/tok@main: it is private, gated, or not there, and no token was sent"):
        hub.fetch("gated/tok")
    with pytest.raises(DataError, match=r"the token given has no access") as caught:
        hub.fetch("gated/tok", HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    commit, found = hub.fetch("gated/tok", HF_TOKEN=" hf_right\n")
    assert (commit, set(found)) == (COMMIT, {"tokenizer.json", "tokenizer_config.json"})
    token = hub.folder / "token"
    token.write_text("hf_right\n", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(token))
    hub.fetch("gated/tok")
    seen = [line.split() for line in hub.log()]
    assert [words[2:] for words in seen if words[1].startswith("/cdn/")] == [[], []]
    assert sum(words[2:] == ["Bearer", "hf_right"] for words in seen) == 6
    with pytest.raises(DataError, match="cannot be a token"):
        hub.fetch("gated/tok", HF_TOKEN="two words")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    hub.fetch("org/tok", HF_TOKEN="hf_right")
    assert hub.log()[-1].endswith("tokenizer_config.json ")


@pytest.mark.parametrize("endpoint", ["http://localhost:1", "http://hub.example"])
def test_no_token_goes_to_a_proxy(hub: Hub, endpoint: str) -> None:
    proxy = {"http_proxy": hub.environ["HF_ENDPOINT"], "no_proxy": "", "HF_TOKEN": "hf_right"}
    with pytest.raises(DataError, match=r"no token is sent (to a proxy: set NO_PROXY=localhost|unencrypted)"):
        hub.fetch("gated/tok", HF_ENDPOINT=endpoint, **proxy)
    assert [line.split()[2:] for line in hub.log()] == [[]]


@pytest.mark.parametrize(
    ("endpoint", "proxies", "sent"),
    [
        ("https://hub.example", {"https_proxy": "http://proxy.example"}, True),
        ("http://hub.example", {}, False),
        ("http://[::1]:1", {}, True),
        ("http://localhost.example", {}, False),
        ("http://localhost:1", {"all_proxy": "http://proxy.example"}, False),
        ("http://localhost:1", {"http_proxy": "http://proxy.example", "no_proxy": "127.0.0.1"}, False),
        ("http://localhost:1", {"http_proxy": "http://proxy.example", "no_proxy": "x, LOCALHOST"}, True),
        ("http://127.0.0.1:1", {"http_proxy": "http://proxy.example", "no_proxy": "*"}, True),
    ],
)
def test_where_a_token_may_go(
    hub: Hub, endpoint: str, proxies: dict[str, str], sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_right", "no_proxy": "", **proxies}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    client = hub_client.HubClient.from_environment()
    assert ((client.token is not None), client.withheld == "") == (sent, sent)
    assert hub_client.choose_library_token() is (None if sent else False)
    assert "hf_right" not in repr(client)


def test_failures_that_pass(hub: Hub, tokenizer: Tokenizer) -> None:
    hub.faults(503, None, None, "cut", None, 503)
    assert hub.fetch("org/tok")[1]["tokenizer.json"] == tokenizer.files["tokenizer.json"]
    hub.faults(503, 503, 503, 503)
    with pytest.raises(DataError, match=r"does not answer \(HTTP 503\); given up after 4 tries"):
        hub.fetch("org/tok")


@pytest.mark.parametrize("fault", ["wrong", "short"])
def test_no_wrong_byte_is_taken(hub: Hub, fault: str) -> None:
    hub.faults(None, None, fault)
    with pytest.raises(DataError, match=r"what arrived \(\d+ bytes\) is not what the hub lists"):
        hub.fetch("org/tok")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "holds a list, not an object"),
        ("deep", "nested more than"),
        ({"siblings": []}, "names no commit"),
        ({"sha": ["x"], "siblings": []}, "names no commit"),
        ({"sha": COMMIT}, 'no list of files in "siblings"'),
        ({"sha": COMMIT, "siblings": [1]}, 'no list of files in "siblings"'),
        ({"sha": COMMIT, "siblings": [{"rfilename": ["x"]}]}, 'no list of files in "siblings"'),
        ({"sha": COMMIT, "siblings": [{"rfilename": "tokenizer.json"}]}, "lists no hash of it"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "tokenizer.json", "lfs": 1}]}, "lists no hash of it"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "tokenizer.json", "blobId": 5}]}, "lists no hash of it"),
    ],
)
def test_answers_of_no_hub(hub: Hub, answer: object, message: str) -> None:
    hub.faults({"answer": "[" * 100_000 if answer == "deep" else json.dumps(answer)})
    with pytest.raises(DataError, match=message):
        hub.fetch("org/tok")


def test_what_is_too_large_is_not_held(hub: Hub, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(DataError, match=r"tokenizer\.json: more than the 1000 bytes that such a file may have"):
        Tokenizer.load("org/tok")
    with pytest.raises(DataError, match=r"tokenizer\.json: more than the 1000 bytes that such a file may have"):
        Tokenizer.load(hub.folder / "files")
    monkeypatch.setattr(hub_client, "MAX_LIST_BYTES", 100)
    with pytest.raises(DataError, match=r"hf://org/tok@main: more than the 100 bytes"):
        Tokenizer.load("org/tok")


def test_what_the_hub_has_not(hub: Hub) -> None:
    for address in ("org/other", "org/tok@v9"):
        with pytest.raises(DataError, match=r"no such repository or revision on the hub, nor a folder of that name"):
            hub.fetch(address)
    for address in ("hf://", "hf://a/b/c", "hf://org/tok@", "hf://../etc", "a--b/c", "a..b/c"):
        with pytest.raises(DataError, match="not the name of a model on a hub"):
            HubRepository.parse(address)
    for endpoint in ("file:///etc", "https://user:pw@hub.example", "http://a:b"):
        with pytest.raises(DataError, match="not a plain http") as caught:
            hub.fetch("org/tok", HF_ENDPOINT=endpoint)
        assert "pw" not in str(caught.value)
    assert [is_short_address(text) for text in ("a/b", "a/b@c", "a", "a/b/c", "./a", "a/b@c/d", "s3://a/b")] == [
        *(True, True, False, False, False, False, False)
    ]


def test_offline_reads_hugging_faces_cache(
    hub: Hub, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--tok"
    tokenizer.save(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for address in ("org/tok", f"org/tok@{COMMIT}"):
        commit, found = hub.fetch(address, HF_HUB_OFFLINE="1")
        assert (commit, found) == (COMMIT, dict(tokenizer.files))
    with pytest.raises(DataError, match=r"org/tok@v1: not in .*HF_HUB_OFFLINE is set"):
        hub.fetch("org/tok@v1", HF_HUB_OFFLINE="1")
    assert hub.log() == []


def test_from_a_signed_web_address(hub: Hub, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The signature goes with each request; neither it nor the password stands in a name, a manifest or an error."""
    address = hub.environ["HF_ENDPOINT"].replace("//", "//user:geheim@")
    (tmp_path / "a.txt").write_text("the quick brown fox", encoding="utf-8")
    for url in (f"{address}/cdn/?sig=secret", f"{address}/cdn/tokenizer.json?sig=secret"):
        loaded = Tokenizer.load(url)
        assert (loaded.name, loaded.files) == ("cdn", tokenizer.files)
        prepare([tmp_path / "a.txt"], tokenizer=url, out=tmp_path / "store", overwrite=True)
        for path in (path for path in (tmp_path / "store").rglob("*") if path.is_file()):
            assert not any(word in path.read_bytes() for word in (b"secret", b"geheim")), path
    assert all("sig=secret" in line for line in hub.log())
    for url in (f"{address}/none/?sig=secret", address.replace("http:", "nosuch:"), f"{address[:-1]}99999/?sig=secret"):
        with pytest.raises(DataError) as caught:
            Tokenizer.load(url)
        assert not any(word in str(caught.value) for word in ("secret", "geheim")), str(caught.value)


S3_CODE = """
import json, sys
import fsspec
from lt_data import DataError, Tokenizer
files = {name: bytes.fromhex(content) for name, content in json.load(sys.stdin).items()}
s3 = fsspec.filesystem("s3")
s3.mkdir("tokenizers")
for name, content in {**files, "model.safetensors": b"x"}.items():
    s3.pipe_file(f"tokenizers/deep/tok/{name}", content)
for url in ("s3://tokenizers/deep/tok", "s3://tokenizers/deep/tok/", "s3://tokenizers/deep/tok/tokenizer.json"):
    loaded = Tokenizer.load(url)
    assert dict(loaded.files) == files, sorted(loaded.files)
    assert loaded.name == "tok", loaded.name
for url in ("s3://tokenizers/deep", "s3://nowhere/tok"):
    try:
        Tokenizer.load(url)
    except DataError as exc:
        assert "no tokenizer at " + url in str(exc), exc
    else:
        raise AssertionError(url)
print("done")
"""


def test_from_s3(moto: int, aws: dict[str, str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    # In a process of its own: s3fs keeps a thread and its connections.
    environment = {**os.environ, **aws, "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{moto}"}
    run = subprocess.run(
        [sys.executable, "-c", S3_CODE],
        input=json.dumps({name: content.hex() for name, content in tokenizer.files.items()}),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert run.stdout == "done\n", run.stderr


def test_a_protocol_without_its_package() -> None:
    with pytest.raises(DataError, match=r"cannot read nosuch://x/y.*install the fsspec package for nosuch://"):
        Tokenizer.load("nosuch://x/y")


def test_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(DataError, match=r"there is a SentencePiece tokenizer\.model.*AutoTokenizer and save it again"):
        Tokenizer.load(tmp_path)


def test_the_command_takes_every_address(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox", encoding="utf-8")
    words = ["prepare", "a.txt", "--out", "store", "--tokenizer", "hf://org/tok@v1"]
    run = subprocess.run(
        [sys.executable, "-m", "lt_data", *words], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 0, run.stderr
    assert TokenStore(tmp_path / "store").manifest.tokenizer.name == f"org/tok@{COMMIT[:12]}"
