"""Cost of a save, a load, the hashes and an async save, each relative to the limit of this machine.

    uv run python tools/bench/ckpt.py [save load hash stall ...] [--rounds 7] [--folder F]

The state is that of a Llama with 1.1 billion parameters in bfloat16, 2.2 GB, random bytes. Every round measures each
case once, in alternating order, so that other load on disk and CPU affects all alike; ratios are taken within a round.

    save   begin, write_part, commit (all fsynced)   against   as many bytes written with O_DIRECT, and an fsync;
                                                               and by plain writes of one file, and an fsync (copy)
    load   Checkpoint.read_into, page cache dropped  against   the same file read with O_DIRECT by as many threads
    hash   a save                                    against   a save without hashing
    stall  AsyncRankSaver.start                      against   one memcpy of the state

The folder must be on a real disk; 5 GB are written to it at once, and removed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import xxhash
from disk import drop_page_cache, read_raw, write_raw
from results import describe_machine, format_table

from lt_ckpt import (
    Checkpoint,
    CheckpointMetadata,
    ReadItem,
    Shard,
    begin_save,
    commit_save,
    tensorfile,
    write_rank_files,
)
from lt_ckpt.async_save import AsyncRankSaver
from lt_ckpt.parallel import THREADS as READER_THREADS
from lt_model import ModelConfig, param_specs

CONFIG = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    n_heads=16,
    n_kv_heads=4,
    n_layers=16,
    max_position_embeddings=4096,
)
ITEM_BYTES = 2
TENSORS = [(parameter.name, tuple(parameter.shape)) for parameter in param_specs(CONFIG)]
N_BYTES = sum(prod(shape) for _, shape in TENSORS) * ITEM_BYTES


def tensor_views(memory: np.ndarray) -> list[np.ndarray]:
    """Return the part of each tensor in one array of `N_BYTES`."""
    ends = np.cumsum([prod(shape) * ITEM_BYTES for _, shape in TENSORS]).tolist()
    return [memory[end - prod(shape) * ITEM_BYTES : end] for end, (_, shape) in zip(ends, TENSORS, strict=True)]


def make_shards(memory: np.ndarray) -> list[Shard]:
    return [
        Shard(
            group="weights",
            name=name,
            dtype="BF16",
            global_shape=shape,
            offset=(0,) * len(shape),
            shape=shape,
            data=data,
        )
        for (name, shape), data in zip(TENSORS, tensor_views(memory), strict=True)
    ]


@contextmanager
def record_time(times: dict[str, list[float]], name: str):
    """Append the wall seconds of the block to one list and its CPU seconds to another."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - wall)
    times.setdefault(f"{name} cpu", []).append(time.process_time() - cpu)


def save_checkpoint(root: Path, step: int, state: list[Shard]) -> Path:
    tmp = begin_save(root, step=step, world_size=1)
    write_rank_files(tmp, rank=0, shards=state)
    return commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step))


def run_alternating(number: int, actions: list[Callable[[], None]]) -> None:
    for action in actions if number % 2 else reversed(actions):
        action()


