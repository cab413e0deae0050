"""An S3 server for tests: moto in a process of its own, at the end of a line that can be cut and held.

The line is a relay of this process: `down` refuses connections as a network does that is gone, `hold` keeps back a
request for an object until it is let go, so that a test can kill, stop or prune exactly while something is being sent.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 120.0


class Line:
    """A relay from a port of this machine to another.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._held, self._go = threading.Event(), threading.Event()
        self._waits_for = b""
        self.port = 0
        self.up()

    def up(self) -> None:
        """Let connections through."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._accept, args=(listener,), name="line", daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and cut those that are there."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            _cut(end)

    def hold(self, method: str, name: str) -> None:
        """Keep back the next request of this method whose address has `name` in it, and what follows on its connection.

        Args:
            method: PUT, GET, ...
            name: A part of the object's name.
        """
        self._held, self._go = threading.Event(), threading.Event()
        self._waits_for = f"{method} {name}".encode()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a request is kept back."""
        return self._held.wait(timeout_s)

    def let_go(self) -> None:
        """Let the request through that is kept back."""
        self._waits_for = b""
        self._go.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            with self._lock:
                self._open |= {near, far}
            for source, target, watched in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._carry, args=(source, target, watched), name="line", daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, watched: bool) -> None:
        with suppress(OSError):
            while block := source.recv(2**18):
                if watched and self._is_meant(block):
                    self._waits_for = b""
                    self._held.set()
                    self._go.wait()
                target.sendall(block)
        for end in (source, target):
            _cut(end)
        with self._lock:
            self._open -= {source, target}

    def _is_meant(self, block: bytes) -> bool:
        method, _, name = self._waits_for.partition(b" ")
        return bool(name) and block.startswith(method + b" ") and name in block.partition(b"\r\n")[0]


def _cut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class Bucket:
    """A server and the line to it, with buckets made by `new`.

    Attributes:
        line: The line.
        environ: What points boto3 at it, with nothing of the user's own.
        client: A client of boto3 that goes past the line.
    """

    def __init__(self, port: int) -> None:
        import boto3

        self.line = Line(port)
        self.environ = {
            "AWS_ACCESS_KEY_ID": "AKIDOFNOBODY12345678",
            "AWS_SECRET_ACCESS_KEY": "a/Secret+AccessKeyOfNobody0123456789abcd",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.line.port}",
            "AWS_MAX_ATTEMPTS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id=self.environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environ["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
        self._made = 0

    def new(self) -> str:
        """Make an empty bucket; returns the address of a folder in it."""
        self._made += 1
        self.client.create_bucket(Bucket=f"bucket-{self._made}")
        return f"s3://bucket-{self._made}/run"

    def names(self, url: str) -> list[str]:
        """The objects of the bucket of an address, in order, by their names in the folder `run`."""
        found = self.client.list_objects_v2(Bucket=url.split("/")[2]).get("Contents", [])
        return sorted(entry["Key"].removeprefix("run/") for entry in found)

    def steps(self, url: str) -> list[int]:
        """The steps whose COMMIT is there."""
        return [int(name[5:13]) for name in self.names(url) if name.endswith("/COMMIT")]

    def spoil(self, url: str, name: str) -> None:
        """Change the last byte of an object, which keeps saying what it was uploaded as."""
        at = {"Bucket": url.split("/")[2], "Key": f"run/{name}"}
        found = self.client.get_object(**at)
        data = bytearray(found["Body"].read())
        data[-1] ^= 1
        self.client.put_object(**at, Body=bytes(data), Metadata=found["Metadata"])

    def close(self) -> None:
        """Take the line down."""
        self.line.down()
        self.client.close()


@contextmanager
def serve(folder: Path) -> Iterator[Bucket]:
    """A server until the end of the block; its log goes into `folder`.

    Raises:
        ModuleNotFoundError: moto[server] or boto3 is not installed.
    """
    import moto.server as _  # noqa: F401 - asked here, where the error is seen

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    log = folder / "moto.log"
    with open(log, "wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, log.read_text(encoding="utf-8", errors="replace")
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        bucket = Bucket(port)
        try:
            yield bucket
        finally:
            bucket.close()
    finally:
        server.kill()
        server.wait()
