"""Cost of a random row by the number of shards of a store.

    uv run python tools/bench/shards.py [--folder F] [--shards 1 300 5000] [--tokens N] [--datasets] [--mosaicml]
                                        [--out PAGE]

The same ids lie in 1, 300 and 5,000 shards. Rows of 2048 two-byte ids, 256 at a time at random, ids only and with
boundaries as four int32 arrays, warm: every row was read before, so all is mapped and in the page cache. Beside them
one `numpy.memmap` a shard and a Python loop over the rows. Each number of shards is a process of its own under
`ulimit -n 1024`, started three times in turn with the others; microseconds of CPU a row, medians of rounds that
alternate between the readers.

A row of 2048 two-byte ids has the size of a page of memory. The rows of the one shard begin at pages, those of many
shards anywhere, so each touches two pages. Beside the one shard stands one whose rows do not begin at pages: the ids
before it, fewer than a row has, are a shard of their own.

Peers read the same rows from as many files: `datasets` (`with_format("numpy")`), and mosaicml-streaming
(`StreamingDataset[i]`, MDS shards of integer arrays), each where it is installed: in an environment of their own,

    uv venv F/peers && uv pip install --python F/peers ./packages/lt-data datasets mosaicml-streaming
    F/peers/bin/python tools/bench/shards.py --folder F --datasets --mosaicml

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


def make_datasets_reader(folder: Path, ids: np.ndarray, n_files: int) -> Callable[[np.ndarray], Any]:
    import pyarrow as pa
    from datasets import Dataset, load_from_disk

    n_rows = ids.size // SEQ_LEN
    if not (folder / f"hf-{n_files}").exists():
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
    if not Path(out).exists():
        with MDSWriter(out=out, columns={"input_ids": f"ndarray:uint16:{SEQ_LEN}"}, size_limit=limit) as writer:
            for i in range(n_rows):
                writer.write({"input_ids": ids[i * SEQ_LEN : (i + 1) * SEQ_LEN]})
    dataset: Any = StreamingDataset(local=out, batch_size=1)
    return lambda rows: np.stack([dataset[i]["input_ids"] for i in rows.tolist()])


def measure(path: Path, peers: list[str]) -> dict[str, float | str]:
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
    parser.add_argument("--datasets", action="append_const", dest="peers", const="datasets", default=[])
    parser.add_argument("--mosaicml", action="append_const", dest="peers", const="mosaicml")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.peers)))
        return
    where = machine_info()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        lengths = lognormal_lengths(options.tokens // 600, 300)
        counts = sorted({1, *options.shards})
        stores = [make_store(Path(name) / str(n), lengths, int(lengths.sum()) // n + (n > 1) * 500) for n in counts]
        cases = {f"{len(store.manifest.shards)} shards": (store, list(options.peers)) for store in stores}
        shifted = make_store(Path(name) / "shifted", np.append(SHIFT, lengths), int(lengths.sum()), alone=1)
        cases = {"1 shards": cases["1 shards"], SHIFTED: (shifted, []), **cases}
        for _ in range(PROCESSES):
            for case, (store, flags) in cases.items():
                command = [sys.executable, __file__, "--measure", str(store.path), *(f"--{flag}" for flag in flags)]
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
        replace_section(options.out, "shards", lines)


def _cell(values: list[Any]) -> str:
    if not all(isinstance(value, float) for value in values):
        return str(values[0] or "")
    return f"{statistics.median(values):.2f}"


if __name__ == "__main__":
    main()
