"""The folder in which the Neuron compiler keeps compiled graphs: what is in it, what failed, what may go.

    <cache>/neuronxcc-<version>/MODULE_<graph>+<flags>/
        model.hlo_module.pb          the graph; compile_flags.json the flags
        model.neff, model.done       compiled
        model.log                    in place of them: the compiler failed, and will not try again by itself
        model.hlo_module.pb.lock     held (flock) by whoever compiles; left behind where it was killed

A run that needs a failed graph fails again from the cache, and one that needs a graph under a lock that was left behind
waits for ever; that is why guides tell to delete the whole cache. Here the entries that are in the way are found and
taken out, one by one, and the rest stays. An entry with a file that the compiler does not write is left alone.

Beside the entries lie our compile keys (`compile_key.py`). Cost: one listing per entry.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lt_trainer.errors import TrainerError

__all__ = ["DEFAULT_CACHE", "CacheError", "Entry", "cache_url", "local_cache", "remove", "scan"]

DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
"""The compiler's own, when nothing says another."""

State = Literal["compiled", "failed", "compiling", "stale lock", "not compiled"]
_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(\+[0-9A-Za-z]+)?")
_KNOWN = re.compile(r"model\.(hlo(_module)?\.pb(\.gz)?|neff|done|log)(\.lock)?|compile_flags\.(json|txt)")
_FAILED_NEFF_BYTES = 64
"""Older compilers mark a failure by a few bytes of text in place of the compiled graph."""


class CacheError(TrainerError):
    """A cache that is not where it is said to be, is not on a disk, or has what is not the compiler's."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One graph.

    Attributes:
        path: its folder.
        compiler: version of the compiler, the folder above.
        state: see the module's text.
        n_bytes: of all its files.
        told: the first line of the compiler's log, where it failed.
    """

    path: Path
    compiler: str
    state: State
    n_bytes: int
    told: str = ""


def cache_url(environ: Mapping[str, str]) -> str:
    """Where the compiler will look, by the variables that a rank gets: --cache_dir of the flags comes first."""
    flag = re.search(r"--cache_dir[= ](\S+)", environ.get("NEURON_CC_FLAGS", ""))
    return flag[1] if flag else environ.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_CACHE


def local_cache(url: str) -> Path:
    """The folder of a cache.

    Raises:
        CacheError: it is in a bucket.
    """
    if "://" in url and not url.startswith("file://"):
        raise CacheError(
            f"the compile cache {url} is not a folder of this machine: look at it with the bucket's own tools, or use "
            "neuron_parallel_compile --command clear-locks"
        )
    return Path(url.removeprefix("file://"))


def scan(cache: Path) -> list[Entry]:
    """Every entry, by path.

    Raises:
        CacheError: the folder is not there or cannot be read.
    """
    try:
        return list(_entries(cache))
    except OSError as exc:
        raise CacheError(
            f"cannot read the compile cache {cache}: {exc.strerror}; give the right folder with --cache"
        ) from exc


def _entries(cache: Path) -> Iterator[Entry]:
    for compiler in sorted(path for path in cache.iterdir() if path.name.startswith("neuronxcc-")):
        for path in sorted(path for path in compiler.iterdir() if _MODULE.fullmatch(path.name)):
            sizes = {one.name: one.stat().st_size for one in path.iterdir()}
            state = _state(path, sizes)
            told = _first_line(path / "model.log") if state == "failed" and "model.log" in sizes else ""
            yield Entry(
                path=path,
                compiler=compiler.name.removeprefix("neuronxcc-"),
                state=state,
                n_bytes=sum(sizes.values()),
                told=told,
            )


def _state(path: Path, sizes: Mapping[str, int]) -> State:
    if "model.done" in sizes or sizes.get("model.neff", 0) > _FAILED_NEFF_BYTES:
        return "compiled"
    locks = [name for name in sizes if name.endswith(".lock")]
    if any(_held(path / name) for name in locks):
        return "compiling"
    if "model.log" in sizes or "model.neff" in sizes:
        return "failed"
    return "stale lock" if locks else "not compiled"


def _held(lock: Path) -> bool:
    """Whether a process holds the lock file."""
    descriptor = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _first_line(log: Path) -> str:
    with log.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline().strip()[:400]


def remove(entries: Iterable[Entry]) -> list[Entry]:
    """Take entries out of the cache; the compiler makes them again when they are needed.

    Returns:
        Those that were taken out.

    Raises:
        CacheError: one is being compiled, or has a file that the compiler does not write; nothing is removed then.
    """
    entries = list(entries)
    for entry in entries:
        if _state(entry.path, {one.name: one.stat().st_size for one in entry.path.iterdir()}) == "compiling":
            raise CacheError(f"{entry.path} is being compiled by another process: wait for it, or end it first")
        strange = [one.name for one in entry.path.iterdir() if one.is_dir() or not _KNOWN.fullmatch(one.name)]
        if strange:
            raise CacheError(
                f"{entry.path} has {', '.join(sorted(strange))}, which no compiler wrote: look at it first"
            )
    for entry in entries:
        shutil.rmtree(entry.path)
    return entries
