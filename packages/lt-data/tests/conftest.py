"""Small corpora, a tokenizer and stores whose every token tells where it stands."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from lt_data import Document, Tokenizer, TokenStore, prepare
from lt_data.__main__ import main
from lt_data.store.manifest import DocumentTotals, ShardFile, StoreManifest, StorePart, TokenizerInfo, encode_manifest
from lt_data.store.megatron import encode_index

settings.register_profile("lt", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lt")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WORDS = ["the", "quick", "brown fox", "a", "1234567", "naïve", "東京", "🦊", "\n\tdef f(x):", "x**2\r\n", "don't"]

AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDOFNOBODY12345678",
    "AWS_SECRET_ACCESS_KEY": "a/Secret+AccessKeyOfNobody0123456789abcd",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixty texts of various lengths, one empty and one of a single character."""
    rng = np.random.default_rng(7)
    made = [" ".join(rng.choice(WORDS, size=rng.integers(1, 400))) for _ in range(58)]
    return [*made[:20], "", *made[20:], "x"]


@pytest.fixture(scope="session")
def tokenizer(texts) -> Tokenizer:
    return Tokenizer.train(texts, vocab_size=300)


@pytest.fixture(scope="session")
def documents(texts) -> list[Document]:
    return [Document(text=text, source=f"text {i}") for i, text in enumerate(texts)]


@pytest.fixture
def store(tmp_path, documents, tokenizer) -> TokenStore:
    """The texts as a store of several shards."""
    prepare(documents, tokenizer=tokenizer, out=tmp_path / "store", shard_tokens=2000)
    return TokenStore(tmp_path / "store")


@pytest.fixture(scope="session")
def counting_store(tmp_path_factory) -> Callable[..., TokenStore]:
    """Makes a store of documents of given lengths in which the token at global offset t is t + 1."""

    def make(lengths: Sequence[int], shard_documents: int = 3) -> TokenStore:
        folder = tmp_path_factory.mktemp("store")
        (folder / "shards").mkdir()
        shards: list[ShardFile] = []
        token = 1
        for number, first in enumerate(range(0, len(lengths), shard_documents)):
            part = np.array(lengths[first : first + shard_documents], np.int64)
            content = np.arange(token, token + part.sum(), dtype="<u4").tobytes()
            token += int(part.sum())
            index = encode_index(part, "uint32")
            (folder / "shards" / f"{number:05d}.bin").write_bytes(content)
            (folder / "shards" / f"{number:05d}.idx").write_bytes(index)
            shards.append(
                ShardFile(
                    name=f"{number:05d}",
                    tokens=int(part.sum()),
                    documents=part.size,
                    sha256=hashlib.sha256(content).hexdigest(),
                    idx_sha256=hashlib.sha256(index).hexdigest(),
                )
            )
        manifest = StoreManifest(
            tokenizer=TokenizerInfo(sha256="0" * 64, vocab_size=2**31, files={}, name="counting"),
            bos=False,
            eos=False,
            dtype="uint32",
            parts=(StorePart(shards=tuple(shards)),),
            text_bytes=4 * (token - 1),
            read=DocumentTotals(documents=len(lengths), text_bytes=4 * (token - 1), tokens=token - 1),
            shard_tokens=2**27,
        )
        (folder / "manifest.json").write_bytes(encode_manifest(manifest))
        return TokenStore(folder)

    return make


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds, at most a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def aws() -> dict[str, str]:
    """Environment variables of a client of that server, without its address; nothing of the user's own in them."""
    return dict(AWS)


@pytest.fixture(scope="session")
def moto(tmp_path_factory) -> Iterator[int]:
    """The port of an S3 server in a process of its own, for all tests: a bucket's name is one test's own."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    folder = tmp_path_factory.mktemp("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | AWS)
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None, (folder / "log").read_text(encoding="utf-8")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield port
    server.kill()
    server.wait()


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `lt-data` with some arguments, as installed; gives exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-data", *map(str, arguments)])
        code = main()
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return call
