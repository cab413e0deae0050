"""Entries of many shards as columns, so that a store of 10^5 shards opens without an object for each.

Columns are little-endian, one after the other: `tokens`, `documents`, `arrow_bytes` (i64), the SHA-256 of `.bin`,
`.idx`, `.src` and `.arrow` (32 bytes; zeros for no file), then the names, each with a newline. 152 bytes a shard and
its name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, overload

import numpy as np

from lt_data.errors import DataError
from lt_data.file_names import is_plain_name
from lt_data.store.manifest import ShardFile

_COUNTS = ("tokens", "documents", "arrow_bytes")
_HASHES = ("sha256", "idx_sha256", "src_sha256", "arrow_sha256")
_NO_FILE = bytes(32).hex()
_ENTRY_BYTES = 8 * len(_COUNTS) + 32 * len(_HASHES)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardTable(Sequence[ShardFile]):
    """Shard entries; one is made when it is asked for.

    Attributes:
        counts: rows of `tokens`, `documents`, `arrow_bytes` (int64 [3, n]).
        hashes: SHA-256 of `.bin`, `.idx`, `.src`, `.arrow` (uint8 [4, n, 32]).
        names: names of the files in their parts.
        numbered: the shards as those of one flat store: numbered through, without sources.
        has_columns: whether that flat store has columns.
    """

    counts: np.ndarray
    hashes: np.ndarray
    names: tuple[str, ...]
    numbered: bool = False
    has_columns: bool = True

    @classmethod
    def of(cls, shards: Sequence[ShardFile]) -> "ShardTable":
        """Return the table of entries."""
        counts = np.array([[getattr(shard, name) for shard in shards] for name in _COUNTS], np.int64)
        hashes = b"".join(bytes.fromhex(getattr(shard, name) or _NO_FILE) for name in _HASHES for shard in shards)
        table = np.frombuffer(hashes, np.uint8).reshape(len(_HASHES), len(shards), 32)
        return cls(counts=counts.reshape(len(_COUNTS), -1), hashes=table, names=tuple(shard.name for shard in shards))

    def encode(self) -> bytes:
        """Return the bytes of the table."""
        names = "".join(f"{name}\n" for name in self.names).encode()
        return self.counts.astype("<i8").tobytes() + self.hashes.tobytes() + names

    @classmethod
    def decode(cls, content: memoryview, n: int) -> "ShardTable":
        """Parse what `encode` made of n shards.

        Raises:
            DataError: it is not that.
        """
        fixed = n * _ENTRY_BYTES
        try:
            *names, rest = bytes(content[fixed:]).decode().split("\n")
        except UnicodeDecodeError as exc:
            raise DataError(f"not a table of {n} shards") from exc
        if len(content) < fixed or len(names) != n or rest or not all(map(is_plain_name, set(names))):
            raise DataError(f"not a table of {n} shards")
        counts = np.frombuffer(content, "<i8", len(_COUNTS) * n).reshape(len(_COUNTS), n)
        hashes = np.frombuffer(content, np.uint8, 32 * len(_HASHES) * n, 8 * counts.size)
        if n and (counts.min() < 0 or counts.max() >= 2**62 // n):
            raise DataError("a count is negative or too large")
        return cls(counts=counts, hashes=hashes.reshape(len(_HASHES), n, 32), names=tuple(names))

    @cached_property
    def tokens(self) -> np.ndarray:
        """Ids of each shard (int64 [n])."""
        return self.counts[0]

    @cached_property
    def documents(self) -> np.ndarray:
        """Documents of each shard (int64 [n])."""
        return self.counts[1]

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> ShardFile: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardFile, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardFile | tuple[ShardFile, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        number = range(len(self))[number]  # raises IndexError
        counts = dict(zip(_COUNTS, self.counts[:, number].tolist(), strict=True))
        hashes = {name: self.hashes[i, number].tobytes().hex() for i, name in enumerate(_HASHES)}
        for name in _HASHES[2:]:
            if hashes[name] == _NO_FILE or (self.numbered and (name == "src_sha256" or not self.has_columns)):
                hashes[name] = ""
        if not hashes["arrow_sha256"]:
            counts["arrow_bytes"] = 0
        name = f"{number:05d}" if self.numbered else self.names[number]
        return ShardFile(name=name, **counts, **hashes)

    def __iter__(self) -> Iterator[ShardFile]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(cast("Sequence[ShardFile]", other))

    __hash__ = None  # type: ignore[assignment]
