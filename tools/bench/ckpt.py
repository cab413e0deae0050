"""Cost of a save, a load, the hashes and an async save, each relative to the limit of this machine.

    uv run python tools/bench/ckpt.py [save load hash stall ...] [--rounds 7] [--folder F] [--out PAGE]

The state is that of a Llama with 1.1 billion parameters in bfloat16, 2.2 GB, random bytes. Every round measures each
case once, in alternating order, so that other load on disk and CPU affects all alike; ratios are taken within a round.

    save   begin, write_part, commit (all fsynced)   against   as many bytes written with O_DIRECT, and an fsync;
                                                               and by plain writes of one file, and an fsync (copy)
    load   Checkpoint.read_into, page cache dropped  against   the same file read with O_DIRECT by as many threads
    hash   a save                                    against   a save without hashing
    stall  AsyncRankSaver.start                      against   one memcpy of the state; also the slowdown of steps
                                                               that run during the save

The folder must be on a real disk; 5 GB are written to it at once, and removed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import xxhash
from results import describe_machine

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
BLOCK_BYTES = 8 * 2**20
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


def make_aligned_block() -> np.ndarray:
    """Return a block of whole pages, as O_DIRECT needs it."""
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    block[:] = np.frombuffer(os.urandom(len(block)), np.uint8)
    return block


def save_checkpoint(root: Path, step: int, state: list[Shard]) -> Path:
    tmp = begin_save(root, step=step, world_size=1)
    write_rank_files(tmp, rank=0, shards=state)
    return commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step))


def write_raw(path: Path, block: np.ndarray, flags: int) -> None:
    """Write as many bytes as the state has, through one aligned block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for position in range(0, N_BYTES - len(block) + 1, len(block)):
        os.pwrite(descriptor, block.data, position)
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, blocks: list[np.ndarray]) -> None:
    """Read the file into aligned blocks, one thread per block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    positions, lock = iter(range(0, N_BYTES, len(blocks[0]))), threading.Lock()

    def work(block: np.ndarray) -> None:
        while True:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            os.preadv(descriptor, [block.data], position)

    with ThreadPoolExecutor(len(blocks)) as pool:
        list(pool.map(work, blocks))
    os.close(descriptor)


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run_alternating(number: int, actions: list[Callable[[], None]]) -> None:
    for action in actions if number % 2 else reversed(actions):
        action()


def bench_save(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state, block = make_shards(memory), make_aligned_block()

    def limit(name: str, flags: int) -> None:
        with record_time(found, name):
            write_raw(root / "raw", block, flags)
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
    (file,) = path.glob("weights-*")
    blocks = [make_aligned_block() for _ in range(READER_THREADS)]
    target = np.ones(N_BYTES, np.uint8)
    wants, targets = [ReadItem(group="weights", name=name) for name, _ in TENSORS], tensor_views(target)

    def limit() -> None:
        drop_page_cache(path)
        with record_time(found, "limit"):
            read_raw(file, blocks)

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


def measure_python_rate(until: Callable[[], bool]) -> float:
    """Return iterations per second of a pure Python loop, the worst case for a second thread."""
    start, turns = time.perf_counter(), 0
    while not until():
        sum(range(2000))
        turns += 1
    return turns / (time.perf_counter() - start)


def measure_matmul_rate(until: Callable[[], bool]) -> float:
    """Return matrix products per second, as in a training step on one core."""
    a, start, turns = np.ones((256, 256), np.float32), time.perf_counter(), 0
    while not until():
        np.matmul(a, a)
        turns += 1
    return turns / (time.perf_counter() - start)


def bench_stall(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Measure the stall, and the speed of the next steps during the save against an idle saver."""
    found: dict[str, list[float]] = {}
    state, saver, copy = make_shards(memory), AsyncRankSaver(), np.ones(N_BYTES, np.uint8)
    saver.reserve(state)
    loops = (("python steps", measure_python_rate), ("matrix steps", measure_matmul_rate))

    def limit() -> None:
        with record_time(found, "limit"):
            np.copyto(copy, memory)

    def ours(name: str, measure_rate: Callable[[Callable[[], bool]], float]) -> None:
        with record_time(found, "begin"):
            tmp = begin_save(root, step=1, world_size=1)
        with record_time(found, "ours"):
            saver.start(tmp, rank=0, shards=state)
        start = time.perf_counter()
        busy = measure_rate(saver.poll)
        took = time.perf_counter() - start
        saver.wait()
        commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=1))
        shutil.rmtree(root / "step-00000001")
        until = time.perf_counter() + min(took, 1.0)
        idle = measure_rate(lambda: time.perf_counter() > until)
        found.setdefault(f"{name} lost", []).append(1 - busy / idle)
        found.setdefault("written after", []).append(took)

    for number in range(rounds):
        run_alternating(number, [limit, lambda n=number: ours(*loops[n % 2])])
    return found


