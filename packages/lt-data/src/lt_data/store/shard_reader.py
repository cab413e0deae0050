"""Interface of a reader of shards that are not in a local folder, and a check of what it reads."""

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from lt_data.errors import DataError
from lt_data.store.manifest import ShardFile

_READ_IDS = 2**22  # ids per read


class ShardReader(Protocol):
    """Reader of the shards of a store that is not in a local folder, such as lt_data.remote.reading."""

    def read(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return the ids [begin, end) of a shard, in the dtype of the store."""
        ...

    def prefetch(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Fetch many spans (shard, begin, end) concurrently."""
        ...

    def bring(self, name: str) -> None:
        """Download a file of the store, or all files of one of its folders, to the local folder."""
        ...


def check_shard(reader: ShardReader, number: int, shard: ShardFile) -> None:
    """Read all ids of a shard and compare their hash.

    Raises:
        DataError: it differs, or they cannot be read.
    """
    digest = hashlib.sha256()
    for begin in range(0, shard.tokens, _READ_IDS):
        digest.update(np.ascontiguousarray(reader.read(number, begin, min(begin + _READ_IDS, shard.tokens))).data)
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"shard {shard.name}: SHA-256 differs from the manifest: upload it again")
