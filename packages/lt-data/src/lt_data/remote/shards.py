"""A token store that stays in S3.

Its manifest and tokenizer are fetched when it is opened; indexes of documents and packs when they are first asked for.
Ids come in one of two ways:

    a store of at most `cache_bytes`    shard by shard into the cache, whole, at the first use; then as from the disk
    a larger one                        by exact ranges, those of all rows of a batch at the same time, no cache

since rows in shuffled order ask for ids all over the store, of which a smaller cache would hold few. Whole files are
compared with their hash before they are used; ranges come over TLS and have the length that was asked for, no more.

    CACHE/lock                     one process at a time fetches or removes files
    CACHE/stores/<id>/...          the files of a store as they lie in S3; another list of files has another id

When shards of all stores in the cache would take more than `cache_bytes`, those used longest ago are removed; who has
one mapped keeps it. Cost of ranges: one request for each run of a row, 32 at a time, in the thread that reads ahead.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.progress import no_progress
from lt_data.remote.download import check_whole, fetch_file, read_list
from lt_data.remote.s3_folder import S3Folder
from lt_data.remote.threads import Meter, pool_of
from lt_data.storage import translate_os_errors
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.manifest import StoreManifest, read_manifest

DEFAULT_CACHE_BYTES = 20 * 2**30
_CONNECTIONS = 32
_Span = tuple[int, int, int]
"""Shard, first id and one past the last one."""


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/lt-data`, or `~/.cache/lt-data`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lt-data"


class RemoteShards:
    """The files of a store in S3; may be shared by threads and sent to other processes.

    Args:
        url: `s3://bucket/folder` of the store.
        cache: folder of the cache, which processes and stores may share; `lt-data` in the user's cache folder if not
            given.
        cache_bytes: bytes that the shards in it may take; 20 GiB if not given.

    Attributes:
        manifest: of the store.
        folder: where those of its files are that are fetched whole.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: no whole store is there, or the cache cannot be written.
    """

    def __init__(self, url: str, *, cache: str | Path | None = None, cache_bytes: int | None = None) -> None:
        if cache_bytes is not None and cache_bytes < 0:
            raise DataError(f"cache_bytes = {cache_bytes}: at least 0, for a store that is read by ranges")
        self._source, self._cache_bytes = S3Folder(url), DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
        self._cache = Path(os.path.abspath(cache or default_cache()))
        self._list = read_list(self._source)
        check_whole(self._source, self._list)
        if MANIFEST not in self._list.files:
            raise DataError(f"{url}: a folder of files, not a token store (no {MANIFEST})")
        self.folder = self._cache / "stores" / sha256(self._list.encode()).hexdigest()[:32]
        self._maps: dict[int, np.ndarray] = {}
        self._fetched: dict[int, dict[_Span, np.ndarray]] = {}  # by thread: those of its last `prefetch`
        self.bring(MANIFEST)
        self.manifest: StoreManifest = read_manifest(self.folder)
        self.bring(self.manifest.tokenizer_folder)
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        n_bytes = sum(file.n_bytes for name, file in self._list.files.items() if name.endswith(".bin"))
        self._is_cached = n_bytes <= self._cache_bytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}, "_fetched": {}}

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return the ids [begin, end) of a shard, in the dtype of the store.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            DataError: the shard is not what was uploaded, or the cache cannot be written.
        """
        if not 0 <= begin <= end <= self.manifest.shards[shard].tokens:
            raise IndexError(f"tokens {begin} to {end} of shard {shard}")
        if self._is_cached:
            return self._map(shard)[begin:end]
        ids = self._fetched.get(threading.get_ident(), {}).get((shard, begin, end))
        return self._read_range((shard, begin, end)) if ids is None else ids

    def prefetch(self, spans: Iterable[_Span]) -> None:
        """Fetch many spans at the same time, for the next calls of `read` by this thread.

        Raises:
            DataError: see `read`.
        """
        if self._is_cached:
            for shard in sorted({shard for shard, _, _ in spans}):
                self._map(shard)
            return
        wanted = [*dict.fromkeys(spans)]
        _ = self._source.client  # made by one thread, not by each
        with pool_of(_CONNECTIONS) as pool:
            found = pool.map(self._read_range, wanted)
            self._fetched[threading.get_ident()] = dict(zip(wanted, found, strict=True))

    def _name(self, shard: int) -> str:
        return self.manifest.shard_file(shard, "bin")

    def _read_range(self, span: _Span) -> np.ndarray:
        shard, begin, end = span
        item = self._dtype.itemsize
        content = self._source.read_range(self._name(shard), begin * item, end * item) if begin < end else b""
        return np.frombuffer(content, self._dtype)

    def _map(self, shard: int) -> np.ndarray:
        if (ids := self._maps.get(shard)) is None:
            self.bring(self._name(shard))
            with translate_os_errors("read", self.folder):
                tokens = self.manifest.shards[shard].tokens
                path = self.folder / self._name(shard)
                ids = np.memmap(path, self._dtype, "r") if tokens else np.zeros(0, self._dtype)
            self._maps[shard] = ids
        return ids

    def bring(self, name: str) -> None:
        """Have a file of the store, or all files of a folder of it, in `folder`; what is not there stays away.

        Raises:
            DataError: see `read`.
        """
        names = [name] if name in self._list.files else [n for n in self._list.files if n.startswith(f"{name}/")]
        for name in names:
            path, n_bytes = self.folder / name, self._list.files[name].n_bytes
            with translate_os_errors("write", path):
                if not path.exists():
                    with self._locked():
                        if not path.exists():  # another process was not faster
                            if name.endswith(".bin"):
                                self._make_room(n_bytes)
                            part = path.with_name(f"{path.name}.part")
                            fetch_file(self._source, self._list, name, part, Meter(n_bytes, no_progress))
                            part.rename(path)
                with suppress(FileNotFoundError, PermissionError):  # removed just now; the cache of another user
                    os.utime(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the cache, among threads and processes; it ends with the process."""
        self._cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, n_bytes: int) -> None:
        """Remove the shards that were used longest ago, of any store, until one of `n_bytes` fits."""
        found = [(path.stat(), path) for path in (self._cache / "stores").glob("*/**/*.bin")]
        total = n_bytes + sum(stat.st_size for stat, _ in found)
        for stat, path in sorted(found, key=lambda entry: entry[0].st_mtime_ns):
            if total <= self._cache_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size
