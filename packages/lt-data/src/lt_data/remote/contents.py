"""What the bytes of a folder's files are: hashes, and the listing that an upload leaves beside them.

A file is looked at in two cuts. *Parts* are what one request carries: their MD5 and SHA-256 give the ETag and the
checksum that S3 keeps of the whole object, so that what lies there can be compared without fetching it. *Blocks* of
1 MiB are what a reader fetches: the listing holds the first 16 bytes of the SHA-256 of each, so that a block is checked
before anyone sees it.

    lt-data-files.json   {"format": "lt-data-files", "version": 1, "block_bytes": 1048576, "files": {NAME: {"bytes",
                          "sha256" (hex), "blocks" (base64 of 16 bytes for each block)}}}

Cost: about 22 bytes of listing for each MiB; each byte is hashed four times, at about 300 MB/s and core.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import is_plain_name
from lt_data.storage import translate_os_errors

FORMAT = "lt-data-files"
VERSION = 1
LISTING = "lt-data-files.json"
BLOCK_BYTES = 2**20
DIGEST_BYTES = 16  # of each block's SHA-256: 128 bits, which nobody hits by chance
MAX_PARTS = 10_000  # what S3 takes for one object


def block_digest(block: bytes | memoryview) -> bytes:
    """The hash of one block."""
    return hashlib.sha256(block).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, kw_only=True)
class PartHash:
    """What one request carries: its size, its hashes, and those of the blocks in it."""

    n_bytes: int
    md5: bytes
    sha256: bytes
    blocks: bytes

    @classmethod
    def of(cls, data: bytes | memoryview) -> "PartHash":
        """Hash a part; all parts of a file but its last have a whole number of blocks."""
        view = memoryview(data)
        return cls(
            n_bytes=len(view),
            md5=hashlib.md5(view, usedforsecurity=False).digest(),  # S3's ETag is one
            sha256=hashlib.sha256(view).digest(),
            blocks=b"".join(block_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)),
        )


@dataclass(frozen=True, kw_only=True)
class FileHash:
    """The bytes of a file: SHA-256 (hex) of the whole, and its parts. A file in one part is not cut."""

    sha256: str
    parts: tuple[PartHash, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return sum(part.n_bytes for part in self.parts)

    @property
    def blocks(self) -> bytes:
        """The hashes of its blocks, one after the other."""
        return b"".join(part.blocks for part in self.parts)

    @property
    def etag(self) -> str:
        """The ETag that S3 gives an object of these bytes, where it is not encrypted with a key of its own."""
        if len(self.parts) == 1:
            return self.parts[0].md5.hex()
        joined = b"".join(part.md5 for part in self.parts)
        return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(self.parts)}"

    @property
    def checksum(self) -> str:
        """The `ChecksumSHA256` that S3 keeps of such an object: of its bytes, or of its parts' hashes."""
        if len(self.parts) == 1:
            return base64_text(self.parts[0].sha256)
        joined = b"".join(part.sha256 for part in self.parts)
        return f"{base64_text(hashlib.sha256(joined).digest())}-{len(self.parts)}"


