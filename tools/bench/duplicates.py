"""Duplicates among the units of a job: seconds, memory and disk.

    uv run python tools/bench/duplicates.py [--units 64] [--documents 1000000] [--folder F] [--out PAGE]

Makes `--units` units of `--documents` documents each (lists of random hashes and indexes of random lengths; the shards
are sparse), of which about a tenth are in an earlier unit too, and takes the steps that `lt data prepare --unit-bytes
--drop-duplicates` takes after the units: hashes of each unit in order, duplicates by ranges, what is left. Each range
is a process of its own, whose peak memory is told. Everything is checked against one set of all hashes. Needs 100 bytes
of disk a document. PAGE is docs/benchmarks/data.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from open_joined import make_tokenizer
from stream import machine_info, replace_section

import lt_data
from lt_data.preparation.duplicates import count_ranges, write_by_hash
from lt_data.preparation.prepare_documents import tokenizer_info
from lt_data.preparation.store_writer import ENTRY_DTYPE
from lt_data.store.extents import EXTENTS_FILE
from lt_data.store.manifest import DocumentTotals, Selection, ShardFile, StoreManifest, StorePart, encode_manifest
from lt_data.store.megatron import encode_index

REPEATED = 0.1
SHARDS = 8  # of a unit

MEASURE = """
import json, sys, time
from pathlib import Path
from lt_data.preparation.drop_list import write_drop_list
from lt_data.preparation.duplicates import encode_duplicates, find_duplicates
from lt_data.preparation.join import join
from lt_data.store.joined import load_parts
values = json.loads(sys.argv[1])
units = [Path(unit) for unit in values["units"]]
begin, cpu = time.perf_counter(), time.process_time()
{step}
taken = time.perf_counter() - begin, time.process_time() - cpu
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([*taken, peak / 2**20]))
"""
FIND = 'Path(values["out"]).write_bytes(encode_duplicates(find_duplicates(units, *values["range"])))'
LEAVE_OUT = """
root = Path(values["root"])
dropped, extents = write_drop_list(load_parts(units), [Path(file) for file in values["files"]], root / "work")
extents.rename(root / "kept.extents")
join(root, units, dropped=dropped)
"""


def measure(step: str, units: list[Path], **values: object) -> list[float]:
    """Run a step in a process of its own; return its wall time and CPU time in seconds, and peak memory in GiB."""
    given = json.dumps({"units": [*map(str, units)], **values})
    command = [sys.executable, "-c", MEASURE.replace("{step}", step), given]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def make_unit(folder: Path, unit: int, n_units: int, documents: int, tokenizer: lt_data.Tokenizer) -> None:
    """Write a unit whose shards are holes; a tenth of its documents are those of a unit before."""
    rng = np.random.default_rng(unit)
    entries = np.zeros(documents, ENTRY_DTYPE)
    hashes = rng.integers(0, 2**63, (documents, 2), dtype=np.int64)
    if unit:
        n = int(REPEATED * documents)
        earlier = np.random.default_rng(int(rng.integers(unit))).integers(0, 2**63, (documents, 2), dtype=np.int64)
        places = rng.choice(documents, n, replace=False)
        hashes[places] = earlier[rng.choice(documents, n, replace=False)]
    entries["hash"] = hashes.view("S16").ravel()
    lengths = rng.integers(50, 2000, documents)
    entries["tokens"], entries["text_bytes"] = lengths, 4 * lengths
    for name in ("shards", "tokenizer", "part"):
        (folder / name).mkdir(parents=True)
    for name, content in tokenizer.files.items():
        (folder / "tokenizer" / name).write_bytes(content)
    files = {"sources": b"", "documents": entries.tobytes(), "special": b""}
    for name, content in files.items():
        (folder / "part" / name).write_bytes(content)
    shards: list[ShardFile] = []
    for number, of_shard in enumerate(np.array_split(lengths, SHARDS)):
        index, tokens = encode_index(of_shard, "uint16"), int(of_shard.sum())
        (folder / "shards" / f"{number:05d}.idx").write_bytes(index)
        with (folder / "shards" / f"{number:05d}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        sha256 = hashlib.sha256(index).hexdigest()
        shards.append(
            ShardFile(name=f"{number:05d}", tokens=tokens, documents=of_shard.size, sha256=sha256, idx_sha256=sha256)
        )
    totals = DocumentTotals(documents=documents, text_bytes=4 * int(lengths.sum()), tokens=int(lengths.sum()))
    manifest = StoreManifest(
        tokenizer=tokenizer_info(tokenizer),
        bos=False,
        eos=False,
        dtype="uint16",
        shards=tuple(shards),
        text_bytes=totals.text_bytes,
        read=totals,
        selection=Selection(drop_duplicates=True),
        shard_tokens=2**27,
        part=StorePart(
            index=unit,
            num_parts=n_units,
            listing_fingerprint=hashlib.sha256(b"").hexdigest(),
            files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        ),
    )
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))


def expected_duplicates(units: list[Path]) -> np.ndarray:
    """Return unit << 32 | document of all duplicates, found with one sort of everything (u64)."""
    hashes = np.concatenate([np.fromfile(unit / "part" / "documents", ENTRY_DTYPE)["hash"] for unit in units])
    _, first = np.unique(hashes, return_index=True)
    repeated = np.ones(hashes.size, bool)
    repeated[first] = False
    sizes = hashes.size // len(units)
    places = np.flatnonzero(repeated)
    return (places // sizes).astype("<u8") << np.uint64(32) | (places % sizes).astype("<u8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--documents", type=int, default=1_000_000, help="of each unit")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        units = [root / f"{number:05d}" for number in range(args.units)]
        tokenizer = make_tokenizer()
        for number, unit in enumerate(units):
            make_unit(unit, number, args.units, args.documents, tokenizer)
        n = args.units * args.documents
        begin, cpu = time.perf_counter(), time.process_time()
        for unit in units:
            write_by_hash(unit)
        by_hash = time.perf_counter() - begin, time.process_time() - cpu
        n_ranges = count_ranges(n)
        files = [root / f"duplicates-{index}" for index in range(n_ranges)]
        runs = [measure(FIND, units, range=[i, n_ranges], out=str(file)) for i, file in enumerate(files)]
        wall, cpu_s, peaks = zip(*runs, strict=True)
        found = np.sort(np.frombuffer(b"".join(file.read_bytes() for file in files), "<u8"))
        assert np.array_equal(found, expected_duplicates(units)), "other duplicates than those of one set"
        (root / "work").mkdir()
        left = measure(LEAVE_OUT, units, root=str(root), files=[*map(str, files)])
        begin = time.perf_counter()
        store = lt_data.TokenStore.open(root)
        opened = time.perf_counter() - begin
        assert store.n_documents == n - found.size
        dropped = store.manifest.dropped
        assert dropped is not None
        size = (root / EXTENTS_FILE).stat().st_size / 2**20
        lines = [
            f"{n:,} documents in {args.units} units, of which {found.size:,} are in an earlier one; {n_ranges} ranges.",
            "",
            machine_info(),
            "",
            "| step | wall s | CPU s | peak of a process, GiB |",
            "| --- | --- | --- | --- |",
            f"| hashes of the units in order | {by_hash[0]:.1f} | {by_hash[1]:.1f} | |",
            f"| duplicates, one range after the other | {sum(wall):.1f} | {sum(cpu_s):.1f} | {max(peaks):.2f} |",
            f"| {dropped.extents:,} extents, {size:.0f} MiB | {left[0]:.1f} | {left[1]:.1f} | {left[2]:.2f} |",
            f"| opening | {opened:.2f} | | |",
        ]
        print("\n".join(lines))
        if args.out:
            replace_section(args.out, "duplicates", lines)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
