"""Packing and loading beside the libraries that people use for them, on the same documents.

    uv run python tools/bench/data_peers.py [--folder F]

Documents have lengths distributed as in text and random 2-byte ids. Every case is a process of its own; the cases take
turns, and medians of the rounds are shown.

    packing   all documents into rows of 2048 (lt: from the index of a store to a pack on the disk; TRL: from a table in
              memory to one): CPU seconds, positions that are not padding, tokens that no row has
    loading   shuffled batches of 256 rows of 2048, from the page cache: rows per CPU second; milliseconds from a new
              process with its imports done to the first batch

Memory is the largest resident set of the process, imports included.

Peers run in a temporary environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from results import describe_machine, format_table, run_child

SEQ_LEN, BATCH, BATCHES, ROUNDS = 2048, 256, 40, 5
N_TOKENS = 100_000_000
PEERS = ("litdata==0.2.76", "mosaicml-streaming==0.13.0", "trl==1.16.0", "datasets==5.0.1", "torch==2.11.0")
PACKERS = {"lt": "`lt data pack`, bfd"} | {
    name: f"TRL `pack_dataset`, {name}" for name in ("bfd", "bfd_split", "wrapped")
}
LOADERS = {
    "lt": "`lt_data.Stream`",
    "datasets": "`datasets`, shuffled, numpy",
    "litdata": "litdata `TokensLoader`",
    "mosaic": "mosaicml-streaming, MDS",
}


def documents(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths and ids of the documents."""
    return np.load(folder / "lengths.npy"), np.load(folder / "ids.npy", mmap_mode="r")


# Packers: they return what is timed, which returns (positions, tokens in rows).


def pack_lt(folder: Path) -> Callable[[], tuple[int, int]]:
    from lt_data import TokenStore
    from lt_data.packing.packs import pack

    def run() -> tuple[int, int]:
        found = pack(TokenStore(folder / "store"), seq_len=SEQ_LEN, mode="bfd")
        return found.n_positions, int(found.length.sum(dtype=np.int64))

    shutil.rmtree(folder / f"store/packs/bfd-{SEQ_LEN}", ignore_errors=True)

    return run


def pack_trl(folder: Path, strategy: str) -> Callable[[], tuple[int, int]]:
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset  # pyright: ignore[reportMissingImports]

    disable_progress_bars()
    lengths, ids = documents(folder)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    dataset = Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(ids))}))

    def run() -> tuple[int, int]:
        packed = pack_dataset(dataset, SEQ_LEN, strategy)
        column = packed.data.column("input_ids")
        return SEQ_LEN * len(packed), sum(len(chunk.values) for chunk in column.chunks)

    return run


# Loaders: they write their own files once, and return what yields batches.


def load_lt(folder: Path) -> Callable[[], Iterable[Any]]:
    from lt_data import RowReader, Stream, TokenStore, open_pack

    def run() -> Iterator[Any]:
        store = TokenStore(folder / "store")
        stream = Stream(RowReader(store, open_pack(store, seq_len=SEQ_LEN, mode="concat")), global_batch_size=BATCH)
        while True:
            yield stream.next().tokens.input_ids

    return run


def load_datasets(folder: Path) -> Callable[[], Iterable[Any]]:
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    if not (folder / "hf").exists():
        ids = documents(folder)[1]
        flat = pa.array(ids[: len(ids) // SEQ_LEN * SEQ_LEN])
        table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})
        Dataset(table).save_to_disk(folder / "hf")

    def run() -> Iterator[Any]:
        dataset: Any = load_from_disk(folder / "hf")
        for batch in dataset.shuffle(seed=0, keep_in_memory=True).with_format("numpy").iter(BATCH):
            yield batch["input_ids"]

    return run


def token_blocks(folder: Path) -> Iterator[Any]:
    import torch

    yield torch.from_numpy(documents(folder)[1].astype(np.int32))