def base64_text(data: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def part_size(n_bytes: int, wanted: int) -> int:
    """Return the bytes of each part of a file: `wanted`, doubled until S3 takes their number, as boto3 does it."""
    while -(-n_bytes // wanted) > MAX_PARTS:
        wanted *= 2
    return wanted


def hash_bytes(data: bytes) -> FileHash:
    """Hash what is sent in one request."""
    return FileHash(sha256=hashlib.sha256(data).hexdigest(), parts=(PartHash.of(data),))


def read_parts(path: Path, file: Any, n_bytes: int, part_bytes: int) -> Any:
    """Yield the parts of an open, unbuffered file (an empty file is one empty part).

    Raises:
        DataError: it does not have `n_bytes`.
    """
    done = 0
    while True:
        part = bytearray(min(part_bytes, n_bytes - done))
        view = memoryview(part)
        filled = 0
        while filled < len(part):
            n = file.readinto(view[filled:])
            if not n:
                raise DataError(f"{path}: ended after {done + filled} of {n_bytes} bytes: something is changing it")
            filled += n
        done += filled
        yield view
        if done == n_bytes:
            break
    if file.read(1):
        raise DataError(f"{path}: has more than the {n_bytes} bytes it had: something is changing it")


class PartReader:
    """File whose parts are hashed as they are read, in order and once, as boto3's transfer manager reads a stream.

    Args:
        path: the file.
        n_bytes: bytes that it must have.
        part_bytes: bytes of each part but the last, and of each call of `read`.
        check: called with the SHA-256 (hex) of the whole before the last part is given out; may raise.
        opener: opens the file for reading, unbuffered.
    """

    def __init__(
        self,
        path: Path,
        n_bytes: int,
        part_bytes: int,
        check: Callable[[str], None],
        opener: Callable[[], BinaryIO],
    ) -> None:
        self.n_bytes, self.part_bytes = n_bytes, part_bytes
        self._path, self._check, self._open = path, check, opener
        self._whole, self._hashes = hashlib.sha256(), list[PartHash]()
        self._parts = self._read()

    def readable(self) -> bool:
        """Return True, as files do."""
        return True

    def seekable(self) -> bool:
        """Return False: what was read cannot be read again."""
        return False

    def read(self, n: int) -> bytes:
        """Return the next part, or nothing at the end.

        Raises:
            DataError: the file cannot be read, or has another size; or what `check` raises.
        """
        assert n == self.part_bytes, (n, self.part_bytes)
        return next(self._parts, b"")

    def content(self) -> FileHash:
        """Return what was read, once it has been read to its end."""
        return FileHash(sha256=self._whole.hexdigest(), parts=tuple(self._hashes))

    def _read(self) -> Iterator[bytes]:
        done = 0
        with translate_os_errors("read", self._path), self._open() as file:
            for data in read_parts(self._path, file, self.n_bytes, self.part_bytes):
                self._whole.update(data)
                self._hashes.append(PartHash.of(data))
                done += len(data)
                if done == self.n_bytes:
                    self._check(self._whole.hexdigest())
                yield bytes(data)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A file in a listing: its size, SHA-256 (hex) and the hashes of its blocks."""

    n_bytes: int
    sha256: str
    blocks: bytes

    def block(self, number: int) -> bytes:
        """The hash of one block."""
        return self.blocks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


def encode_listing(files: Mapping[str, Listed]) -> bytes:
    """The bytes of the listing; the same files give the same bytes."""
    entries = {
        name: {"bytes": file.n_bytes, "sha256": file.sha256, "blocks": base64_text(file.blocks)}
        for name, file in sorted(files.items())
    }
    values = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES, "files": entries}
    return (json.dumps(values, indent=1) + "\n").encode()


def decode_listing(content: bytes, source: str) -> dict[str, Listed]:
    """Read a listing; `source` names it in errors. Every name is one that may become a file below a folder.

    Raises:
        DataError: it is not one, or not one that this program reads.
    """
    try:
        values = strict_json.load_object(content, source, "upload again")
        if values["format"] != FORMAT:
            raise DataError(f"{source}: not a listing of lt-data")
        if values["version"] != VERSION or values["block_bytes"] != BLOCK_BYTES:
            raise DataError(f"{source}: version {values['version']!r}; this program reads {VERSION}: update lt-data")
        found = {check_name(name, source): _listed(entry) for name, entry in values["files"].items()}
    except DataError:  # is a ValueError too
        raise
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as exc:
        raise DataError(f"{source}: broken listing ({type(exc).__name__}); upload again") from exc
    for name, file in found.items():
        if len(file.blocks) != -(-file.n_bytes // BLOCK_BYTES) * DIGEST_BYTES:
            raise DataError(f"{source}: broken listing (the blocks of {name}); upload again")
    return found


def _listed(entry: Mapping[str, Any]) -> Listed:
    n_bytes, sha256 = entry["bytes"], entry["sha256"]
    if type(n_bytes) is not int or n_bytes < 0 or len(bytes.fromhex(sha256)) != 32:
        raise ValueError("bytes or sha256")
    return Listed(n_bytes=n_bytes, sha256=sha256, blocks=base64.b64decode(entry["blocks"], validate=True))


def check_name(name: str, source: str) -> str:
    """Give back a name that stands for a file below a folder, and for an object below a prefix.

    Raises:
        DataError: it is another one, such as `../x` or `/x`.
    """
    if not all(map(is_plain_name, name.split("/"))) or len(name.encode(errors="replace")) > 900:
        raise DataError(f"{source}: {name!r} is no name of a file in a folder")
    return name
