"""Expected content of files as segment hashes, and a reader that rejects anything else.

A file's content is a sequence of segments, each a number of bytes and their xxh3-128. A checkpoint's manifest has them
for every file without reading any (the header's hash, then the slices' in file order); a file of another folder is one
segment, hashed by reading. `identity` is a short digest of the content, so that two places can be compared.

Cost: of a checkpoint only the manifest; of another folder one read. `CheckedReader` hashes the bytes it returns.
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
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.manifest import CheckpointManifest

Segments = tuple[tuple[int, str], ...]


class DamagedError(CheckpointError):
    """Bytes differ from those that were written."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Expected content of a file: its segments as (number of bytes, xxh3-128 as hex)."""

    segments: Segments

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return sum(n_bytes for n_bytes, _ in self.segments)

    @property
    def identity(self) -> str:
        """Digest that identifies the content."""
        text = ";".join(f"{n_bytes}-{digest}" for n_bytes, digest in self.segments)
        return f"1-{xxhash.xxh3_128_hexdigest(text.encode())}"


def digest_bytes(data: bytes) -> FileDigest:
    """Return the digest of a file that holds these bytes."""
    return FileDigest(segments=((len(data), xxhash.xxh3_128_hexdigest(data)),))


def digests_from_manifest(manifest: CheckpointManifest) -> dict[str, FileDigest]:
    """Return the digest of every file in a manifest."""
    segments: dict[str, list[tuple[int, int, str]]] = {
        name: [(0, record.hashed_bytes, record.xxh3_128)] for name, record in manifest.files.items()
    }
    for members in manifest.tensors.values():
        for record in members.values():
            for piece in record.slices:
                n_bytes = prod(piece.shape) * item_bytes(record.dtype)
                if n_bytes and piece.xxh3_128:  # otherwise the file is one segment
                    segments[piece.file].append((piece.byte_offset, n_bytes, piece.xxh3_128))
    return {name: FileDigest(segments=tuple((n, h) for _, n, h in sorted(parts))) for name, parts in segments.items()}


def digest_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> FileDigest:
    """Read a file and return the digest of its current content."""
    digest, n_bytes = xxhash.xxh3_128(), 0
    with translate_os_errors("reading", path), open(files.open_for_reading(path), "rb", buffering=0) as file:
        while block := file.read(files.BLOCK_BYTES):
            digest.update(block)
            n_bytes += len(block)
            on_bytes(len(block))
    return FileDigest(segments=((n_bytes, digest.hexdigest()),))


class CheckedReader:
    """File reader that raises as soon as a segment's bytes differ from the expected ones.

    It is read once from beginning to end; the caller may query the size first (seek and tell). The last bytes of a
    segment are returned only after its hash was compared.
    """

    def __init__(self, path: Path, content: FileDigest, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Open the file.

        Args:
            path: The file.
            content: Its expected content.
            on_bytes: Called with the bytes read; an exception from it ends the read.

        Raises:
            CheckpointError: It cannot be opened, or has another size.
        """
        self._path, self._content, self._on_bytes = path, content, on_bytes
        self._segment, self._hashed, self._digest = 0, 0, xxhash.xxh3_128()
        self._position = self._size_query = 0
        with translate_os_errors("reading", path):
            self._descriptor = files.open_for_reading(path)
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
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True; only to query the size."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._size_query or self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek to the end to query the size, and back to the current position."""
        if whence == os.SEEK_END and offset == 0:
            self._size_query = self._content.n_bytes
        else:
            assert whence == os.SEEK_SET, "must be read from beginning to end"
            assert offset == self._position, "must be read from beginning to end"
            self._size_query = 0
        return self.tell()

    def read(self, amount: int = -1) -> bytes:
        """Return the next bytes, by default all remaining ones.

        Raises:
            DamagedError: They differ from those that were written.
        """
        assert not self._size_query, "must be read from beginning to end"
        remaining = self._content.n_bytes - self._position
        buffer = bytearray(remaining if amount < 0 else min(amount, remaining))
        with translate_os_errors("reading", self._path):
            files.read_exactly(self._descriptor, self._position, memoryview(buffer), self._path)
        self._check(memoryview(buffer))
        self._position += len(buffer)
        self._on_bytes(len(buffer))
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
