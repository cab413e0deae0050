"""A hub on this machine, by HTTP, that can be told to fail: one model repository, org/name, with one commit."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from safetensors.numpy import save

TOKEN = "hf_aVerySecretToken"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass
class FakeHub:
    """One model repository, org/name, with one commit, and what is to go wrong.

    Attributes:
        served: File → other bytes than the repository lists.
        refuses: Part of a path → the status and the code of the answer.
        damage: Applied to what an upload sends.
    """

    endpoint: str = ""
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    files: dict[str, bytes] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    exists: bool = True
    is_private: bool | None = None
    damage: Callable[[bytes], bytes] = lambda data: data
    log: list[tuple[str, str]] = field(default_factory=list)

    def hash(self, name: str) -> str:
        data = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest() if is_large(name) else blob

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": self.hash(name)[:40]}
            | ({"lfs": {"oid": self.hash(name), "size": len(data), "pointerSize": 134}} if is_large(name) else {})
            for name, data in self.files.items()
        ]

    def fetched(self) -> list[str]:
        return sorted(
            path.partition("/resolve/")[2][41:] for method, path in self.log if method == "GET" if "/resolve/" in path
        )


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        size = int(self.headers["Content-Length"] or 0)
        body = self.rfile.read(size) if self.headers["Transfer-Encoding"] != "chunked" else self.read_chunks()
        self.hub.log.append((self.command, path))
        status, answer, headers = self.respond(path, body)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_HEAD = do_POST = do_PUT = do_GET

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size + 2)[:size]
        self.rfile.readline()
        return body

    def respond(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        hub, repo = self.hub, "/api/models/org/name"
        for part, (status, code) in hub.refuses.items():
            if part in path:
                return status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"said of {code}"}
        if self.headers.get("Authorization", "") not in (f"Bearer {TOKEN}", "" if self.command != "POST" else "-"):
            return 401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            status, hub.exists = (409 if hub.exists else 200), True
            hub.is_private = json.loads(body).get("private", "private" in str(body))
            return status, json.dumps({"url": f"{hub.endpoint}/org/name"}).encode(), {}
        if path == repo:
            return 200, b'{"id": "org/name"}', {}
        if path == "/api/validate-yaml":
            return 200, b'{"errors": [], "warnings": []}', {}
        if path.startswith("/upload/"):
            hub.served[path] = body
            return 200, b"", {}
        if not hub.exists or not path.startswith((repo, "/org/name")):
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/org/name/resolve/"):
            name = path[len("/org/name/resolve/") + 41 :]
            data = hub.served.get(name, hub.files[name])
            return 200, data, {"X-Repo-Commit": hub.commit, "ETag": f'"{hub.hash(name)}"'}
        if path.startswith((f"{repo}/revision/", f"{repo}/tree/")):
            if path.partition("/revision/" if "/revision/" in path else "/tree/")[2] not in (
                "main",
                "refs/pr/1",
                hub.commit,
            ):
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            found = hub.tree() if "/tree/" in path else {"id": "org/name", "sha": hub.commit, "siblings": []}
            return 200, json.dumps(found).encode(), {"Content-Type": "application/json"}
        return 200, json.dumps(self.take(path, body)).encode(), {"Content-Type": "application/json"}

    def take(self, path: str, body: bytes) -> dict[str, Any]:
        """Take what an upload sends: the names of its files, the objects that are missing, and the commit."""
        hub, values = self.hub, [json.loads(line) for line in body.splitlines()]
        if "/preupload/" in path:
            modes = {True: "lfs", False: "regular"}
            names = [file["path"] for file in values[0]["files"]]
            return {"files": [{"path": n, "uploadMode": modes[is_large(n)], "shouldIgnore": False} for n in names]}
        if path.endswith("/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{hub.endpoint}/upload/{wanted['oid']}"}}}
                for wanted in values[0]["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        assert path == "/api/models/org/name/commit/main", path
        for operation in values[1:]:
            value = operation["value"]
            is_object = operation["key"] == "lfsFile"
            data = hub.served[f"/upload/{value['oid']}"] if is_object else base64.b64decode(value["content"])
            hub.files[value["path"]] = hub.damage(data)
        hub.commit = f"{int(hub.commit, 16) + 1:040x}"
        return {"commitOid": hub.commit, "commitUrl": f"{hub.endpoint}/org/name/commit/x"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[FakeHub]:
    """A hub with a model of two shards; this process is set to it, with nothing of the user's own."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from huggingface_hub import constants

    rng = np.random.default_rng(0)
    arrays = {SHARDS[0]: {"a": rng.standard_normal((30, 50))}, SHARDS[1]: {"b": rng.standard_normal((20, 50))}}
    weight_map = {key: name for name, members in arrays.items() for key in members}
    made = FakeHub()
    made.files = {
        "README.md": b"# a model",
        "config.json": b'{"model_type": "llama"}',
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "pytorch_model.bin": b"a pickle",
        "script.py": b"raise SystemExit",
        "tokenizer.json": b'{"version": "1.0"}',
        **{name: save(members) for name, members in arrays.items()},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": made}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    # What the library read of the environment when it was imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
