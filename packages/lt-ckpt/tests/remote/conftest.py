"""Fixtures: a hub with its CDN, and an S3 server; both on this machine, both can be told to fail."""

import base64
import hashlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    server: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2].partition("?")[0]


@dataclass
class FakeHub:
    """One model, its list, and what is to go wrong.

    `cuts`: file → how many bytes of the body come before the connection ends, one number per request; "reset" as the
    word before it makes the end an RST. `before`: called with each request before it is answered; may change anything.
    """

    repo: str = "org/name"
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    etags: dict[str, str] = field(default_factory=dict)
    gated_for: set[str] | None = None
    tokens: set[str] = field(default_factory=set)
    private: bool = False
    cuts: dict[str, list[Any]] = field(default_factory=dict)
    statuses: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    location: str | None = None
    ignore_range: bool = False
    shift_range: int = 0
    edit_list: Callable[[dict[str, Any]], Any] = lambda listing: listing
    served: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[Request], None] = lambda request: None
    log: list[Request] = field(default_factory=list)
    port: int = 0
    cdn_port: int = 0
    renew_session: Callable[[], None] = lambda: None
    exists: bool = True
    is_private: bool | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    damage: Callable[[bytes], bytes] = lambda data: data
    commits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self, file: str = "", server: str = "") -> list[Request]:
        return [r for r in self.log if file in ("", r.file) and server in ("", r.server)]

    def sent(self, file: str) -> int:
        return sum(r.sent for r in self.log if r.file == file and r.status in (200, 206))

    def listing(self) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob(data)}
            if name in self.large:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return self.edit_list({"id": self.repo, "sha": self.commit, "siblings": siblings})


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    name: str

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        request = Request(server=self.name, path=self.path, headers={k.lower(): v for k, v in self.headers.items()})
        self.hub.log.append(request)
        self.hub.before(request)
        planned = self.hub.statuses.get(f"{self.name}:{request.file}", self.hub.statuses.get(request.file))
        if planned:
            status, headers = planned.pop(0)
            return self.answer(request, status, headers, b"")
        return self.cdn(request) if self.name == "cdn" else self.main(request)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Take what an upload sends: the repository, its files' names, their objects, and the commit."""
        request = Request(server=self.name, path=self.path, headers={k.lower(): v for k, v in self.headers.items()})
        body = self.read_body()
        self.hub.log.append(request)
        self.hub.before(request)
        last = self.path.partition("?")[0].rpartition("/")[2]
        if planned := self.hub.statuses.get(f"{self.command}:{last}") or self.hub.statuses.get(self.command):
            status, headers = planned.pop(0)
            if status == 0:  # the line breaks before the answer
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            return self.answer(request, status, headers, b"{}")
        path = unquote(urlsplit(self.path).path)
        return self.take_object(request, path, body) if self.name == "cdn" else self.take_upload(request, path, body)

    do_PUT = do_POST

    def read_body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def take_object(self, request: Request, path: str, body: bytes) -> None:
        oid = path.removeprefix("/upload/")
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(request, 400, {}, b"")
        self.hub.objects[oid] = body
        return self.answer(request, 200, {}, b"")

    def take_upload(self, request: Request, path: str, body: bytes) -> None:
        hub = self.hub
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in hub.tokens:
            return self.refuse(request, 401, "", "Invalid credentials in Authorization header")
        values = [json.loads(line) for line in body.splitlines()]
        if path == "/api/validate-yaml":
            return self.reply(request, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            if hub.exists:
                return self.refuse(request, 409, "", "You already created this model repo")
            hub.exists = True
            hub.is_private = values[0].get("private", values[0].get("visibility") == "private")
            return self.reply(request, {"url": f"{hub.endpoint}/{hub.repo}"})
        if not hub.exists:
            return self.refuse(request, 404, "RepoNotFound", "Repository not found")
        if path == f"/api/models/{hub.repo}/preupload/main":
            return self.reply(request, {"files": [self.plan_file(file["path"]) for file in values[0]["files"]]})
        if path == f"/{hub.repo}.git/info/lfs/objects/batch":
            objects = [self.plan_object(wanted) for wanted in values[0]["objects"]]
            return self.reply(request, {"transfer": "basic", "objects": objects})
        assert path == f"/api/models/{hub.repo}/commit/main", path
        header, *operations = values
        if header["value"].get("parentCommit") != hub.commit:
            return self.refuse(request, 412, "", "A commit has happened since")
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                hub.files[value["path"]] = hub.damage(hub.objects[value["oid"]])
                hub.large.add(value["path"])
            else:
                hub.files[value["path"]] = base64.b64decode(value["content"])
        hub.commits.append(header["value"])
        hub.commit = f"{int(hub.commit, 16) + 1:040x}"
        return self.reply(request, {"commitOid": hub.commit, "commitUrl": f"{hub.endpoint}/{hub.repo}/commit/x"})

    def plan_file(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": path in self.hub.ignored}

    def plan_object(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"http://localhost:{self.hub.cdn_port}/upload/{wanted['oid']}?Signature=secret"
        actions = {} if wanted["oid"] in self.hub.objects else {"actions": {"upload": {"href": href}}}
        return {"oid": wanted["oid"], "size": wanted["size"], **actions}

    def reply(self, request: Request, values: dict[str, Any]) -> None:
        self.answer(request, 200, {"Content-Type": "application/json"}, json.dumps(values).encode())

    def answer(self, request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
        request.status = status
        cut: Any = (self.hub.cuts.get(request.file) or [None]).pop(0) if status in (200, 206) else None
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        reset, cut = (True, cut[1]) if isinstance(cut, tuple) else (False, cut)
        self.wfile.write(body[:cut])
        self.wfile.flush()
        request.sent = len(body[:cut])
        if cut is not None:
            self.close_connection = True
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def refuse(self, request: Request, status: int, code: str, message: str = "") -> None:
        self.answer(request, status, {"X-Error-Code": code, "X-Error-Message": message}, b"{}")

    def main(self, request: Request) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in hub.tokens:
            return self.refuse(request, 401, "", "Invalid credentials in Authorization header")
        if (
            not hub.exists
            or not path.startswith((f"/api/models/{hub.repo}/revision/", f"/{hub.repo}/resolve/"))
            or (hub.private and not token)
        ):
            return self.refuse(request, 404 if token else 401, "RepoNotFound", "Repository not found")
        if path.startswith("/api/"):
            if path.rpartition("/revision/")[2] not in ("main", "refs/pr/1", hub.commit):
                return self.refuse(request, 404, "RevisionNotFound", "Invalid rev id")
            assert urlsplit(self.path).query.lower() == "blobs=true"
            return self.answer(request, 200, {"Content-Type": "application/json"}, json.dumps(hub.listing()).encode())
        if hub.gated_for is not None and token not in hub.gated_for:
            message = f"Access to model {hub.repo} is restricted. {token}"
            return self.refuse(request, 403 if token else 401, "GatedRepo", message)
        commit, _, name = path.removeprefix(f"/{hub.repo}/resolve/").partition("/")
        if commit != hub.commit or name not in hub.files:
            return self.refuse(request, 404, "EntryNotFound", "Entry not found")
        if name not in hub.large:
            return self.content(request, name)
        data = hub.files[name]
        linked = {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        linked |= {"X-Repo-Commit": hub.commit}
        headers = {"Location": hub.location or f"http://localhost:{hub.cdn_port}/blobs/{name}?Signature=secret"}
        return self.answer(request, 302, {**headers, **linked}, b"see there")

    def cdn(self, request: Request) -> None:
        return self.content(request, unquote(urlsplit(self.path).path).removeprefix("/blobs/"))

    def content(self, request: Request, name: str) -> None:
        hub = self.hub
        data = hub.served.get(name, hub.files[name])
        headers = {"ETag": hub.etags.get(name, f'"{blob(data)}"'), "X-Repo-Commit": hub.commit}
        wanted = request.headers.get("range")
        if wanted is None or hub.ignore_range:
            return self.answer(request, 200, headers, data)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) + hub.shift_range
        if start >= len(data):
            return self.answer(request, 416, {"Content-Range": f"bytes */{len(data)}"}, b"")
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.answer(request, 206, headers, data[start:])


def renew_session() -> None:
    """Close the library's connections; it knows the proxies of the moment when it opened the first one."""
    library = sys.modules.get("huggingface_hub")
    if hasattr(library, "close_session"):  # from 1.0 on
        library.close_session()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[FakeHub]:
    """A hub that this process's environment points to, with nothing of the user's own in that environment."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    from lt_ckpt.hub import client

    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    renew_session()
    # What the library read of the environment when it was imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home/token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is in the chunk under way is lost with the line
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(client, "PAUSE_S", 0.001)
    monkeypatch.setattr(client, "TRIES", 3)
    made = FakeHub()
    made.renew_session = renew_session
    servers: list[ThreadingHTTPServer] = []
    threads: list[threading.Thread] = []
    for name in ("hub", "cdn"):
        handler = type(f"{name}-handler", (Handler,), {"hub": made, "name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        servers.append(server)
        threads.append(threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}))
        threads[-1].start()
    made.port, made.cdn_port = (server.server_address[1] for server in servers)
    monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield made
    renew_session()
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def model(hub: FakeHub) -> SimpleNamespace:
    """A model of two shards and what else such repositories hold, on the hub."""
    import numpy as np
    from safetensors.numpy import save

    rng = np.random.default_rng(0)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    arrays = {one: {"a": rng.standard_normal((300, 500))}, two: {"b": rng.standard_normal((200, 500))}}
    weight_map = {key: name for name, members in arrays.items() for key in members}
    hub.files = {
        "README.md": b"# a model",
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "pytorch_model.bin": b"a pickle",
        "script.py": b"raise SystemExit",
        "tokenizer.json": b'{"version": "1.0"}',
        **{name: save(members) for name, members in arrays.items()},
    }
    hub.large = {one, two, "pytorch_model.bin"}
    wanted = [name for name in hub.files if name.endswith((".json", ".safetensors"))]
    return SimpleNamespace(one=one, two=two, arrays=arrays, wanted=sorted(wanted))


class Store:
    """An S3 server in a process of its own, and this process's requests to it: recorded, and failing if told so."""

    def __init__(self, port: int, client: Any, recorded: Any) -> None:
        self.port, self.client, self.recorded = port, client, recorded
        self.log: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self.fail_at = -1

    def call(self, params: dict[str, Any], model: Any, **_: object) -> None:
        from botocore.exceptions import EndpointConnectionError

        operation, key = model.name, params.get("Key", params.get("Prefix", ""))
        index = len(self.log)
        self.log.append((operation, key))
        if index == self.fail_at:
            raise EndpointConnectionError(endpoint_url=f"http://secret:{SECRET}@127.0.0.1")
        self.before(operation, key)

    def names(self, bucket: str) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=bucket).get("Contents", [])]

    def objects(self, bucket: str) -> dict[str, bytes]:
        names = self.names(bucket)
        return {key: self.client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in names}

    def unfinished(self, bucket: str) -> list[str]:
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


SECRET = "a/Secret+AccessKeyOfNobody0123456789abcd"
AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDOFNOBODY12345678",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


@contextmanager
def moto_server(folder: Any, **environment: str) -> Iterator[int]:
    """A server in a process of its own, on a free port of this machine."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(folder / f"moto-{port}.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None, (folder / f"moto-{port}.log").read_text(encoding="utf-8")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield port
    server.kill()
    server.wait()


@pytest.fixture(scope="session")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with moto_server(tmp_path_factory.mktemp("moto")) as port, pytest.MonkeyPatch.context() as patch:
        from lt_ckpt.s3 import client as s3

        point_to(port, patch)
        found = Store(port, s3.make_client(), s3.make_client())
        found.recorded.meta.events.register("provide-client-params.s3", found.call)
        yield found
        found.client.close()
        found.recorded.close()


def point_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points this process's environment at a server, with nothing of the user's own in it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**AWS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_server() -> Callable[..., Any]:
    return moto_server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda port: point_to(port, monkeypatch)


@pytest.fixture
def store(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The server, with a fresh record. Servers and clients are costly, so that all tests share one."""
    from lt_ckpt.s3 import client as s3

    point_to(s3_store.port, monkeypatch)
    s3_store.log = []
    s3_store.before = lambda operation, key: None
    s3_store.fail_at = -1
    monkeypatch.setattr(s3, "make_client", lambda: s3_store.recorded)
    return s3_store


@pytest.fixture
def bucket(store: Store) -> str:
    """An empty bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    store.client.create_bucket(Bucket=name)
    return name
