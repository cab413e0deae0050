"""Cost of opening and reading a token store, each relative to the limit of this machine.

    uv run python tools/bench/stream.py [open gather shards] [--folder F]

    open    a store of 10^10 tokens (sparse files): open it and its pack, and return the batch of step 10^6; in
            subprocesses, wall seconds and memory
    gather  batches of random rows, against the memcpy of the same rows (one loop in C over precomputed offsets), and
            the batches of a shuffled stream; CPU seconds, ratios within a round, medians of rounds, from the page cache
    shards  the same ids in 1, 300 and 5000 shards, rows of 2048: microseconds of CPU a random row, medians of rounds

The folder takes 1.2 GB and is emptied at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import describe_machine, format_table, run_child

from lt_data import RowReader, Stream, TokenStore
from lt_data.packing.packs import pack
from lt_data.store.manifest import DocumentTotals, ShardFile, StoreManifest, StorePart, TokenizerInfo
from lt_data.store.megatron import encode_index, index_size

SEQ_LEN = 4096
BATCH = 256
ROUNDS = 9
OPEN_TOKENS = 10**10
STORE_TOKENS, SHARD_TOKENS = 200_000_000, 120_000_000


def lognormal_lengths(n: int, median: float) -> np.ndarray:
    """Return document lengths distributed as in text."""
    return np.random.default_rng(0).lognormal(np.log(median), 1.2, n).astype(np.int64) + 1


def make_store(folder: Path, lengths: np.ndarray, shard_tokens: int, *, sparse: bool = False) -> TokenStore:
    """Create a store of random 2-byte ids, or of holes that read as zeros, without hashes.

    Args:
        folder: new folder.
        lengths: tokens of each document.
        shard_tokens: tokens of a shard, at most.
        sparse: write holes.
    """
    (folder / "shards").mkdir(parents=True)
    rng = np.random.default_rng(1)
    ends = np.cumsum(lengths)
    shards: list[ShardFile] = []
    first = begin = 0
    while first < lengths.size:
        last = max(first + 1, int(np.searchsorted(ends, begin + shard_tokens, side="right")))
        tokens = int(ends[last - 1]) - begin
        name = f"{len(shards):05d}"
        with (folder / "shards" / f"{name}.bin").open("wb") as file:
            if sparse:
                file.truncate(2 * tokens)
            else:
                rng.integers(0, 60_000, tokens, dtype=np.uint16).tofile(file)
        with (folder / "shards" / f"{name}.idx").open("wb") as file:
            if sparse:
                file.truncate(index_size(last - first))
            else:
                file.write(encode_index(lengths[first:last], "uint16"))
        shards.append(ShardFile(name=name, tokens=tokens, documents=last - first, sha256="0" * 64, idx_sha256="0" * 64))
        first, begin = last, int(ends[last - 1])
    info = TokenizerInfo(sha256="0" * 64, vocab_size=60_000, files={}, name="bench")
    n_tokens = int(ends[-1])
    manifest = StoreManifest(
        tokenizer=info,
        bos=False,
        eos=True,
        dtype="uint16",
        parts=(StorePart(shards=tuple(shards)),),
        text_bytes=4 * n_tokens,
        read=DocumentTotals(documents=lengths.size, text_bytes=4 * n_tokens, tokens=n_tokens),
        shard_tokens=2**27,
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.to_dict()), encoding="utf-8")
    return TokenStore(folder)


def make_reader(store: TokenStore, mode: Any, seq_len: int = SEQ_LEN) -> RowReader:
    return RowReader(store, pack(store, seq_len=seq_len, mode=mode))


OPEN_SCRIPT = """
import json, sys, time
import numpy as np
from lt_data import RowReader, Stream, TokenStore, open_pack
from lt_data.streaming.stream import StreamState
from lt_data.streaming.stream import sequence_fingerprint
def memory():
    found = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return [int(found[name].split()[0]) for name in ("RssAnon", "RssFile")]