BENCHES = {"save": bench_save, "load": bench_load, "hash": bench_hash, "stall": bench_stall}
LABELS = {
    "save": ("save, fsynced", "O_DIRECT write and fsync"),
    "load": ("load, cold", f"O_DIRECT read, {READER_THREADS} in flight"),
    "hash": ("save with hashes", "save without"),
    "stall": ("stall of an async save", "memcpy of the state"),
}


def format_row(name: str, found: dict[str, list[float]], load: tuple[float, float], limit_label: str = "") -> str:
    ours, limit = (statistics.median(found[key]) for key in ("ours", "limit"))
    ratios = [a / b for a, b in zip(found["ours"], found["limit"], strict=True)]
    spread = f"{min(found['limit']):.2f} to {max(found['limit']):.2f}"
    cells = [
        LABELS[name][0],
        f"{ours:.2f}",
        f"{statistics.median(found['ours cpu']):.2f}",
        limit_label or LABELS[name][1],
        f"{limit:.2f} ({spread})",
        f"{statistics.median(ratios):.2f}",
        f"{ours / limit:.2f}",
        f"{load[0]:.1f} to {load[1]:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def file_system(folder: Path) -> str:
    """Return the kind of the file system of a folder."""
    kinds = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return max((kind for kind in kinds if folder.is_relative_to(kind[1])), key=lambda kind: len(kind[1]))[2]


def render_page(facts: str, rows: list[str], rounds: int, lost: dict[str, list[float]]) -> str:
    stall_text = ""
    if lost:
        medians = {key: statistics.median(found) for key, found in lost.items()}
        stall_text = f"""
An async save creates its folder in {medians["begin"]:.3f} s (three fsyncs) before the copy; the bytes are on disk
{medians["written after"]:.2f} s after it. Meanwhile a loop of pure Python in the main thread loses
{100 * medians.get("python steps lost", 0):.0f} % of its speed, one of matrix products
{100 * medians.get("matrix steps lost", 0):.0f} %.
"""
    table = "\n".join(rows)
    return f"""# Saving and loading checkpoints

Measured by `uv run python tools/bench/ckpt.py --out docs/benchmarks/ckpt.md`. The state: {len(TENSORS)} tensors of a
Llama of 1.1 billion parameters, bfloat16, {N_BYTES / 1e9:.2f} GB. {rounds} rounds, interleaved in changing
order; seconds are medians. "ratio" is the median of the ratios within a round, "of medians" the ratio of the medians.

{facts}

| ours | s | CPU s | limit | s (range) | ratio | of medians | load average |
|---|---|---|---|---|---|---|---|
{table}
{stall_text}"""


def main() -> None:
    """Measure, print the page and optionally write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *BENCHES], default=[], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the system's temporary folder"
    )
    parser.add_argument("--out", type=Path, help="also write the page here")
    arguments = parser.parse_args()
    rows: list[str] = []
    lost: dict[str, list[float]] = {}
    memory = np.frombuffer(random.Random(0).randbytes(2**20), np.uint8)
    memory = np.resize(memory, N_BYTES)
    memory[::4096] += np.arange(len(memory[::4096]), dtype=np.uint64).astype(np.uint8)  # all pages differ
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        machine = describe_machine("numpy", "xxhash", "lt-ckpt")
        facts = f"{machine} File system {file_system(Path(folder).resolve())}."
        for name in arguments.what or list(BENCHES):
            before = os.getloadavg()[0]
            found = BENCHES[name](Path(folder), memory, arguments.rounds)
            rows.append(format_row(name, found, (before, os.getloadavg()[0])))
            print(rows[-1], flush=True)
            if "copy" in found:
                against = {**found, "limit": found["copy"]}
                rows.append(format_row(name, against, (before, os.getloadavg()[0]), "plain write and fsync (copy)"))
                print(rows[-1], flush=True)
            if name == "stall":
                lost = found
    text = render_page(facts, rows, arguments.rounds, lost)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
