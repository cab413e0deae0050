"""S3 server for tests: moto in a separate process, behind a TCP relay that can be cut or blocked.

The relay runs in this process: `down` refuses connections as in a network outage; `hold_request` blocks a request for
an object until `release`, so that a test can kill, stop or prune during an upload.
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

START_TIMEOUT_S = 120.0


class TcpRelay:
    """Relay between two local TCP ports.

    Attributes:
        port: Listening port.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._held, self._released = threading.Event(), threading.Event()
        self._held_pattern = b""
        self.port = 0
        self.up()

    def up(self) -> None:
        """Accept connections."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._accept, args=(listener,), name="relay", daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and cut existing ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        with self._lock:
            sockets, self._open = self._open, set()
        for connection in sockets:
            _close_socket(connection)

    def hold_request(self, method: str, name: str) -> None:
        """Block the connection of the next matching request, until `release`.

        Args:
            method: PUT, GET, ...
            name: Part of the object's name.
        """
        self._held, self._released = threading.Event(), threading.Event()
        self._held_pattern = f"{method} {name}".encode()

    def wait_held(self, timeout_s: float) -> bool:
        """Wait until a request is blocked; return False on timeout."""
        return self._held.wait(timeout_s)

    def release(self) -> None:
        """Forward the blocked request."""
        self._held_pattern = b""
        self._released.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # the listener was closed
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:  # the server is gone
                client.close()
                return
            with self._lock:
                self._open |= {client, server}
            for args in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=args, name="relay", daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while block := source.recv(2**18):
                if is_request and self._matches(block):
                    self._held_pattern = b""
                    self._held.set()
                    self._released.wait()
                target.sendall(block)
        for connection in (source, target):
            _close_socket(connection)
        with self._lock:
            self._open -= {source, target}

    def _matches(self, block: bytes) -> bool:
        method, _, name = self._held_pattern.partition(b" ")
        return bool(name) and block.startswith(method + b" ") and name in block.partition(b"\r\n")[0]


def _close_socket(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class MotoServer:
    """Client side of a running moto server and its relay.

    Attributes:
        relay: Relay to the server.
        environ: Environment that points boto3 at the relay, without the user's configuration.
        client: boto3 client that bypasses the relay.
    """

    def __init__(self, port: int) -> None:
        import boto3

        self.relay = TcpRelay(port)
        self.environ = {
            "AWS_ACCESS_KEY_ID": "AKIDOFNOBODY12345678",
            "AWS_SECRET_ACCESS_KEY": "a/Secret+AccessKeyOfNobody0123456789abcd",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.relay.port}",
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
        self._n_buckets = 0

    def create_bucket(self) -> str:
        """Create an empty bucket; return the URL of a folder in it."""
        self._n_buckets += 1
        self.client.create_bucket(Bucket=f"bucket-{self._n_buckets}")
        return f"s3://bucket-{self._n_buckets}/run"

    def object_names(self, url: str) -> list[str]:
        """Return the sorted object names in the folder `run` of a URL's bucket."""
        entries = self.client.list_objects_v2(Bucket=url.split("/")[2]).get("Contents", [])
        return sorted(entry["Key"].removeprefix("run/") for entry in entries)

    def steps(self, url: str) -> list[int]:
        """Return the steps that have a COMMIT object."""
        return [int(name[5:13]) for name in self.object_names(url) if name.endswith("/COMMIT")]

    def corrupt(self, url: str, name: str) -> None:
        """Change the last byte of an object and keep its metadata."""
        location = {"Bucket": url.split("/")[2], "Key": f"run/{name}"}
        stored = self.client.get_object(**location)
        data = bytearray(stored["Body"].read())
        data[-1] ^= 1
        self.client.put_object(**location, Body=bytes(data), Metadata=stored["Metadata"])

    def close(self) -> None:
        """Close relay and client."""
        self.relay.down()
        self.client.close()


@contextmanager
def run_s3_server(folder: Path) -> Iterator[MotoServer]:
    """Run a server during the block; its log goes to `folder`.

    Raises:
        ModuleNotFoundError: moto[server] or boto3 is not installed.
    """
    import moto.server as _  # noqa: F401 - raise here instead of in the server process

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    log = folder / "moto.log"
    with open(log, "wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, log.read_text(encoding="utf-8", errors="replace")
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        moto = MotoServer(port)
        try:
            yield moto
        finally:
            moto.close()
    finally:
        server.kill()
        server.wait()
