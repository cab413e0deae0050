"""What the bytes of files must be, and a reader that does not let others pass.

A file's content is a sequence of segments, each a number of bytes and their xxh3-128. A checkpoint's manifest tells it
for every file without reading any (the header's hash, then the slices' in file order); of other folders' files it is
one segment, taken by reading. `identity` pins the content in few characters, so that two places can be compared.

Cost: of a checkpoint none but the manifest; of another folder one read. `CheckedReader` hashes what it hands out.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import xxhash

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.manifest import Manifest

Segments = tuple[tuple[int, str], ...]


class DamagedError(CheckpointError):
    """Bytes that are not those that were written."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a file's bytes must be: (number of bytes, xxh3-128 as hex) after one another."""

    segments: Segments

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return sum(n_bytes for n_bytes, _ in self.segments)

    @property
    def identity(self) -> str:
        """Says which content it is; another content has another one."""
        text = ";".join(f"{n_bytes}-{digest}" for n_bytes, digest in self.segments)
        return f"1-{xxhash.xxh3_128_hexdigest(text.encode())}"


def of_bytes(data: bytes) -> Content:
    """The content of a file that holds these bytes."""
    return Content(segments=((len(data), xxhash.xxh3_128_hexdigest(data)),))


def of_manifest(manifest: Manifest) -> dict[str, Content]:
    """The content of every file that a manifest lists."""
    found: dict[str, list[tuple[int, int, str]]] = {
        name: [(0, record.hashed_bytes, record.xxh3_128)] for name, record in manifest.files.items()
    }
    for members in manifest.tensors.values():
        for record in members.values():
            for piece in record.slices:
                n_bytes = prod(piece.shape) * item_bytes(record.dtype)
                if n_bytes and piece.xxh3_128:  # else the file is one segment
                    found[piece.file].append((piece.begin, n_bytes, piece.xxh3_128))
    return {name: Content(segments=tuple((n, h) for _, n, h in sorted(parts))) for name, parts in found.items()}


def of_file(path: Path, told: Callable[[int], None] = lambda _: None) -> Content:
    """The content of a file as it is now; reads it."""
    digest, n_bytes = xxhash.xxh3_128(), 0
    with storage("reading", path), open(path, "rb", buffering=0) as file:
        while block := file.read(files.BLOCK_BYTES):
            digest.update(block)
            n_bytes += len(block)
            told(len(block))
    return Content(segments=((n_bytes, digest.hexdigest()),))


class CheckedReader:
    """A file open for reading that raises as soon as a segment's bytes are not what they must be.

    It is read once from the beginning to the end; whoever reads it may look for its size first (seek and tell). The
    last bytes of a segment are handed out only after its hash was compared.
    """

    def __init__(self, path: Path, content: Content, told: Callable[[int], None] = lambda _: None) -> None:
        """Opens the file.

        Args:
            path: The file.
            content: What must be in it.
            told: Told the bytes that were read; an exception that it raises ends the reading.

        Raises:
            CheckpointError: It cannot be opened, or has another size.
        """
        self._path, self._content, self._told = path, content, told
        self._segment, self._hashed, self._digest = 0, 0, xxhash.xxh3_128()
        self._position = self._size_asked = 0
        with storage("reading", path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
        if size != content.n_bytes:
            self.close()
            raise DamagedError(f"{path}: has {size} bytes, {content.n_bytes} were written")

    def __enter__(self) -> "CheckedReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """As far as asking for the size goes."""
        return True

    def tell(self) -> int:
        """Returns the position."""
        return self._size_asked or self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to the end to be asked for the size, and back to where it was."""
        if whence == os.SEEK_END and offset == 0:
            self._size_asked = self._content.n_bytes
        else:
            assert whence == os.SEEK_SET, "read from the beginning to the end"
            assert offset == self._position, "read from the beginning to the end"
            self._size_asked = 0
        return self.tell()

    def read(self, amount: int = -1) -> bytes:
        """Returns the next bytes, all that is left if no amount is given.

        Raises:
            DamagedError: They are not what was written.
        """
        assert not self._size_asked, "read from the beginning to the end"
        left = self._content.n_bytes - self._position
        buffer = bytearray(left if amount < 0 else min(amount, left))
        with storage("reading", self._path):
            files.read_exactly(self._descriptor, self._position, memoryview(buffer), self._path)
        self._check(memoryview(buffer))
        self._position += len(buffer)
        self._told(len(buffer))
        return bytes(buffer)

    def _check(self, block: memoryview) -> None:
        segments = self._content.segments
        while len(block):
            n_bytes, expected = segments[self._segment]
            piece = block[: n_bytes - self._hashed]
            self._digest.update(piece)
            self._hashed += len(piece)
            block = block[len(piece) :]
            if self._hashed == n_bytes:
                if self._digest.hexdigest() != expected:
                    raise DamagedError(f"{self._path}: its bytes have changed since they were written")
                self._segment, self._hashed, self._digest = self._segment + 1, 0, xxhash.xxh3_128()
