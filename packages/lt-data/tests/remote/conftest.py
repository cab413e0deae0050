"""An S3 server in a process of its own, and a proxy before it that records every request and can be told to fail."""

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from lt_data import Document, Tokenizer, TokenStore, prepare_documents

SECRET = "a/Secret+AccessKeyOfNobody0123456789abcd"
"""The key of the `aws` environment, which a server may repeat in what it answers."""


@dataclass
class Request:
    """A request as the proxy saw it. `operation` is its method, with what its query asks for."""

    method: str
    key: str
    query: dict[str, list[str]]
    n_bytes: int
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


# A fault: ("status", 503, "SlowDown") | ("reset",) | ("lost",) the answer | ("cut", bytes of the body) |
# ("stall", bytes of the body) | ("etag",) another one | ("flip", byte of the answer) | ("spoil", byte of the request)
Fault = tuple[Any, ...]


@dataclass
class Proxy:
    """Stands between this process and the server."""

    server: int
    port: int = 0
    log: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault | None] = lambda request: None
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, request: Request) -> Fault | None:
        with self.lock:  # one after the other, so that a plan may count
            self.log.append(request)
            return self.fault(request)

    def sent(self, method: str = "") -> list[Request]:
        return [request for request in self.log if request.method.startswith(method)]


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
            return None
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        key = unquote(parts.path).removeprefix("/").partition("/")[2]
        request = Request(self.command, key, query, len(body), self.headers.get("Range"))
        fault = self.proxy.plan(request) or ("none",)
        if fault[0] == "reset":
            return self.reset()
        if fault[0] == "status":
            return self.refuse(fault[1], fault[2])
        if fault[0] == "spoil" and body:
            at = fault[1] % len(body)
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.proxy.server, timeout=60)) as connection:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        if fault[0] == "lost":
            return self.reset()
        return self.answer(answer, content, fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self, answer: http.client.HTTPResponse, content: bytes, fault: Fault) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() in ("connection", "transfer-encoding") or (
                name.lower() == "content-length" and self.command != "HEAD"
            ):
                continue
            if name.lower() == "etag" and fault[0] == "etag":
                value = '"0123456789abcdef0123456789abcdef"'
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault[0] == "flip" and content:
            at = fault[1] % len(content)
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        if fault[0] in ("cut", "stall"):
            self.wfile.write(content[: fault[1]])
            self.wfile.flush()
            if fault[0] == "stall":
                self.proxy.released.wait(60)
            self.close_connection = True
            return
        self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception() if sys.version_info >= (3, 11) else None, OSError | ValueError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, documents: list[Document], tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "store"
    prepare_documents(documents, tokenizer=tokenizer, out=folder, shard_tokens=20_000)
    return folder


@pytest.fixture
def store(prepared: Path, tmp_path: Path) -> TokenStore:
    """The texts as a store of a few shards."""
    return TokenStore(shutil.copytree(prepared, tmp_path / "store"))


@pytest.fixture(scope="session")
def clients() -> dict[object, Any]:
    """Clients are costly to make, so that all tests share them."""
    return {}


@pytest.fixture
def proxy(
    moto: int, aws: dict[str, str], monkeypatch: pytest.MonkeyPatch, clients: dict[object, Any]
) -> Iterator[Proxy]:
    """A fresh proxy that this process's environment points to, with nothing of the user's own in it."""
    from lt_data.remote import s3, s3_folder

    made = clients.get(("proxy",)) or Proxy(server=moto)
    if ("proxy",) not in clients:
        server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"proxy": made}))
        made.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        clients[("proxy",)] = made
    assert aws["AWS_SECRET_ACCESS_KEY"] == SECRET
    made.log = []
    made.fault = lambda request: None
    made.released = threading.Event()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**aws, "AWS_ENDPOINT_URL_S3": made.url}.items():
        monkeypatch.setenv(name, value)
    real = s3.make_client

    def shared(options: s3.S3Options) -> Any:
        key = (options.endpoint_url, options.timeout)
        if key not in clients:
            clients[key] = real(options)
        return clients[key]

    monkeypatch.setattr(s3, "make_client", shared)
    made_client = s3_folder.make_client

    def shared_client() -> Any:
        if "client" not in clients:
            clients["client"] = made_client()
        return clients["client"]

    monkeypatch.setattr(s3_folder, "make_client", shared_client)
    monkeypatch.setattr(s3, "pause", lambda attempt: None)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    yield made
    made.released.set()


@pytest.fixture
def bucket(proxy: Proxy, moto: int) -> "Bucket":
    """An empty bucket."""
    from lt_data.remote.s3 import S3Options, make_client

    client = make_client(S3Options(endpoint_url=f"http://127.0.0.1:{moto}"))  # past the proxy
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
        return {
            entry["Key"].removeprefix("data/store/"): self.client.get_object(Bucket=self.name, Key=entry["Key"])[
                "Body"
            ].read()
            for entry in listed
        }

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"data/store/{name}", Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"data/store/{name}")

    def unfinished(self) -> list[str]:
        uploads = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [entry["Key"].removeprefix("data/store/") for entry in uploads]
