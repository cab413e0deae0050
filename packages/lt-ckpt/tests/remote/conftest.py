"""Fixtures: a hub and an S3 server; both on this machine, both can be told to fail."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hub_server import hub

__all__ = ["hub"]


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
def moto_server(folder: Any) -> Iterator[int]:
    """A server in a process of its own, on a free port of this machine."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(folder / f"moto-{port}.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
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
        from lt_data.remote import s3_folder as s3

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
def aws(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda port: point_to(port, monkeypatch)


@pytest.fixture
def store(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The server, with a fresh record. Servers and clients are costly, so that all tests share one."""
    from lt_data.remote import s3_folder as s3

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
