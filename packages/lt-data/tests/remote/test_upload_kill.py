"""kill -9 in the middle of an upload: nothing half stands as a whole, and the next call makes the same objects.

The moment is the n-th request that the process makes, so that every kind of request is hit, and no clock decides.
LT_KILLS and LT_SEED choose how many kills the slow test counts, and which.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import TokenStore, pack
from lt_data.remote.contents import LISTING
from lt_data.remote.fetching import download

PART = 5 * 2**20
KILLS = int(os.environ.get("LT_KILLS", "100"))
SEED = int(os.environ.get("LT_SEED", "0"))
Upload = Callable[[Path, str, int], int]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(store: TokenStore, tmp_path: Path) -> Path:
    pack(store, seq_len=64)
    (store.path / "large.bin").write_bytes(np.random.default_rng(5).bytes(2 * PART + 54321))
    return store.path


@pytest.fixture
def killed_upload(proxy: Any) -> Iterator[Upload]:
    """Uploads in a process that is killed when it makes its n-th request; gives back its exit code."""
    command = [sys.executable, str(Path(__file__).with_name("uploader.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=dict(os.environ)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stdin, stdout = process.stdin, process.stdout

        def run(folder: Path, url: str, at: int) -> int:
            begun = threading.Event()
            child = [0]
            count = [0]

            def plan(request: Any) -> tuple[str] | None:
                count[0] += 1
                if count[0] == at:
                    assert begun.wait(60)
                    os.kill(child[0], signal.SIGKILL)
                # What the dead one had on the wire may have arrived, or not.
                return ("reset",) if count[0] > at and at else None

            proxy.fault = plan
            stdin.write(f"{folder}\t{url}\t{PART}\n")
            child[0] = int(stdout.readline())
            begun.set()
            code = int(stdout.readline())
            proxy.fault = lambda request: None
            return code

        yield run
        stdin.close()


def check(folder: Path, bucket: Any, upload: Upload, rng: random.Random) -> int:
    """One upload that is killed, perhaps twice, and repeated; gives back how often it was killed."""
    for name in bucket.objects():
        bucket.delete(name)
    wanted = tree(folder)
    kills = 0
    for _ in range(rng.randint(1, 2)):
        code = upload(folder, bucket.url, rng.randint(1, 36))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        objects = bucket.objects()
        assert all(wanted[name] == content for name, content in objects.items() if name != LISTING)
        if "manifest.json" in objects:
            assert LISTING in objects
            assert wanted.keys() <= objects.keys(), "a store is there whole or not at all"
    assert upload(folder, bucket.url, 0) == 0
    objects = bucket.objects()
    assert objects.pop(LISTING)
    assert objects == wanted
    assert bucket.unfinished() == []
    return kills


def test_some_kills(folder: Path, bucket: Any, killed_upload: Upload, tmp_path: Path) -> None:
    assert killed_upload(folder, bucket.url, 0) == 0
    listing = bucket.objects()[LISTING]
    rng = random.Random(SEED)
    for _ in range(3):
        check(folder, bucket, killed_upload, rng)
        assert bucket.objects()[LISTING] == listing
    download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(folder)


@pytest.mark.slow
def test_many_kills(folder: Path, bucket: Any, killed_upload: Upload) -> None:
    rng = random.Random(SEED + 1)
    kills = 0
    while kills < KILLS:
        kills += check(folder, bucket, killed_upload, rng)
    sys.stderr.write(f"\n{kills} uploads killed; every store whole after the next call\n")
