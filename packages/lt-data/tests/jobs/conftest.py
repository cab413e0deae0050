"""A small corpus of many kinds of documents, and ways to look at folders."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lt_data
from lt_data.store.manifest import Selection

WORDS = ["the", "quick", "brown fox", "a", "1234567", "naïve", "東京", "x**2", "don't", "<|eos|>"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Nine files: text and JSON lines with repeated, empty and broken lines; the last file is a repeated one."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(11)

    def text(most: int = 60) -> str:
        return " ".join(rng.choice(WORDS, size=rng.integers(1, most)))

    known = [text() for _ in range(6)]
    for number in range(7):
        if number % 3 == 2:
            (folder / f"{number}.txt").write_text(text(200), encoding="utf-8")
            continue
        lines = [json.dumps({"text": known[i] if i < 6 else text()}) for i in rng.permutation(14)]
        lines.insert(3, json.dumps({"text": ""}))
        lines.insert(5, '{"text": broken')
        lines.append(json.dumps({"text": known[2]}))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "7.txt").write_text("", encoding="utf-8")
    (folder / "8.txt").write_bytes((folder / "2.txt").read_bytes())
    return folder


@pytest.fixture(scope="session")
def chosen() -> Selection:
    return Selection(min_characters=12, max_characters=340, min_tokens=12, max_tokens=110, drop_duplicates=True)


@pytest.fixture(scope="session")
def options(tokenizer, chosen) -> dict[str, Any]:
    """The options of `prepare` that the tests of this folder share."""
    return {
        "tokenizer": tokenizer,
        "engine": "hf",
        "options": lt_data.SourceOptions(on_bad="skip"),
        "shard_tokens": 150,
        "selection": chosen,
    }


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: these tests sync often."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="lt-data-", dir=shared if os.access(shared, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fast_path(memory) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_BYTES", 300)


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """The files below a folder."""

    def read(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read


@pytest.fixture(scope="session")
def whole(tmp_path_factory, corpus, options, contents) -> dict[str, bytes]:
    """The files of the store that an undisturbed run makes of the corpus."""
    out = tmp_path_factory.mktemp("whole") / "store"
    lt_data.prepare([corpus], out=out, **options)
    return contents(out)


def _killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run in a child that dies at a call that changes the disk; return True if it did."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    made = 0

    def follow(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            result = real(*args, **kwargs)
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return count

    try:
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, follow(getattr(os, name)))
        work()
    finally:
        os._exit(0)


@pytest.fixture(scope="session")
def killed_at() -> Callable[[int, Callable[[], object]], bool]:
    return _killed_at
