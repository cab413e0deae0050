"""Cache folder of the Neuron compiler: states of its entries, and removal of failed or blocked ones.

    <cache>/neuronxcc-<version>/MODULE_<graph>+<flags>/
        model.hlo_module.pb          the graph; compile_flags.json the flags
        model.neff, model.done       compiled
        model.log                    instead of them: compilation failed and is not retried automatically
        model.hlo_module.pb.lock     locked (flock) by the compiling process; stale if that process was killed

A run that needs a failed graph fails again from the cache, and a run that needs a graph under a stale lock waits
forever; guides therefore advise deleting the whole cache. This module finds and removes only the blocking entries, one
by one, and keeps the rest. An entry with a file that the compiler does not write is left alone.

Compile keys (`compile_key.py`) are stored beside the entries. Cost: one directory listing per entry.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lt_trainer.errors import TrainerError

DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
"""The compiler's default, used when no flag or variable sets another."""

EntryState = Literal["compiled", "failed", "compiling", "stale lock", "not compiled"]
_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(\+[0-9A-Za-z]+)?")
_COMPILER_FILES = re.compile(r"model\.(hlo(_module)?\.pb(\.gz)?|neff|done|log)(\.lock)?|compile_flags\.(json|txt)")
_FAILED_NEFF_BYTES = 64
"""Older compilers mark a failure by a few bytes of text instead of the compiled graph."""


class CompileCacheError(TrainerError):
    """A compile cache that is missing, not on a local disk, or contains files not written by the compiler."""


@dataclass(frozen=True, kw_only=True)
class CompileCacheEntry:
    """Cache entry of one graph.

    Attributes:
        path: the entry's folder.
        compiler: version of the compiler, from the parent folder.
        state: see the module docstring.
        n_bytes: total size of its files.
        error_message: first line of the compiler's log if compilation failed.
    """

    path: Path
    compiler: str
    state: EntryState
    n_bytes: int
    error_message: str = ""


def cache_url(environ: Mapping[str, str]) -> str:
    """Return the cache's folder or URL from a rank's environment.

    --cache_dir in the compiler flags takes precedence over NEURON_COMPILE_CACHE_URL.
    """
    flag = re.search(r"--cache_dir[= ](\S+)", environ.get("NEURON_CC_FLAGS", ""))
    return flag[1] if flag else environ.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_CACHE


def local_cache_folder(url: str) -> Path:
    """Return the local folder of a cache URL.

    Raises:
        CompileCacheError: the cache is in a bucket.
    """
    if "://" in url and not url.startswith("file://"):
        raise CompileCacheError(
            f"the compile cache {url} is not a local folder; inspect it with the bucket's own tools, or use "
            "neuron_parallel_compile --command clear-locks"
        )
    return Path(url.removeprefix("file://"))


def scan_cache(cache: Path) -> list[CompileCacheEntry]:
    """Return all entries, sorted by path.

    Raises:
        CompileCacheError: the folder is missing or cannot be read.
    """
    try:
        return list(_iter_entries(cache))
    except OSError as exc:
        raise CompileCacheError(
            f"cannot read the compile cache {cache}: {exc.strerror}; set the folder with --cache"
        ) from exc


def _iter_entries(cache: Path) -> Iterator[CompileCacheEntry]:
    for compiler in sorted(path for path in cache.iterdir() if path.name.startswith("neuronxcc-") and path.is_dir()):
        for path in sorted(path for path in compiler.iterdir() if _is_entry(path)):
            sizes = _sizes(path)
            state = _entry_state(path, sizes)
            error_message = _first_line(path / "model.log") if state == "failed" and "model.log" in sizes else ""
            yield CompileCacheEntry(
                path=path,
                compiler=compiler.name.removeprefix("neuronxcc-"),
                state=state,
                n_bytes=sum(sizes.values()),
                error_message=error_message,
            )


def _is_entry(path: Path) -> bool:
    """Return True for the folder of a graph; a link to one is none."""
    return bool(_MODULE.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def _sizes(path: Path) -> dict[str, int]:
    """Return the size of each entry's file; that of links and other things is 0."""
    found = {}
    for file in os.scandir(path):
        status = file.stat(follow_symlinks=False)
        found[file.name] = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return found


def _entry_state(path: Path, sizes: Mapping[str, int]) -> EntryState:
    if "model.done" in sizes or sizes.get("model.neff", 0) > _FAILED_NEFF_BYTES:
        return "compiled"
    locks = [name for name in sizes if name.endswith(".lock")]
    if any(_is_locked(path / name) for name in locks):
        return "compiling"
    if "model.log" in sizes or "model.neff" in sizes:
        return "failed"
    return "stale lock" if locks else "not compiled"


def _is_locked(lock: Path) -> bool:
    """Return True if a process holds the lock file."""
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _first_line(log: Path) -> str:
    with open(log, "rb") as file:
        return file.readline(4096).decode(errors="replace").strip()[:400]


def remove_entries(entries: Sequence[CompileCacheEntry]) -> None:
    """Remove entries from the cache; the compiler recompiles them when they are needed.

    Raises:
        CompileCacheError: an entry is being compiled or has a file that the compiler does not write; nothing is
            removed.
    """
    for entry in entries:
        if _entry_state(entry.path, _sizes(entry.path)) == "compiling":
            raise CompileCacheError(f"{entry.path} is being compiled by another process; wait for it, or stop it")
        if entry.path.parent.is_symlink():
            raise CompileCacheError(f"{entry.path.parent} is a symbolic link; give the folder of its target")
        for file in entry.path.iterdir():
            if file.is_symlink() or not file.is_file() or not _COMPILER_FILES.fullmatch(file.name):
                raise CompileCacheError(f"{file} was not written by the compiler; remove it by hand")
    for entry in entries:
        shutil.rmtree(entry.path)
