"""What a save, a load, the hashes and a background save cost, each beside the limit that this machine has for it.

    uv run python tools/bench/ckpt.py [save load hash stall ...] [--rounds 7] [--folder F] [--out PAGE]

The state is that of a Llama of 1.1 billion parameters in bfloat16, 2.2 GB, random bytes. In every round each thing is
measured once, in changing order, so that a disk or a processor that others use too is the same for all of them; ratios
are formed within a round.

    save   begin, write_part, commit (all fsynced)   against   as many bytes written with O_DIRECT, and an fsync
    load   Checkpoint.read_into, page cache dropped  against   the same file read with O_DIRECT by as many threads
    hash   a save                                    against   a save that hashes nothing
    stall  BackgroundSaver.start                     against   one memcpy of the state; and what steps beside it lose

The folder must be on a real disk; 5 GB are written to it at once, and removed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
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
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import xxhash

from lt_ckpt import BackgroundSaver, Checkpoint, Meta, Shard, Want, begin, commit, direct, tensorfile, write_part
from lt_ckpt.readahead import THREADS
from lt_model import LlamaConfig, parameters

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    n_heads=16,
    n_kv_heads=4,
    n_layers=16,
    max_position_embeddings=4096,
)
ITEM_BYTES = 2
TENSORS = [(parameter.name, tuple(parameter.shape)) for parameter in parameters(CONFIG)]
N_BYTES = sum(prod(shape) for _, shape in TENSORS) * ITEM_BYTES
TARGETS = {"save": 1.5, "load": 1.3, "hash": 1.05, "stall": 1.3}


def slices(memory: np.ndarray) -> list[np.ndarray]:
    """The part of each tensor in one array of `N_BYTES`."""
    ends = np.cumsum([prod(shape) * ITEM_BYTES for _, shape in TENSORS]).tolist()
    return [memory[end - prod(shape) * ITEM_BYTES : end] for end, (_, shape) in zip(ends, TENSORS, strict=True)]


def shards(memory: np.ndarray) -> list[Shard]:
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
        for (name, shape), data in zip(TENSORS, slices(memory), strict=True)
    ]


@contextmanager
def timed(into: dict[str, list[float]], name: str):
    """Add the wall seconds of the block to a list, and its CPU seconds to another."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    into.setdefault(name, []).append(time.perf_counter() - wall)
    into.setdefault(f"{name} cpu", []).append(time.process_time() - cpu)


def aligned_block() -> np.ndarray:
    """Memory as good as ours: of huge pages, where the system has them."""
    block = direct.take_block(direct.BLOCK_BYTES)
    block[:] = np.frombuffer(os.urandom(len(block)), np.uint8)
    return block


def new_checkpoint(root: Path, step: int, state: list[Shard]) -> Path:
    tmp = begin(root, step=step, world=1)
    write_part(tmp, rank=0, shards=state)
    return commit(tmp, world=1, meta=Meta(step=step))


def write_raw(path: Path, block: np.ndarray) -> None:
    """As many bytes as the state has, through one aligned block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert direct.switch_on(descriptor), "the folder's file system has no O_DIRECT: the limit cannot be measured"
    for position in range(0, N_BYTES - len(block) + 1, len(block)):
        os.pwrite(descriptor, block.data, position)
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, blocks: list[np.ndarray]) -> None:
    """The file's bytes into aligned blocks, by a thread each that takes the next position."""
    descriptor = os.open(path, os.O_RDONLY)
    assert direct.switch_on(descriptor)
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


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def in_changing_order(number: int, actions: list[Callable[[], None]]) -> None:
    for action in actions if number % 2 else reversed(actions):
        action()


