"""Bytes of an object in S3, as the blocks of 1 MiB that its listing knows by their hashes.

Cost: one request for each call, and one more for each block that came with other bytes.
"""

from lt_data.errors import DataError
from lt_data.remote.contents import BLOCK_BYTES, block_digest
from lt_data.remote.parcel import RemoteFile
from lt_data.remote.s3 import S3Folder

_RANGE_BLOCKS = 8  # blocks in one request
_TRIES = 4  # for a block that came with other bytes


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Runs [first, last) of consecutive numbers, each of at most `_RANGE_BLOCKS`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number and number - runs[-1][0] < _RANGE_BLOCKS:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def fetch_blocks(source: S3Folder, name: str, file: RemoteFile, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file, whole blocks of it, compared with the listing where there is one.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: the bytes of a block are others, several times over.
    """
    data = bytearray(source.read_range(name, begin, end))
    if file.listed is None:
        return bytes(data)
    for at in range(0, end - begin, BLOCK_BYTES):
        wanted = file.listed.block((begin + at) // BLOCK_BYTES)
        tries = 0
        while block_digest(memoryview(data)[at : at + BLOCK_BYTES]) != wanted:
            tries += 1
            if tries == _TRIES:
                raise DataError(
                    f"{source.url}/{name}: its bytes from {begin + at} on are not those that were uploaded, {_TRIES} "
                    "times over; upload it again"
                )
            size = min(BLOCK_BYTES, end - begin - at)
            data[at : at + size] = source.read_range(name, begin + at, begin + at + size)
    return bytes(data)