def bench_save(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state = make_shards(memory)

    def limit(name: str, flags: int) -> None:
        with record_time(found, name):
            write_raw(root / "raw", N_BYTES, flags)
        os.unlink(root / "raw")

    def ours() -> None:
        with record_time(found, "ours"):
            path = save_checkpoint(root, 1, state)
        shutil.rmtree(path)

    for number in range(rounds):
        run_alternating(number, [partial(limit, "limit", os.O_DIRECT), ours, partial(limit, "copy", 0)])
    return found


def bench_load(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    path = save_checkpoint(root, 1, make_shards(memory))
    target = np.ones(N_BYTES, np.uint8)
    wants, targets = [ReadItem(group="weights", name=name) for name, _ in TENSORS], tensor_views(target)

    def limit() -> None:
        drop_page_cache(path)
        with record_time(found, "limit"):
            read_raw(path.glob("weights-*"), READER_THREADS)

    def ours() -> None:
        drop_page_cache(path)
        with record_time(found, "ours"):
            Checkpoint.open(path).read_into(wants, targets)

    for number in range(rounds):
        run_alternating(number, [limit, ours])
    assert (target == memory).all()
    shutil.rmtree(path)
    return found


class NoHash:
    """Hash that costs nothing."""

    def update(self, data: memoryview) -> None:
        """Ignore bytes."""

    def hexdigest(self) -> str:
        """Return a constant in the form of a hash."""
        return "0" * 32


def bench_hash(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state = make_shards(memory)
    without = SimpleNamespace(xxh3_128=NoHash, xxh3_128_hexdigest=xxhash.xxh3_128_hexdigest)

    def save(name: str, module: object) -> None:
        with patch.object(tensorfile, "xxhash", module), record_time(found, name):
            path = save_checkpoint(root, 1, state)
        shutil.rmtree(path)

    for number in range(rounds):
        run_alternating(number, [lambda: save("limit", without), lambda: save("ours", xxhash)])
    return found


def bench_stall(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state, saver, copy = make_shards(memory), AsyncRankSaver(), np.ones(N_BYTES, np.uint8)
    saver.reserve(state)

    def limit() -> None:
        with record_time(found, "limit"):
            np.copyto(copy, memory)

    def ours() -> None:
        tmp = begin_save(root, step=1, world_size=1)
        with record_time(found, "ours"):
            saver.start(tmp, rank=0, shards=state)
        saver.wait()
        shutil.rmtree(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=1)))

    for number in range(rounds):
        run_alternating(number, [limit, ours])
    return found


BENCHES = {"save": bench_save, "load": bench_load, "hash": bench_hash, "stall": bench_stall}
LABELS = {
    "save": ("save, fsynced", {"limit": "O_DIRECT write and fsync", "copy": "plain write and fsync (copy)"}),
    "load": ("load, cold", {"limit": f"O_DIRECT read, {READER_THREADS} in flight"}),
    "hash": ("save with hashes", {"limit": "save without"}),
    "stall": ("stall of an async save", {"limit": "memcpy of the state"}),
}


def format_rows(name: str, found: dict[str, list[float]]) -> list[list[str]]:
    """Return the rows of a bench: medians, the range of the limit, and the median of the ratios within a round."""
    label, limits = LABELS[name]
    ours = [label, *(f"{statistics.median(found[key]):.2f}" for key in ("ours", "ours cpu"))]
    rows = []
    for key, limit_label in limits.items():
        limit = found[key]
        ratio = statistics.median(a / b for a, b in zip(found["ours"], limit, strict=True))
        spread = f"{statistics.median(limit):.2f} ({min(limit):.2f} to {max(limit):.2f})"
        rows.append([*ours, limit_label, spread, f"{ratio:.2f}"])
    return rows


def file_system(folder: Path) -> str:
    """Return the kind of the file system of a folder."""
    kinds = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return max((kind for kind in kinds if folder.is_relative_to(kind[1])), key=lambda kind: len(kind[1]))[2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *BENCHES], default=[], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    arguments = parser.parse_args()
    memory = np.frombuffer(random.Random(0).randbytes(2**20), np.uint8)
    memory = np.resize(memory, N_BYTES)
    memory[::4096] += np.arange(len(memory[::4096]), dtype=np.uint64).astype(np.uint8)  # all pages differ
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        machine = describe_machine("numpy", "xxhash", "lt-ckpt")
        print(f"{machine} File system {file_system(Path(folder).resolve())}.", flush=True)
        for name in arguments.what or BENCHES:
            rows += format_rows(name, BENCHES[name](Path(folder), memory, arguments.rounds))
    print("", *format_table(["ours", "s", "CPU s", "limit", "s (range)", "ratio"], rows), sep="\n")


if __name__ == "__main__":
    main()
