"""Random flips, cuts and edits of files: no altered document and no false hash wherever the format has a check.

LT_FUZZ sets the number of damaged files of the slow test, LT_SEED their choice.
"""

import gzip
import hashlib
import io
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from lt_data import DataError, DocumentReader, SourceOptions

CI_TRIALS = 150
TRIALS = int(os.environ.get("LT_FUZZ", "10000"))
SEED = int(os.environ.get("LT_SEED", "22"))
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "東京", "naïve", "don't"]
TEXTS = [f"{i} {' '.join(random.Random(i).choices(WORDS, k=random.Random(-i).randrange(40)))}" for i in range(300)]
LINES = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in TEXTS]
CONTENT = b"".join(LINES)
BLOCKS = [b"".join(LINES[i : i + 25]) for i in range(0, 300, 25)]


def _zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def _parquet(version: str, compression: str, *, dictionary: bool) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(
        pa.table({"url": [f"https://example.org/{i}" for i in range(300)], "text": TEXTS}),
        out,
        row_group_size=120,
        data_page_size=1500,
        write_batch_size=10,
        write_page_checksum=True,
        data_page_version=version,
        compression=compression,
        use_dictionary=dictionary,
    )
    return out.getvalue()


def _files() -> dict[str, tuple[str, list[bytes]]]:
    """Files by kind: suffix, and the parts between which a cut cannot be noticed."""
    return {
        "gzip": (".jsonl.gz", [gzip.compress(CONTENT, mtime=0)]),
        "gzip members": (".jsonl.gz", [gzip.compress(block, mtime=0) for block in BLOCKS]),
        "zstd": (".jsonl.zst", [_zstd(CONTENT)]),
        "zstd frames": (".jsonl.zst", [_zstd(block) for block in BLOCKS]),
        "parquet": (".parquet", [_parquet("1.0", "snappy", dictionary=True)]),
        "parquet v2": (".parquet", [_parquet("2.0", "none", dictionary=False)]),
        "jsonl": (".jsonl", LINES),
    }


def _damage(rng: random.Random, whole: bytes) -> bytes:
    at = rng.randrange(len(whole))
    size = rng.choice([1, 2, 4, 100, 3000])
    return rng.choice(
        [
            lambda: whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :],  # flip
            lambda: whole[:at],  # cut
            lambda: whole[:at] + rng.randbytes(size) + whole[at + size :],  # overwritten
            lambda: whole[:at] + bytes(size) + whole[at + size :],  # a hole
            lambda: whole[:at] + whole[at + size :],  # deleted
            lambda: whole[:at] + rng.randbytes(size) + whole[at:],  # inserted
            lambda: whole[:at] + whole[at : at + size] + whole[at:],  # repeated
        ]
    )()


def _check(path: Path, kind: str, parts: list[bytes], damaged: bytes) -> str:
    """Read a damaged file in both ways; return its fate."""
    path.write_bytes(damaged)
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    found = [document.text for document in reader]
    (file,) = reader.finished_files
    assert (file.bytes, file.sha256) == (len(damaged), hashlib.sha256(damaged).hexdigest())
    if kind == "jsonl":
        assert file.unchecked == "jsonl"
        intact = Counter(damaged.split(b"\n")) & Counter(whole.rstrip() for whole in LINES)
        assert not Counter(json.loads(line)["text"] for line in intact.elements()) - Counter(found)
        return "whole lines kept"
    cuts = [b"".join(parts[:n]) for n in range(len(parts))]
    if file.unchecked:  # the damage hit the flag of the checksum
        assert kind.startswith("zstd")
    assert found == TEXTS[: len(found)], "an altered document"
    try:
        assert [document.text for document in DocumentReader([path])] == found
    except DataError:
        assert reader.skipped, "an error, and nothing skipped"
        return "some kept" if found else "none kept"
    assert not reader.skipped
    assert found == TEXTS or damaged in cuts, "documents lost without a word"
    return "all kept"


def _run(folder: Path, trials: int) -> dict[str, Counter[str]]:
    rng = random.Random(SEED)
    fates: dict[str, Counter[str]] = {}
    files = _files()
    for trial in range(trials):
        kind = list(files)[trial % len(files)]
        suffix, parts = files[kind]
        damaged = _damage(rng, b"".join(parts))
        try:
            fate = _check(folder / f"x{suffix}", kind, parts, damaged)
        except AssertionError as exc:
            raise AssertionError(f"trial {trial} of {kind}: {exc}") from exc
        fates.setdefault(kind, Counter())[fate] += 1
    return fates


def test_a_sample_of_damaged_files(tmp_path: Path) -> None:
    fates = _run(tmp_path, CI_TRIALS)
    assert all(fates[kind]["some kept"] for kind in ("gzip members", "zstd frames", "parquet", "parquet v2"))
    assert fates["gzip"]["some kept"] < fates["gzip"]["none kept"] / 10  # damage after the member


@pytest.mark.slow
def test_many_damaged_files(tmp_path: Path) -> None:
    fates = _run(tmp_path, TRIALS)
    for kind, counts in fates.items():
        sys.stdout.write(f"{kind}: {dict(counts)}\n")
