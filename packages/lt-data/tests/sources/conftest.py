"""A hub of datasets on this machine: the endpoints that `datasets` and `huggingface_hub` ask for, as far as they do."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = COMMIT[::-1]


@dataclass
class Hub:
    """Datasets by name, each a mapping from file to content; with "@v1" behind the name an older state of it.

    `private`: names that only a token opens. `asked`: the requests.
    """

    home: Path
    port: int = 0
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What points a process here, with nothing of the user's own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        switches = (
            "DATASETS_DISABLE_PROGRESS_BARS",
            "HUB_DISABLE_PROGRESS_BARS",
            "HUB_DISABLE_TELEMETRY",
            "HUB_DISABLE_XET",
        )
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(self.home), "no_proxy": "127.0.0.1"}
        return {**kept, **own, **{f"HF_{name}": "1" for name in switches}}

    def run(self, *command: str, given: str = "", folder: Path | None = None, **environment: str) -> str:
        """Standard output of a Python program that has this hub."""
        made = subprocess.run(
            [sys.executable, *command],
            input=given,
            env=self.environment | environment,
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert made.returncode == 0, made.stderr
        return made.stdout


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path).lstrip("/")
        api = path.startswith("api/datasets/")
        repo, _, rest = path.removeprefix("api/").removeprefix("datasets/").partition("/")
        if repo not in self.hub.files:
            name, _, rest = rest.partition("/")
            repo = f"{repo}/{name}"
        if repo not in self.hub.files or (repo in self.hub.private and not self.headers.get("Authorization")):
            return self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        kind, _, rest = rest.partition("/")
        revision, _, name = rest.replace("refs/convert/parquet", "converted").partition("/")
        older = revision in ("v1", OLDER)
        if kind and not older and revision not in ("main", "converted", COMMIT):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        files = self.hub.files[f"{repo}@v1" if older else repo]
        if not api:
            return self.content(files, name)
        if kind in ("", "revision"):
            siblings = [{"rfilename": n, "size": len(data), "blobId": _blob(data)} for n, data in files.items()]
            return self.json(
                {"id": repo, "sha": OLDER if older else COMMIT, "private": False, "tags": [], "siblings": siblings}
            )
        if kind == "tree":
            return self.json(_tree(files, name, "recursive=true" in self.path.lower()))
        if kind == "paths-info":
            paths = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
            everything = _tree(files, "", True)
            return self.json([entry for entry in everything if entry["path"] in paths])
        return self.answer(404, {})

    do_HEAD = do_POST = do_GET

    def content(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        data = files[name]
        commit = OLDER if OLDER in self.path else COMMIT
        headers = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not (wanted := self.headers.get("Range")):
            return self.answer(200, headers, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = min(int(last) + 1 if last else len(data), len(data))
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        return self.answer(206, headers, data[int(first) : end])

    def json(self, value: Any) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"{}") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    prefix = f"{folder}/" if folder else ""
    for name, data in files.items():
        if not name.startswith(prefix):
            continue
        parts = name.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            path = prefix + "/".join(parts[:depth])
            entries[path] = {"type": "directory", "path": path, "oid": "1" * 40, "size": 0}
        if recursive or len(parts) == 1:
            entries[name] = {"type": "file", "path": name, "oid": _blob(data), "size": len(data)}
    return list(entries.values())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """An empty hub; whoever reads from it does so in a process of its own, since the hub's address is an import's."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    made = Hub(home=tmp_path_factory.mktemp("hub-home"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": made}))
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def s3(moto: int, aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    import fsspec

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**aws, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{moto}"}.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3")
    yield filesystem
    type(filesystem).clear_instance_cache()


def _pdf(pages: list[str]) -> bytes:
    """A PDF by hand: one line of text per page, and a table of objects with their true offsets."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {len(objects)} 0 R >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode("latin-1")


@pytest.fixture(scope="session")
def make_pdf() -> Callable[[list[str]], bytes]:
    return _pdf
