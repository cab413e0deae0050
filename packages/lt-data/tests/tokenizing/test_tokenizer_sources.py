"""Tokenizers from a hub and from S3, each a server in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_data import DataError, Tokenizer, TokenStore, prepare
from lt_data.tokenizing.hub_files import HubModel, is_short_address

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
            content = (folder / "files" / name).read_bytes()
            if fault == "wrong": content = b"X" + content[1:]
            if fault == "short": content = content[:-1]
            return self.answer(200, content, cut=5 if fault == "cut" else 0)
        if path in (f"/org/tok/resolve/{commit}/{name}", f"/gated/tok/resolve/{commit}/{name}"):
            if name == "tokenizer.json":
                return self.answer(302, Location=f"http://localhost:{self.server.server_port}/cdn/{name}")
            return self.answer(200, (folder / "files" / name).read_bytes())
        self.answer(404)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Hub:
    """The server's folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environ = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder / "home"), "no_proxy": "*"}

    def faults(self, *faults: object) -> None:
        (self.folder / "faults").write_text(json.dumps(faults), encoding="utf-8")

    def log(self) -> list[str]:
        return (self.folder / "log").read_text(encoding="utf-8").splitlines()

    def fetch(self, address: str, **more: str) -> tuple[str, dict[str, bytes]]:
        pauses: list[float] = []
        found = HubModel.parse(address).fetch(
            ["tokenizer.json", "absent.json", "tokenizer_config.json"],
            environ={**self.environ, **more},
            pause=pauses.append,
        )
        assert pauses == sorted(pauses)
        return found


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
def hub(hub_process: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (hub_process.folder / "log").write_text("", encoding="utf-8")
    hub_process.faults()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in hub_process.environ.items():
        monkeypatch.setenv(name, value)
    return hub_process


@pytest.mark.guarantee("tokenizer-fidelity")
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
    store = TokenStore.open(tmp_path / "store")
    assert store.tokenizer().decode(store.document(0)[1:-1]) == "the quick brown fox"
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


@pytest.mark.guarantee("tokenizer-fidelity")
def test_the_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gated/tok@main: it is private, gated, or not there, and no token was sent"):
        hub.fetch("gated/tok")
    with pytest.raises(DataError, match=r"the token given has no access") as caught:
        hub.fetch("gated/tok", HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    commit, files = hub.fetch("gated/tok", HF_TOKEN=" hf_right\n")
    assert (commit, set(files)) == (COMMIT, {"tokenizer.json", "tokenizer_config.json"})
    (tmp_path / "token").write_text("hf_right\n", encoding="utf-8")
    hub.fetch("gated/tok", HF_TOKEN_PATH=str(tmp_path / "token"))
    seen = [line.split() for line in hub.log()]
    assert [words[2:] for words in seen if words[1].startswith("/cdn/")] == [[], []]
    assert sum(words[2:] == ["Bearer", "hf_right"] for words in seen) == 6
    with pytest.raises(DataError, match="what is there cannot be a token"):
        hub.fetch("gated/tok", HF_TOKEN="two words")
    hub.fetch("org/tok", HF_TOKEN="hf_right", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    assert hub.log()[-1].endswith("tokenizer_config.json ")


def test_failures_that_pass(hub: Hub, tokenizer: Tokenizer) -> None:
    hub.faults(503, None, None, "cut", None, 503)
    assert hub.fetch("org/tok")[1]["tokenizer.json"] == tokenizer.files["tokenizer.json"]
    hub.faults(503, 503, 503, 503)
    with pytest.raises(DataError, match=r"does not answer \(HTTP 503\); given up after 4 tries"):
        hub.fetch("org/tok")


@pytest.mark.parametrize(("fault", "message"), [("wrong", "not what the hub has"), ("short", r"bytes arrived of")])
def test_no_wrong_byte_is_taken(hub: Hub, fault: str, message: str) -> None:
    hub.faults(None, None, fault)
    with pytest.raises(DataError, match=message):
        hub.fetch("org/tok")


def test_what_the_hub_has_not(hub: Hub) -> None:
    for address in ("org/other", "org/tok@v9"):
        with pytest.raises(DataError, match=r"no such model or revision on the hub, nor a folder of that name here"):
            hub.fetch(address)
    for address in ("hf://", "hf://a/b/c", "hf://org/tok@", "hf://../etc"):
        with pytest.raises(DataError, match="not the name of a model on a hub"):
            HubModel.parse(address)
    with pytest.raises(DataError, match="not an http"):
        hub.fetch("org/tok", HF_ENDPOINT="file:///etc")
    assert [is_short_address(text) for text in ("a/b", "a/b@c", "a", "a/b/c", "./a", "a/b@c/d", "s3://a/b")] == [
        *(True, True, False, False, False, False, False)
    ]


def test_offline_reads_hugging_faces_cache(hub: Hub, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "models--org--tok"
    tokenizer.save(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT, encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    for address in ("org/tok", f"org/tok@{COMMIT}"):
        commit, files = hub.fetch(address, **offline)
        assert (commit, files) == (COMMIT, dict(tokenizer.files))
    with pytest.raises(DataError, match=r"org/tok@v1: not in .*HF_HUB_OFFLINE is set"):
        hub.fetch("org/tok@v1", **offline)
    assert hub.log() == []


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


@pytest.mark.guarantee("tokenizer-fidelity")
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
    assert TokenStore.open(tmp_path / "store").manifest.tokenizer.name == f"org/tok@{COMMIT[:12]}"