def bench_save(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state, block = shards(memory), aligned_block()

    def limit() -> None:
        with timed(found, "limit"):
            write_raw(root / "raw", block)
        os.unlink(root / "raw")

    def ours() -> None:
        with timed(found, "ours"):
            path = new_checkpoint(root, 1, state)
        shutil.rmtree(path)

    for number in range(rounds):
        in_changing_order(number, [limit, ours])
    return found


def bench_load(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    path = new_checkpoint(root, 1, shards(memory))
    (file,) = path.glob("weights-*")
    blocks = [aligned_block() for _ in range(THREADS)]
    target = np.ones(N_BYTES, np.uint8)
    wants, targets = [Want(group="weights", name=name) for name, _ in TENSORS], slices(target)

    def limit() -> None:
        drop_cache(path)
        with timed(found, "limit"):
            read_raw(file, blocks)

    def ours() -> None:
        drop_cache(path)
        with timed(found, "ours"):
            Checkpoint.open(path).read_into(wants, targets)

    for number in range(rounds):
        in_changing_order(number, [limit, ours])
    assert (target == memory).all()
    shutil.rmtree(path)
    return found


class NoHash:
    """Stands in for a hash that costs nothing."""

    def update(self, data: memoryview) -> None:
        """Take bytes."""

    def hexdigest(self) -> str:
        """Return what looks like a hash."""
        return "0" * 32


def bench_hash(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    state = shards(memory)
    without = SimpleNamespace(xxh3_128=NoHash, xxh3_128_hexdigest=xxhash.xxh3_128_hexdigest)

    def save(name: str, module: object) -> None:
        with patch.object(tensorfile, "xxhash", module), timed(found, name):
            path = new_checkpoint(root, 1, state)
        shutil.rmtree(path)

    for number in range(rounds):
        in_changing_order(number, [lambda: save("limit", without), lambda: save("ours", xxhash)])
    return found


def python_steps(until: Callable[[], bool]) -> float:
    """Turns per second of a loop that never leaves the interpreter: the worst that a thread can be in the way of."""
    start, turns = time.perf_counter(), 0
    while not until():
        sum(range(2000))
        turns += 1
    return turns / (time.perf_counter() - start)


def matrix_steps(until: Callable[[], bool]) -> float:
    """Products per second of matrices as a training step on one core has them."""
    a, start, turns = np.ones((256, 256), np.float32), time.perf_counter(), 0
    while not until():
        a @ a
        turns += 1
    return turns / (time.perf_counter() - start)


def bench_stall(root: Path, memory: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Besides the stall: how fast the next steps are while the thread writes, against the same with an idle thread."""
    found: dict[str, list[float]] = {}
    state, saver, copy = shards(memory), BackgroundSaver(), np.ones(N_BYTES, np.uint8)
    saver.reserve(state)

    def limit() -> None:
        with timed(found, "limit"):
            np.copyto(copy, memory)

    def ours(steps: Callable[[Callable[[], bool]], float]) -> None:
        with timed(found, "begin"):
            tmp = begin(root, step=1, world=1)
        with timed(found, "ours"):
            saver.start(tmp, rank=0, shards=state)
        start = time.perf_counter()
        busy = steps(saver.poll)
        took = time.perf_counter() - start
        saver.wait()
        commit(tmp, world=1, meta=Meta(step=1))
        shutil.rmtree(root / "step-00000001")
        until = time.perf_counter() + min(took, 1.0)
        name = steps.__name__.replace("_", " ")
        found.setdefault(f"{name} lost", []).append(1 - busy / steps(lambda: time.perf_counter() > until))
        found.setdefault("written after", []).append(took)

    for number in range(rounds):
        in_changing_order(number, [limit, lambda n=number: ours((python_steps, matrix_steps)[n % 2])])
    return found


BENCHES = {"save": bench_save, "load": bench_load, "hash": bench_hash, "stall": bench_stall}
WHAT = {
    "save": ("save, fsynced", "O_DIRECT write and fsync"),
    "load": ("load, cold", f"O_DIRECT read, {THREADS} in flight"),
    "hash": ("save with hashes", "save without"),
    "stall": ("stall of a background save", "memcpy of the state"),
}


def row(name: str, found: dict[str, list[float]], load: tuple[float, float]) -> str:
    ours, limit = (statistics.median(found[key]) for key in ("ours", "limit"))
    ratios = [a / b for a, b in zip(found["ours"], found["limit"], strict=True)]
    spread = f"{min(found['limit']):.2f} to {max(found['limit']):.2f}"
    cells = [
        WHAT[name][0],
        f"{ours:.2f}",
        f"{statistics.median(found['ours cpu']):.2f}",
        WHAT[name][1],
        f"{limit:.2f} ({spread})",
        f"{statistics.median(ratios):.2f}",
        f"{ours / limit:.2f}",
        f"{TARGETS[name]:.2f}",
        f"{load[0]:.1f} to {load[1]:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def machine(folder: Path) -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    kinds = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    mount = max((kind for kind in kinds if folder.is_relative_to(kind[1])), key=lambda kind: len(kind[1]))
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "file system": mount[2],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "xxhash", "lt-ckpt")},
    }


def page(facts: dict[str, str], rows: list[str], rounds: int, lost: dict[str, list[float]]) -> str:
    more = ""
    if lost:
        medians = {key: statistics.median(found) for key, found in lost.items()}
        more = f"""
A background save: the folder is made in {medians["begin"]:.3f} s (three fsyncs), before the copy; the bytes are on the
disk {medians["written after"]:.2f} s after it. While they are being written, a loop of pure Python in the main thread
loses {100 * medians.get("python steps lost", 0):.0f} % of its speed, one of matrix products
{100 * medians.get("matrix steps lost", 0):.0f} %.
"""
    table = "\n".join(rows)
    return f"""# Saving and loading checkpoints

Made by `uv run python tools/bench/ckpt.py --out docs/benchmarks/ckpt.md`. The state: {len(TENSORS)} tensors of a Llama
of 1.1 billion parameters, bfloat16, {N_BYTES / 1e9:.2f} GB. {rounds} rounds, interleaved in changing order; seconds are
medians. The ratio that counts is the median of the ratios within a round; beside it stands the ratio of the medians.

{", ".join(f"{name} {value}" for name, value in facts.items())}.

| ours | s | CPU s | limit | s (range) | ratio | of medians | target | load average |
|---|---|---|---|---|---|---|---|---|
{table}
{more}"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *BENCHES], default=[], help="by default all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured; by default the system's")
    parser.add_argument("--out", type=Path, help="also write the page here")
    arguments = parser.parse_args()
    rows: list[str] = []
    lost: dict[str, list[float]] = {}
    memory = np.frombuffer(random.Random(0).randbytes(2**20), np.uint8)
    memory = np.resize(memory, N_BYTES)
    memory[::4096] += np.arange(len(memory[::4096]), dtype=np.uint64).astype(np.uint8)  # no two pages alike
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        facts = machine(Path(folder).resolve())
        for name in arguments.what or list(BENCHES):
            before = os.getloadavg()[0]
            found = BENCHES[name](Path(folder), memory, arguments.rounds)
            rows.append(row(name, found, (before, os.getloadavg()[0])))
            print(rows[-1], flush=True)
            if name == "stall":
                lost = found
    text = page(facts, rows, arguments.rounds, lost)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
