"""Opening a joined store of very many shards.

    uv run python tools/bench/open_joined.py [--parts 1000] [--shards 100] [--folder F] [--out PAGE]

Makes `--parts` stores of `--shards` shards each (sparse files of full size that read as zeros, with made-up hashes),
joins them with `lt_data.join`, appends a document with `lt_data.append`, and opens the joined store, by its index and
by the manifests of the parts, and its new generation, in processes of their own, imports not counted. 10^5 shards of
2^27 two-byte ids stand for 13 trillion tokens. The folder takes one inode a file and little space. PAGE is
docs/benchmarks/data.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import tokenizers
from stream import format_table, machine_info, replace_section

import lt_data
from lt_data.preparation.prepare_documents import tokenizer_info
from lt_data.store.manifest import DocumentTotals, ShardFile, StoreManifest, encode_manifest
from lt_data.store.megatron import index_size

TOKENS = 2**27  # of a shard
DOCUMENTS = 131_072
ROUNDS = 5

OPEN_SCRIPT = """
import json, sys, time
import numpy as np
from lt_data import TokenStore
import lt_data.store.joined_index
def peak_memory():
    found = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(found["VmHWM"].split()[0])
before, begin, cpu = peak_memory(), time.perf_counter(), time.process_time()
store = TokenStore.open(sys.argv[1])
opened = time.perf_counter() - begin, time.process_time() - cpu
peak = peak_memory()
begin = time.perf_counter()
assert not store.tokens(store.manifest.shard_tokens_each[0] - 2048, 2048).any()
row = time.perf_counter() - begin
print(json.dumps([*opened, (peak - before) / 1024, peak / 1024, 1000 * row, store.n_tokens]))
"""


def make_tokenizer() -> lt_data.Tokenizer:
    """Return a tokenizer of bytes."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={}, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator([], trainer)
    return lt_data.Tokenizer.from_bytes({"tokenizer.json": model.to_str().encode()}, name="bytes")


def make_part(folder: Path, part: int, n_shards: int, tokenizer: lt_data.Tokenizer) -> None:
    """Write a store of holes."""
    (folder / "shards").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    for name, content in tokenizer.files.items():
        (folder / "tokenizer" / name).write_bytes(content)
    shards: list[ShardFile] = []
    for number in range(n_shards):
        digest = hashlib.sha256(f"{part} {number}".encode()).hexdigest()
        for name, size in ((f"{number:05d}.bin", 2 * TOKENS), (f"{number:05d}.idx", index_size(DOCUMENTS))):
            with (folder / "shards" / name).open("wb") as file:
                file.truncate(size)
        shards.append(
            ShardFile(name=f"{number:05d}", tokens=TOKENS, documents=DOCUMENTS, sha256=digest, idx_sha256=digest)
        )
    totals = DocumentTotals(documents=n_shards * DOCUMENTS, text_bytes=4 * n_shards * TOKENS, tokens=n_shards * TOKENS)
    manifest = StoreManifest(
        tokenizer=tokenizer_info(tokenizer),
        bos=False,
        eos=False,
        dtype="uint16",
        shards=tuple(shards),
        text_bytes=totals.text_bytes,
        read=totals,
        shard_tokens=TOKENS,
    )
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))


def measure(folder: Path) -> list[float]:
    """Return the medians over processes that open the store."""
    command = [sys.executable, "-c", OPEN_SCRIPT, str(folder)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*runs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=100, help="of each part")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where = machine_info()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        parts = [root / "parts" / f"{part:05d}" for part in range(options.parts)]
        tokenizer = make_tokenizer()
        for number, part in enumerate(parts):
            make_part(part, number, options.shards, tokenizer)
        begin, cpu = time.perf_counter(), time.process_time()
        lt_data.join(root, parts)
        joining = f"{time.perf_counter() - begin:.0f} s ({time.process_time() - cpu:.0f} of CPU)"
        size = (root / "joined.index").stat().st_size / 2**20
        found = {f"by its index ({size:.1f} MiB)": measure(root)}
        more = root / "more.txt"
        more.write_text("documents " * 1000, encoding="utf-8")
        begin, cpu = time.perf_counter(), time.process_time()
        lt_data.append(root, [more], engine="hf")
        appending = f"{time.perf_counter() - begin:.0f} s ({time.process_time() - cpu:.0f} of CPU)"
        found["its generation with one document more"] = measure(root)
        shutil.rmtree(root / "generations")
        (root / "manifest.json").unlink()
        os.unlink(root / "joined.index")
        with mock.patch("lt_data.store.joined.MIN_INDEXED_SHARDS", 2**62):
            lt_data.join(root, parts)
        found["by the manifests of its parts"] = measure(root)
    head = ["opened", "wall s", "CPU s", "memory MiB", "peak of the process MiB", "first row ms"]
    rows = [
        [how, *(f"{value:.2f}" for value in values[:2]), *(f"{value:.0f}" for value in values[2:5])]
        for how, values in found.items()
    ]
    tokens = next(iter(found.values()))[5]
    title = (
        f"A joined store of {options.parts * options.shards} shards in {options.parts} parts, {tokens:.3g} tokens "
        f"(sparse files); medians of {ROUNDS} processes, imports not counted. Joining took {joining}, "
        f"appending {appending}."
    )
    lines = [title, "", where, "", *format_table(head, rows)]
    print("\n".join(lines))
    if options.out:
        replace_section(options.out, "open_joined", lines)


if __name__ == "__main__":
    main()
