"""A token store that stays in S3: what is read of it comes in blocks of 1 MiB and is kept on the local disk.

The manifest and the tokenizer are fetched when it is opened; the indexes of documents and the packs when they are
first asked for, as whole files below `CACHE/stores/`; of the ids those blocks that are read, into `CACHE/blocks/` (see
lt_data.remote.cache), which alone are bounded by `cache_bytes`. Every whole file is compared with its SHA-256, and
every block with the listing that the upload left. A store that other programs have copied has no listing: then blocks
are checked by their length alone, which `verified` tells.

Rows in shuffled order ask for blocks all over the store: a cache that holds all of it fetches each block once, a
smaller one fetches most of them again in every epoch. Cost of a read whose blocks are there: some 20 µs for each block.
"""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.remote.blocks import fetch_blocks, runs
from lt_data.remote.cache import TMP, BlockCache, is_of_the_dead
from lt_data.remote.contents import BLOCK_BYTES
from lt_data.remote.parcel import RemoteFile, of_bucket
from lt_data.remote.s3 import S3Folder, S3Options
from lt_data.remote.threads import pool_of
from lt_data.storage import fsync, fsync_folder, translate_os_errors, write
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.manifest import SHARD_FOLDER, TOKENIZER_FOLDER, StoreManifest

DEFAULT_CACHE_BYTES = 20 * 2**30
_PIECE = 8 * BLOCK_BYTES
_WINDOW = 64 * BLOCK_BYTES


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/lt-data`, or `~/.cache/lt-data`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lt-data"


class RemoteShards:
    """The shards of a store in S3, read through a cache; may be shared by threads and sent to other processes.

    Args:
        url: `s3://bucket/folder` of the store.
        cache: folder of the cache, which several processes and stores may share.
        cache_bytes: bytes that its blocks may take.
        options: how S3 is spoken to.

    Attributes:
        manifest: of the store.
        folder: where those of its files are that are fetched whole.
        verified: whether every block is compared with a hash.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: no whole store is there, or the cache cannot be written.
    """

    def __init__(
        self,
        url: str,
        *,
        cache: Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        options: S3Options | None = None,
    ) -> None:
        cache = Path(os.path.abspath(cache or default_cache()))
        self._source, self._process = S3Folder(url, options), os.getpid()
        parcel = of_bucket(self._source)
        if parcel.problems:
            raise DataError(f"{url}: {len(parcel.problems)} files are not as uploaded: {parcel.problems[0]}")
        self.manifest: StoreManifest = parcel.store()
        self._files = parcel.files
        self._blocks = BlockCache(cache, cache_bytes)
        self.folder = cache / "stores" / parcel.identity[:32]
        assert parcel.manifest is not None
        with translate_os_errors("write", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.bring(TOKENIZER_FOLDER)
        self._keep(MANIFEST, RemoteFile(n_bytes=len(parcel.manifest)), [parcel.manifest])

    @property
    def verified(self) -> bool:
        """Whether every block is compared with a hash."""
        return all(self._shard_file(number)[1].listed is not None for number in range(len(self.manifest.shards)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": self._address(), "_process": None}

    def _address(self) -> tuple[str, S3Options]:
        """Where the folder in S3 is; another process makes its client when it first asks for something."""
        return self._source if isinstance(self._source, tuple) else (self._source.url, self._source.options)

    def _s3(self) -> S3Folder:
        """The folder in S3, with a client of this process."""
        if self._process != os.getpid():
            self._source, self._process = S3Folder(*self._address()), os.getpid()
        assert isinstance(self._source, S3Folder)
        return self._source

    def _shard_file(self, number: int) -> tuple[str, RemoteFile]:
        name = f"{SHARD_FOLDER}/{self.manifest.shards[number].name}.bin"
        return name, self._files[name]

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """The ids [begin, end) of a shard, in the dtype of the store (a copy).

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            DataError: the bytes are not those that were uploaded, or the cache cannot be written.
        """
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if not 0 <= begin <= end <= self.manifest.shards[shard].tokens:
            raise IndexError(f"tokens {begin} to {end} of shard {shard}")
        first, last = begin * dtype.itemsize, end * dtype.itemsize
        numbers = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
        parts = {number: self._cached(shard, number, first, last) for number in numbers}
        missing = [number for number, part in parts.items() if part is None]
        for number, block in self._fetch([(shard, number) for number in missing]).items():
            parts[number[1]] = block[max(first - number[1] * BLOCK_BYTES, 0) : last - number[1] * BLOCK_BYTES]
        return np.frombuffer(b"".join(part for part in parts.values() if part is not None), dtype)

    def prefetch(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Bring the blocks of many spans (shard, first id, one past the last id) at once, over several connections.

        Raises:
            DataError: see `read`.
        """
        item = np.dtype(self.manifest.dtype).itemsize
        wanted = {
            (shard, number)
            for shard, begin, end in spans
            for number in range(begin * item // BLOCK_BYTES, -(-end * item // BLOCK_BYTES))
        }
        self._fetch([where for where in sorted(wanted) if self._cached(*where, 0, 0) is None], give=False)

    def _cached(self, shard: int, number: int, first: int, last: int) -> bytes | None:
        """What of the bytes [first, last) of a shard lies in one block; None where the block is not there."""
        _, file = self._shard_file(shard)
        at = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, file.n_bytes - at)
        begin = max(first - at, 0)
        digest = None if file.listed is None else file.listed.block(number)
        return self._blocks.read(_key(file), number, begin, max(begin, min(last - at, size)), size, digest)

    def _fetch(self, wanted: list[tuple[int, int]], *, give: bool = True) -> dict[tuple[int, int], bytes]:
        """Take blocks from S3 into the cache; gives them back too if asked: (shard, number) → bytes."""
        found: dict[tuple[int, int], bytes] = {}
        jobs = [
            (shard, first, last)
            for shard in sorted({shard for shard, _ in wanted})
            for first, last in runs([number for of, number in wanted if of == shard])
        ]
        if not jobs:
            return found
        source = self._s3()

        def fetch(job: tuple[int, int, int]) -> None:
            shard, first, last = job
            name, file = self._shard_file(shard)
            begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, file.n_bytes)
            data = fetch_blocks(source, name, file, begin, end)
            for number in range(first, last):
                block = data[(number - first) * BLOCK_BYTES : (number - first + 1) * BLOCK_BYTES]
                self._blocks.write(_key(file), number, block)
                if give:
                    found[shard, number] = block

        with pool_of(min(len(jobs), source.options.connections)) as pool:
            for future in [pool.submit(fetch, job) for job in jobs]:
                future.result()
        return found

    def bring(self, name: str) -> None:
        """Have a file of the store, or all files of a folder of it, in `folder`; what is not there stays away.

        Raises:
            DataError: see `read`.
        """
        names = [name] if name in self._files else [other for other in self._files if other.startswith(f"{name}/")]
        for name in names:
            path, file = self.folder / name, self._files[name]
            with translate_os_errors("look at", path):
                there = path.is_file() and path.stat().st_size == file.n_bytes
            if not there:
                self._keep(name, file, self._pieces(name, file))

    def _pieces(self, name: str, file: RemoteFile) -> Iterator[bytes]:
        """A whole file, some pieces at a time."""
        source = self._s3()
        with pool_of(source.options.connections) as pool:
            for window in range(0, file.n_bytes, _WINDOW):
                begins = range(window, min(window + _WINDOW, file.n_bytes), _PIECE)
                yield from pool.map(
                    lambda at: fetch_blocks(source, name, file, at, min(at + _PIECE, file.n_bytes)), begins
                )

    def _keep(self, name: str, file: RemoteFile, pieces: Iterable[bytes]) -> None:
        """Write a file of the store, which other processes may be doing too."""
        path = self.folder / name
        digest = hashlib.sha256()
        with translate_os_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"*{TMP}"):
                with suppress(FileNotFoundError):
                    if is_of_the_dead(left):
                        left.unlink()
            tmp = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TMP}")
            with tmp.open("xb") as out:
                fcntl.flock(out, fcntl.LOCK_EX)
                try:
                    for piece in pieces:
                        write(out, piece)
                        digest.update(piece)
                    out.flush()
                    fsync(out.fileno())
                    if file.sha256 is not None and digest.hexdigest() != file.sha256:
                        raise DataError(
                            f"{self._source.url}/{name}: its SHA-256 is not the one it was uploaded with; upload again"
                        )
                    tmp.rename(path)
                except BaseException:
                    tmp.unlink(missing_ok=True)
                    raise
            fsync_folder(path.parent)


def _key(file: RemoteFile) -> str:
    assert file.sha256 is not None, "a manifest names the SHA-256 of every shard"
    return file.sha256