def load_litdata(folder: Path) -> Callable[[], Iterable[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize  # pyright: ignore[reportMissingImports]

    if not (folder / "litdata").exists():
        optimize(
            token_blocks,
            [folder],
            str(folder / "litdata"),
            num_workers=1,
            chunk_size=SEQ_LEN * 8192,
            item_loader=TokensLoader(),
            start_method="fork",
        )

    def run() -> Iterable[Any]:
        dataset = StreamingDataset(
            str(folder / "litdata"), item_loader=TokensLoader(block_size=SEQ_LEN), shuffle=True, drop_last=True
        )
        return StreamingDataLoader(dataset, batch_size=BATCH)

    return run


def load_mosaic(folder: Path) -> Callable[[], Iterable[Any]]:
    from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    if not (folder / "mds").exists():
        ids = documents(folder)[1]
        with MDSWriter(out=str(folder / "mds"), columns={"ids": f"ndarray:uint16:{SEQ_LEN}"}) as out:
            for first in range(0, len(ids) - SEQ_LEN + 1, SEQ_LEN):
                out.write({"ids": ids[first : first + SEQ_LEN]})

    def run() -> Iterable[Any]:
        return DataLoader(StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH), BATCH)

    return run


CASES: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "pack lt": pack_lt,
    "pack bfd": lambda folder: pack_trl(folder, "bfd"),
    "pack bfd_split": lambda folder: pack_trl(folder, "bfd_split"),
    "pack wrapped": lambda folder: pack_trl(folder, "wrapped"),
    "load lt": load_lt,
    "load datasets": load_datasets,
    "load litdata": load_litdata,
    "load mosaic": load_mosaic,
}


def run_case(name: str, folder: Path) -> None:
    """Print one measurement of a case; the files of a loader are written by a run before."""
    run = CASES[name](folder)
    begin, cpu = time.perf_counter(), time.process_time()
    if name.startswith("pack"):
        positions, tokens = run()
        found = {"cpu_s": time.process_time() - cpu, "fill": tokens / positions, "tokens": tokens}
    else:
        batches = iter(run())
        next(batches)
        found = {"start_ms": 1000 * (time.perf_counter() - begin)}
        cpu = time.process_time()
        for _ in range(BATCHES):
            next(batches)
        found["rows_per_cpu_s"] = BATCHES * BATCH / (time.process_time() - cpu)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found["peak_bytes"] = int(status["VmHWM"].split()[0]) * 1024  # ru_maxrss begins at the parent's
    print(json.dumps(found), flush=True)
    os._exit(0)  # without waiting for a peer's threads


def measure(folder: Path, peers: str) -> dict[str, dict[str, float]]:
    """Return the medians of every case; the first round, which writes files, is not counted."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for turn in range(ROUNDS + 1):
        for name in CASES:
            python = sys.executable if name.endswith("lt") else peers
            one = run_child([python, __file__, "--child", name, "--folder", folder])
            if turn:
                rounds[name].append(one)
    return {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()
    }


def print_tables(found: dict[str, dict[str, float]], n_tokens: int) -> None:
    """Print the tables of packers and of loaders."""
    packed, loaded = [], []
    for name, label in PACKERS.items():
        row = found[f"pack {name}"]
        memory, fill = f"{row['peak_bytes'] / 2**20:.0f}", f"{row['fill']:.3%}"
        packed.append([label, f"{row['cpu_s']:.2f}", memory, fill, f"{n_tokens - row['tokens']:,.0f}"])
    for name, label in LOADERS.items():
        row = found[f"load {name}"]
        memory, start = f"{row['peak_bytes'] / 2**20:.0f}", f"{row['start_ms']:.0f}"
        loaded.append([label, f"{row['rows_per_cpu_s']:,.0f}", start, memory])
    print(describe_machine("numpy")[:-1] + f". Peers: {', '.join(PEERS)}.")
    print(f"\nPacking {n_tokens / 1e6:.0f} million tokens into rows of {SEQ_LEN}:\n")
    print(*format_table(["packer", "CPU s", "memory MiB", "fill", "tokens in no row"], packed), sep="\n")
    print(f"\nShuffled batches of {BATCH} rows:\n")
    print(*format_table(["loader", "rows per CPU s", "first batch, ms", "memory MiB"], loaded), sep="\n")


def make_peers(folder: Path) -> str:
    """Return the interpreter of a new environment with the peers."""
    subprocess.run(["uv", "venv", "-q", "-p", "3.11", str(folder)], check=True)
    python = str(folder / "bin/python")
    subprocess.run(["uv", "pip", "install", "-q", "--python", python, *PEERS], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_case(options.child, options.folder)
        return
    from stream import lognormal_lengths, make_reader, make_store

    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        lengths = lognormal_lengths(N_TOKENS // 800, 400)
        store = make_store(folder / "store", lengths, 2**40)
        make_reader(store, "concat", SEQ_LEN)
        np.save(folder / "lengths.npy", lengths)
        np.save(folder / "ids.npy", store.read_shard(0))
        print_tables(measure(folder, make_peers(folder / "env")), store.n_tokens)


if __name__ == "__main__":
    main()
