"""Cost of a random row by the number of shards of a store.

    uv run python tools/bench/shards.py [--folder F] [--shards 1 300 5000] [--datasets] [--mosaicml] [--out PAGE]

The same ids lie in 1, 300 and 5,000 shards. Rows of 2048 two-byte ids, 256 at a time at random, ids only and with
boundaries as four int32 arrays, warm: every row was read before, so all is mapped and in the page cache. Beside them
one `numpy.memmap` a shard and a Python loop over the rows. Each number of shards is a process of its own under
`ulimit -n 1024`; microseconds of CPU a row, medians of rounds that alternate between the readers.

Peers read the same rows from as many files: `datasets` (`with_format("numpy")`), and mosaicml-streaming
(`StreamingDataset[i]`, MDS shards of integer arrays), each where it is installed.
The folder takes 1.2 GB (3 GB with peers) and is emptied at the end; PAGE is docs/benchmarks/data.md.
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
from stream import format_table, lognormal_lengths, machine_info, make_reader, make_store, replace_section

from lt_data import TokenStore

SEQ_LEN = 2048
BATCH = 256
BATCHES = 64
ROUNDS = 7
STORE_TOKENS = 200_000_000
FILES = 1024  # ulimit -n
TITLE = (
    f"A random row of {SEQ_LEN} 2-byte ids out of {STORE_TOKENS // 10**6} million, {BATCH} at a time, by the number of "
    f"shards; warm, one process, `ulimit -n {FILES}`; µs of CPU a row, medians of {ROUNDS} rounds."
)


def make_memmap_reader(store: TokenStore) -> Callable[[np.ndarray], Any]:
    """Return a reader of full rows by one `numpy.memmap` a shard; each keeps a descriptor."""
    shards = range(len(store.manifest.shards))
    maps = [np.memmap(store.shard_path(number, "bin"), "<u2", mode="r") for number in shards]
    boundaries = store.extents.first_token

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


def make_datasets_reader(folder: Path, ids: np.ndarray, n_files: int) -> Callable[[np.ndarray], Any]:
    import pyarrow as pa
    from datasets import Dataset, load_from_disk

    n_rows = ids.size // SEQ_LEN
    flat = pa.array(ids[: n_rows * SEQ_LEN])
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})
    Dataset(table).save_to_disk(folder / f"hf-{n_files}", num_shards=n_files)
    dataset: Any = load_from_disk(folder / f"hf-{n_files}").with_format("numpy")
    return lambda rows: dataset[rows.tolist()]["input_ids"]


def make_mosaicml_reader(folder: Path, ids: np.ndarray, n_files: int) -> Callable[[np.ndarray], Any]:
    from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]

    n_rows = ids.size // SEQ_LEN
    out = str(folder / f"mds-{n_files}")
    limit = -(-n_rows // n_files) * (2 * SEQ_LEN + 16) + 4096
    with MDSWriter(out=out, columns={"input_ids": f"ndarray:uint16:{SEQ_LEN}"}, size_limit=limit) as writer:
        for i in range(n_rows):
            writer.write({"input_ids": ids[i * SEQ_LEN : (i + 1) * SEQ_LEN]})
    dataset: Any = StreamingDataset(local=out, batch_size=1)
    return lambda rows: np.stack([dataset[i]["input_ids"] for i in rows.tolist()])


def measure(path: Path, peers: list[str]) -> dict[str, float | str]:
    """Return µs a row of each reader of the store in this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    store = TokenStore.open(path)
    concat, best = make_reader(store, "concat", SEQ_LEN), make_reader(store, "bfd", SEQ_LEN)
    functions: dict[str, Callable[[np.ndarray], Any]] = {
        "ids only, concat": concat.read_tokens,
        "ids only, bfd": best.read_tokens,
        "four int32 arrays, concat": concat.read_rows,
        "four int32 arrays, bfd": best.read_rows,
    }
    result: dict[str, float | str] = {}
    n_files = len(store.manifest.shards)
    try:
        functions["numpy.memmap a shard, ids only"] = make_memmap_reader(store)
    except OSError as exc:
        result["numpy.memmap a shard, ids only"] = exc.strerror or str(exc)
    makers = {"datasets": make_datasets_reader, "mosaicml": make_mosaicml_reader}
    for peer in peers:
        name = f"{peer}, ids only"
        try:
            functions[name] = makers[peer](path.parent, store.tokens(0, store.n_tokens), n_files)
        except OSError as exc:
            result[name] = exc.strerror or str(exc)
    n_rows = min(concat.n_rows, best.n_rows) - 1
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
    parser.add_argument("--datasets", action="append_const", dest="peers", const="datasets", default=[])
    parser.add_argument("--mosaicml", action="append_const", dest="peers", const="mosaicml")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.peers)))
        return
    where = machine_info()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for n in options.shards:
            lengths = lognormal_lengths(STORE_TOKENS // 1000, 300)
            lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), STORE_TOKENS))]
            store = make_store(Path(name) / str(n), lengths, int(lengths.sum()) // n + (n > 1) * 500)
            command = [sys.executable, __file__, "--measure", str(store.path)]
            command += [f"--{peer}" for peer in options.peers]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[f"{len(store.manifest.shards)} shards"] = json.loads(output.splitlines()[-1])
    readers = list(next(iter(found.values())))
    cells = [[reader, *(_cell(result.get(reader)) for result in found.values())] for reader in readers]
    lines = [TITLE, "", where, "", *format_table(["reader", *found], cells)]
    print("\n".join(lines))
    if options.out:
        replace_section(options.out, "shards", lines)


def _cell(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
