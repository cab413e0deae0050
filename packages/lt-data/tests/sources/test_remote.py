"""Files over http and S3, from real servers of this machine: whole, broken, and not there."""

import gzip
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lt_data import DataError, SourceOptions
from lt_data.sources.reader import DocumentReader, read_documents

TEXTS = [f"document {i} é" for i in range(2000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet() -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), out, row_group_size=300)
    return out.getvalue()


@dataclass
class Web:
    """Files by path, and how the server behaves."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tells_length: bool = True
    cut: int | None = None  # bodies end after so many bytes, with the connection
    status: int = 200
    asked: list[str] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        web = self.web
        web.asked.append(self.path)
        content = web.files.get(urlsplit(self.path).path.lstrip("/"))
        if content is None or web.status != 200:
            self.send_response(404 if content is None else web.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, headers = 200, {}
        if web.ranges:
            headers["Accept-Ranges"] = "bytes"
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                end = min(int(last) + 1 if last else len(content), len(content))
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
                content, status = content[int(first) : end], 206
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if web.tells_length:
            self.send_header("Content-Length", str(len(content)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: web.cut])
            if web.cut is not None:
                self.close_connection = True

    do_HEAD = do_GET


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    import fsspec.implementations.http

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    made = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("WebHandler", (Handler,), {"web": made}))
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    fsspec.implementations.http.HTTPFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tells_length", [True, False])
def test_http(web: Web, ranges: bool, tells_length: bool) -> None:
    web.ranges, web.tells_length = ranges, tells_length
    web.files = {"d/x.jsonl": LINES, "d/x.jsonl.gz": gzip.compress(LINES), "d/x.parquet": parquet()}
    for name, content in web.files.items():
        url = web.url(f"{name}?signature=secret#part")
        reader = DocumentReader([url])
        found = list(reader)
        assert [d.text for d in found] == TEXTS
        assert found[1].source == f"{web.url(name)}{'#' if name.endswith('parquet') else ':'}2"
        (file,) = reader.finished_files
        assert (file.path, file.bytes) == (web.url(name), len(content))
        assert "secret" not in reader.fingerprint + repr(reader.source_files()) + repr(found[1])
    assert any("signature=secret" in path for path in web.asked)


def test_http_faults(web: Web) -> None:
    web.files = {"x.jsonl": LINES, "x.parquet": parquet(), "x.jsonl.gz": gzip.compress(LINES)}
    with pytest.raises(DataError, match=rf"cannot read {web.url('nowhere.txt')}: .*; check the path"):
        read_documents([web.url("nowhere.txt?signature=secret")])
    for status in (403, 500, 503):
        web.status = status
        with pytest.raises(DataError, match=rf"cannot read {web.url('x.jsonl')}: .*") as caught:
            list(read_documents([web.url("x.jsonl?signature=secret")]))
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cut", "ranges"),
    [("x.jsonl", 2000, True), ("x.jsonl", 0, False), ("x.parquet", 1, False), ("x.jsonl.gz", 99, True)],
)
def test_a_transfer_that_is_cut_off_is_never_skipped(web: Web, name: str, cut: int, ranges: bool) -> None:
    web.ranges = ranges
    web.files = {"x.jsonl": LINES, "x.parquet": parquet(), "x.jsonl.gz": gzip.compress(LINES)}
    reader = DocumentReader([web.url(f"{name}?signature=secret")], SourceOptions(on_bad="skip"))
    web.cut = cut
    with pytest.raises(DataError, match=name) as caught:
        list(reader)
    assert "secret" not in str(caught.value)


def test_user_and_password_of_a_url_are_not_shown() -> None:
    from lt_data.file_names import redact_url

    url = "https://user:secret@host:8080/a/x.jsonl?token=secret#secret"
    assert redact_url(url) == "https://host:8080/a/x.jsonl"
    for same in ("s3://bucket/a?b#c", "hf://name@v1?split=train", "hf://datasets/org/name@v1/a", "/a/b@c?d", "C:x"):
        assert redact_url(same) == same
    assert redact_url(f"zip://x.jsonl::{url}") == "zip://x.jsonl::https://host:8080/a/x.jsonl"
    assert redact_url("smb://user:secret@host/a?b") == "smb://host/a?b"
    assert redact_url("https://user:secret@[host/a") == "https://..."


def test_s3(s3, tmp_path: Path) -> None:
    s3.mkdir("bucket")
    for name, content in {
        "corpus/b.jsonl": LINES,
        "corpus/a/x.parquet": parquet(),
        "corpus/B.txt": b"text",
        "corpus/skip.bin": b"x",
        "saved/state.json": json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode(),
        "saved/dataset_info.json": b"{}",
    }.items():
        s3.pipe(f"bucket/{name}", content)
    reader = DocumentReader(["s3://bucket/corpus"])
    found = list(reader)
    assert [d.text for d in found] == ["text", *TEXTS, *TEXTS]
    assert [file.path for file in reader.finished_files] == [
        "s3://bucket/corpus/B.txt",
        "s3://bucket/corpus/a/x.parquet",
        "s3://bucket/corpus/b.jsonl",
    ]
    assert found[-1].source == "s3://bucket/corpus/b.jsonl:2000"
    divided = reader.divided(9000)
    assert divided.n_files > 4
    assert [d.text for d in divided] == [d.text for d in found]
    with pytest.raises(
        DataError, match=r"bucket/saved/data-00000-of-00001\.arrow: a file of the saved dataset is missing"
    ):
        read_documents(["s3://bucket/saved"])
    for wrong in ("s3://bucket/nowhere", "s3://nobucket/x.txt"):
        with pytest.raises(DataError, match=f"cannot read {wrong}: .*"):
            read_documents([wrong])
    s3.pipe("bucket/gone.jsonl", LINES)
    gone = DocumentReader(["s3://bucket/gone.jsonl"], SourceOptions(on_bad="skip"))
    s3.rm("bucket/gone.jsonl")
    with pytest.raises(DataError, match=r"cannot read s3://bucket/gone\.jsonl: .*"):
        list(gone)