RowReader, Stream, np.zeros(1)
before, begin, cpu = memory(), time.perf_counter(), time.process_time()
store = TokenStore(sys.argv[1])
reader = RowReader(store, open_pack(store, seq_len=4096, mode=sys.argv[2]))
position = 10**6 * 256
state = StreamState(step=10**6, row=position, seed=1, fingerprint=sequence_fingerprint(reader, shuffle=True))
stream = Stream(reader, global_batch_size=256, dp_rank=3, dp_size=8, seed=1, state=state)
batch = stream.next()
wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
after = memory()
own, mapped = ((after[i] - before[i]) / 1024 for i in range(2))
print(json.dumps({"wall_ms": 1000 * wall, "cpu_ms": 1000 * cpu, "own_mib": own, "mapped_mib": mapped,
    "tokens": store.n_tokens, "rows": reader.n_rows, "shape": batch.tokens.input_ids.shape}))
"""


def write_sparse_pack(store: TokenStore, mode: str, documents_per_row: int) -> None:
    """Write a pack of full size with minimal contents."""
    rows = store.n_tokens // SEQ_LEN
    span = SEQ_LEN // documents_per_row
    n = rows * documents_per_row
    folder = store.path / "packs" / f"{mode}-{SEQ_LEN}"
    folder.mkdir(parents=True)
    arrays: dict[str, np.ndarray] = {
        "row_offsets": np.arange(0, n + 1, documents_per_row, dtype=np.int64),
        "document": np.arange(n, dtype=np.uint32),
        "start": np.arange(0, n * span, span, dtype=np.int64),
        "length": np.full(n, span, np.int32),
        "valid": np.full(rows, documents_per_row * (span - 1), np.int32),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    header = {
        "format": "lt-data-pack",
        "version": 2,
        "seq_len": SEQ_LEN,
        "mode": mode,
        "rows": rows,
        "slices": n,
        "store_fingerprint": store.manifest.fingerprint,
        "max_slices_per_row": documents_per_row,
        "fingerprint": hashlib.sha256(mode.encode()).hexdigest(),
    }
    (folder / "pack.json").write_text(json.dumps(header), encoding="utf-8")


def bench_open(folder: Path) -> list[list[str]]:
    """Open a store of N tokens and start at step 10^6; medians of seven processes."""
    store = make_store(folder / "sparse", np.full(OPEN_TOKENS // 512, 512, np.int64), 2**27, sparse=True)
    write_sparse_pack(store, "bfd", 8)
    found = [run_child([sys.executable, "-c", OPEN_SCRIPT, store.path, "bfd"]) for _ in range(7)]
    assert found[0]["shape"] == [32, SEQ_LEN]
    size = [f"{found[0]['tokens']:.3g}", str(len(store.manifest.shards)), str(found[0]["rows"])]
    medians = [statistics.median(one[name] for one in found) for name in ("wall_ms", "cpu_ms", "own_mib", "mapped_mib")]
    return [[*size, *(f"{value:.1f}" for value in medians)]]


def measure_cpu(functions: dict[str, Callable[[np.ndarray], Any]], n_rows: int, repeat: int) -> dict[str, list[float]]:
    """Return CPU seconds of `repeat` calls of each function with the numbers of random rows, in every round."""
    rng, found = np.random.default_rng(2), {name: list[float]() for name in functions}
    for turn in range(ROUNDS):
        names = list(functions)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            batches = [rng.integers(0, n_rows, BATCH) for _ in range(repeat)]
            begin = time.process_time()
            for batch in batches:
                functions[name](batch)
            found[name].append(time.process_time() - begin)
    return found


def bench_gather(folder: Path) -> list[list[str]]:
    """Read random rows; CPU seconds relative to memcpy."""
    lengths = lognormal_lengths(STORE_TOKENS // 1000, 490)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), STORE_TOKENS))]
    store = make_store(folder / "one", lengths, 2**40)
    concat, best = make_reader(store, "concat"), make_reader(store, "bfd")
    ids = store.read_shard(0)
    ids.sum()  # every page is mapped and in the page cache
    runs = np.ndarray((ids.size - SEQ_LEN + 1,), np.dtype((np.void, 2 * SEQ_LEN)), ids.data, strides=(2,))
    stream = Stream(best, global_batch_size=BATCH)
    functions: dict[str, Callable[[np.ndarray], Any]] = {
        "memcpy of the same rows, one loop in C": lambda numbers: runs[numbers * SEQ_LEN],
        "`read_tokens`, concat": concat.read_tokens,
        "`read_tokens`, bfd": best.read_tokens,
        "`read_token_rows` (ids and boundaries), concat": concat.read_token_rows,
        "`read_token_rows`, bfd": best.read_token_rows,
        "`read_rows` (four int32 arrays), concat": concat.read_rows,
        "`read_rows`, bfd": best.read_rows,
        "a stream's batches, bfd, shuffled": lambda _: stream.next(),
    }
    repeat = 16
    found = measure_cpu(functions, min(concat.n_rows, best.n_rows) - 1, repeat)
    base, rows = next(iter(found.values())), []
    for name, seconds in found.items():
        speed = repeat * BATCH * SEQ_LEN / statistics.median(seconds) / 1e6
        ratio = statistics.median(a / b for a, b in zip(base, seconds, strict=True))
        rows.append([name, f"{speed:.0f}", f"{2 * speed / 1000:.1f}", f"{ratio:.2f}"])
    return rows


def bench_shards(folder: Path) -> list[list[str]]:
    """Read random rows of the same ids in few and many shards; the limit of open files is 1024."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    lengths, functions, limits = lognormal_lengths(SHARD_TOKENS // 600, 300), {}, []
    for n_shards in (1, 300, 5000):
        most = int(lengths.sum()) // n_shards + (n_shards > 1) * 500
        store = make_store(folder / f"shards-{n_shards}", lengths, most)
        for mode in ("concat", "bfd"):
            reader = make_reader(store, mode, 2048)
            limits.append(reader.n_rows - 2)
            for what, read in (("ids only", reader.read_tokens), ("four int32 arrays", reader.read_rows)):
                functions[f"{what}, {mode}, {len(store.manifest.shards)} shards"] = read
                for begin in range(0, reader.n_rows - BATCH, BATCH):
                    read(np.arange(begin, begin + BATCH))  # every page is mapped and in the page cache
    found = measure_cpu(functions, min(limits), 64)
    return [[name, f"{1e6 * statistics.median(seconds) / (64 * BATCH):.2f}"] for name, seconds in found.items()]


BENCHES = {"open": bench_open, "gather": bench_gather, "shards": bench_shards}
TITLES = {
    "shards": (
        f"A random row of 2048 2-byte ids of {SHARD_TOKENS // 10**6} million, {BATCH} at a time, by the number of "
        f"shards; warm, one process, `ulimit -n 1024`; medians of {ROUNDS} rounds.",
        ["what", "µs of CPU a row"],
    ),
    "open": (
        "Opening a store and its pack and giving a rank's 32 rows of step 1,000,000, in a process of its own, imports "
        "not counted; medians of 7.",
        ["tokens", "shards", "rows", "wall ms", "CPU ms", "own memory MiB", "mapped pages MiB"],
    ),
    "gather": (
        f"Rows of {SEQ_LEN} 2-byte ids at random from {STORE_TOKENS // 10**6} million, {BATCH} at a time, page cache, "
        f"one process; medians of {ROUNDS} rounds.",
        ["what", "Mtok per CPU-s", "GB per CPU-s", "of memcpy"],
    ),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*TITLES, []], default=["open", "gather"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for what in options.what:
            title, head = TITLES[what]
            lines = [title, "", describe_machine("numpy"), ""]
            print(*lines, *format_table(head, BENCHES[what](Path(folder))), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
