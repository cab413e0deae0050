"""Cost of a random row by the number of shards of a store.

    uv run python tools/bench/shards.py [--folder F] [--shards 1 300 5000] [--tokens N] [--out PAGE]

The same ids lie in 1, 300 and 5,000 shards. Rows of 2048 two-byte ids, 256 at a time at random, ids only and with
boundaries as four int32 arrays, warm: every row was read before, so all is mapped and in the page cache. Beside them
one `numpy.memmap` a shard and a Python loop over the rows. Each number of shards is a process of its own under
`ulimit -n 1024`, started three times in turn with the others; microseconds of CPU a row, medians of rounds that
alternate between the readers.

A row of 2048 two-byte ids has the size of a page of memory. The rows of the one shard begin at pages, those of many
shards anywhere, so each touches two pages. Beside the one shard stands one whose rows do not begin at pages: the ids
before it, fewer than a row has, are a shard of their own.

The folder takes 1.2 GB and is emptied at the end; PAGE is docs/benchmarks/data.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import describe_machine, format_table, replace_part
from stream import lognormal_lengths, make_reader, make_store

from lt_data import TokenStore

SEQ_LEN = 2048
BATCH = 256
BATCHES = 64
ROUNDS = 7
STORE_TOKENS = 120_000_000
FILES = 1024  # ulimit -n
PROCESSES = 3
SHIFTED = "1 shard, rows not at pages"
SHIFT = 777
TITLE = (
    "A random row of {seq_len} 2-byte ids out of {tokens:.0f} million, {batch} at a time, by the number of shards; "
    "warm, one process, `ulimit -n {files}`; µs of CPU a row, medians of {processes} processes of {rounds} rounds."
)


def make_memmap_reader(store: TokenStore) -> Callable[[np.ndarray], Any]:
    """Return a reader of full rows by one `numpy.memmap` a shard; each keeps a descriptor."""
    shards = range(len(store.manifest.shards))
    maps = [np.memmap(store.shard_path(number, "bin"), "<u2", mode="r") for number in shards]
    boundaries = store.shard_offsets

    def read(rows: np.ndarray) -> np.ndarray:
        out = np.empty((rows.size, SEQ_LEN), np.uint16)
        for i, start in enumerate((rows * SEQ_LEN).tolist()):
            number, filled = int(np.searchsorted(boundaries, start, side="right")) - 1, 0
            while filled < SEQ_LEN:
                begin = start + filled - int(boundaries[number])
                part = maps[number][begin : begin + SEQ_LEN - filled]
                out[i, filled : filled + part.size] = part
                filled, number = filled + part.size, number + 1
        return out

    return read


def measure(path: Path) -> dict[str, float | str]:
    """Return µs a row of each reader of the store in this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    store = TokenStore(path)
    concat, best = make_reader(store, "concat", SEQ_LEN), make_reader(store, "bfd", SEQ_LEN)
    functions: dict[str, Callable[[np.ndarray], Any]] = {
        "ids only, concat": concat.read_tokens,
        "ids only, bfd": best.read_tokens,
        "four int32 arrays, concat": concat.read_rows,
        "four int32 arrays, bfd": best.read_rows,
    }
    result: dict[str, float | str] = {}
    try:
        functions["numpy.memmap a shard, ids only"] = make_memmap_reader(store)
    except OSError as exc:
        result["numpy.memmap a shard, ids only"] = exc.strerror or str(exc)
    n_rows = min(concat.n_rows, best.n_rows) - 2
    rng = np.random.default_rng(2)
    for name, function in list(functions.items()):
        try:
            for begin in range(0, n_rows, BATCH):
                function(np.arange(begin, min(begin + BATCH, n_rows)))
        except OSError as exc:
            result[name] = exc.strerror or str(exc)
            del functions[name]
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        batches = [rng.integers(0, n_rows, BATCH) for _ in range(BATCHES)]
        for name, function in functions.items():
            begin = time.process_time()
            for batch in batches:
                function(batch)
            found[name].append(1e6 * (time.process_time() - begin) / (BATCH * BATCHES))
    return {**result, **{name: statistics.median(seconds) for name, seconds in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 300, 5000])
    parser.add_argument("--tokens", type=int, default=STORE_TOKENS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    where = describe_machine("numpy")
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        lengths = lognormal_lengths(options.tokens // 600, 300)
        counts = sorted({1, *options.shards})
        stores = [make_store(Path(name) / str(n), lengths, int(lengths.sum()) // n + (n > 1) * 500) for n in counts]
        cases = {f"{len(store.manifest.shards)} shards": store for store in stores}
        shifted = make_store(Path(name) / "shifted", np.append(SHIFT, lengths), int(lengths.sum()), alone=1)
        cases = {"1 shards": cases["1 shards"], SHIFTED: shifted, **cases}
        for _ in range(PROCESSES):
            for case, store in cases.items():
                command = [sys.executable, __file__, "--measure", str(store.path)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found.setdefault(case, []).append(json.loads(output.splitlines()[-1]))
    readers = list(dict.fromkeys(reader for results in found.values() for reader in results[0]))
    cells = [
        [reader, *(_cell([one.get(reader) for one in results]) for results in found.values())] for reader in readers
    ]
    title = TITLE.format(
        seq_len=SEQ_LEN, tokens=lengths.sum() / 1e6, batch=BATCH, files=FILES, processes=PROCESSES, rounds=ROUNDS
    )
    lines = [title, "", where, "", *format_table(["reader", *found], cells)]
    print("\n".join(lines))
    if options.out:
        replace_part(options.out, "stream.py shards", lines)


def _cell(values: list[Any]) -> str:
    if not all(isinstance(value, float) for value in values):
        return str(values[0] or "")
    return f"{statistics.median(values):.2f}"


if __name__ == "__main__":
    main()
