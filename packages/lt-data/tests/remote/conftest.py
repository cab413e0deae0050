"""An S3 server in a process of its own, and a proxy before it that records every request and can be told to fail."""

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

from lt_data import TokenStore, pack, prepare
from lt_data.remote import s3_folder

PART = 5 * 2**20
SECRET = "a/Secret+AccessKeyOfNobody0123456789abcd"
"""The key of the `aws` environment, which a server may repeat in what it answers."""


@dataclass
class Request:
    """A request as the proxy saw it. `operation` is its method, with what its query asks for."""

    method: str
    key: str
    query: dict[str, list[str]]
    range: str | None

    @property
    def operation(self) -> str:
        for word in ("uploads", "uploadId", "delete", "list-type"):
            if word in self.query:
                return f"{self.method} {word}"
        return self.method

    @property
    def changes(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")


# ("status", 503, "SlowDown") | ("reset",) | ("lost",) the answer | ("cut", bytes of it) | ("flip", one of its bytes)
Fault = tuple[Any, ...]


@dataclass
class Proxy:
    """Stands between this process and the server."""

    server: int
    port: int = 0
    log: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault | None] = lambda request: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, request: Request) -> Fault:
        with self.lock:  # one after the other, so that a plan may count
            self.log.append(request)
            return self.fault(request) or ("none",)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client went away
            super().handle()

    def do_GET(self) -> None:
        n_bytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(n_bytes)
        if len(body) < n_bytes:  # the client was killed while it sent; the server would wait for the rest
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix("/").partition("/")[2]
        query = parse_qs(parts.query, keep_blank_values=True)
        fault = self.proxy.plan(Request(self.command, key, query, self.headers.get("Range")))
        if fault[0] == "status":
            error = f"<?xml version='1.0'?><Error><Code>{fault[2]}</Code><Message>{SECRET}</Message></Error>".encode()
            self.answer(fault[1], [("Content-Length", str(len(error)))], error)
        elif fault[0] != "reset":
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.proxy.server, timeout=60)) as server:
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                content = bytearray(answer.read())
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            if self.command != "HEAD":
                kept = [(k, v) for k, v in kept if k.lower() != "content-length"]
                kept.append(("Content-Length", str(len(content))))
            if fault[0] == "flip" and content:
                content[fault[1] % len(content)] ^= 1
            if fault[0] == "cut":
                del content[fault[1] :]
                self.close_connection = True
            if fault[0] != "lost":
                self.answer(answer.status, kept, content)
        if fault[0] in ("reset", "lost"):
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes | bytearray) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@pytest.fixture(scope="session")
def shared_proxy(moto) -> Proxy:
    proxy = Proxy(server=moto)
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"proxy": proxy}))
    proxy.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return proxy


@pytest.fixture(scope="session")
def clients() -> dict[str, Any]:
    """Clients by endpoint: they are costly to make, so that all tests share them."""
    return {}


@pytest.fixture
def proxy(shared_proxy, aws, monkeypatch, clients) -> Proxy:
    """The proxy without a fault or a log; this process's environment points to it, with nothing of the user's own."""
    shared_proxy.log, shared_proxy.fault = [], lambda request: None
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**aws, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{shared_proxy.port}"}.items():
        monkeypatch.setenv(name, value)
    make_client = s3_folder.make_client

    def shared_client() -> Any:
        endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
        if endpoint not in clients:
            clients[endpoint] = make_client()
        return clients[endpoint]

    monkeypatch.setattr(s3_folder, "make_client", shared_client)
    monkeypatch.setattr(s3_folder, "PART_BYTES", PART)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    return shared_proxy


@pytest.fixture
def bucket(proxy, moto, monkeypatch) -> "Bucket":
    """An empty bucket."""
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{moto}")  # past the proxy
        client = s3_folder.make_client()
    name = f"bucket-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    return Bucket(name, client)


class Bucket:
    """A bucket as it really is, past the proxy."""

    def __init__(self, name: str, client: Any) -> None:
        self.name, self.client = name, client
        self.url = f"s3://{name}/data/store"

    def objects(self) -> dict[str, bytes]:
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix="data/store/").get("Contents", [])
        names = [entry["Key"].removeprefix("data/store/") for entry in listed]
        return {name: self.client.get_object(**self.at(name))["Body"].read() for name in names}

    def at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": f"data/store/{name}"}

    def put(self, name: str, content: bytes, **more: Any) -> None:
        self.client.put_object(**self.at(name), Body=content, **more)

    def spoil(self, name: str) -> None:
        """Change a byte of an object, and nothing else."""
        there = self.client.get_object(**self.at(name))
        content = bytearray(there["Body"].read())
        content[len(content) // 2] ^= 1
        self.put(name, bytes(content), Metadata=there["Metadata"])

    def delete(self, name: str) -> None:
        self.client.delete_object(**self.at(name))

    def unfinished(self) -> list[str]:
        uploads = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [entry["Key"].removeprefix("data/store/") for entry in uploads]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, documents, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "store"
    prepare(documents, tokenizer=tokenizer, out=folder, shard_tokens=9_000)
    pack(TokenStore(folder), seq_len=64)
    return folder


@pytest.fixture
def store(prepared, tmp_path) -> TokenStore:
    """The texts as a store of a few shards with a pack of rows of 64."""
    return TokenStore(shutil.copytree(prepared, tmp_path / "store"))


@pytest.fixture
def folder(store) -> Path:
    """A folder of another kind, with an empty file and one of three parts, so that all kinds of requests are made."""
    (store.path / "manifest.json").write_text('{"format": "of another program"}')
    (store.path / "notes").mkdir()
    (store.path / "notes" / "größe 1.txt").touch()
    (store.path / "notes" / "large.bin").write_bytes(np.random.default_rng(5).bytes(2 * PART + 54321))
    return store.path


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, bytes]]:
    """Reads the files of a folder: name → content."""

    def read(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read
