"""Verification of every byte of a checkpoint against the hashes taken while it was written.

Each tensor file's header has a hash, each slice has one, every other file has one (also NxD's files with tensors), and
COMMIT holds the manifest's hash; so a flipped bit, a truncated or swapped file, or a missing one is always found. All
files are checked, also after the first problem. Cost: one read of the checkpoint through a few buffers.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt import files
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST, iter_files
from lt_ckpt.manifest import CheckpointManifest
from lt_ckpt.readahead import MIN_READ_AHEAD_BYTES, FileRange, read_ahead
from lt_ckpt.records import TENSOR_FILE, FileRecord
from lt_ckpt.tensorfile import StoredTensor, read_header


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """Result of a verification.

    Attributes:
        path: The checkpoint's folder.
        problems: Damage that makes it unusable, one text per finding.
        extra_files: Files in the folder that the manifest does not list. Nothing reads them.
        n_files: Files that were checked.
        n_bytes: Their bytes.
    """

    path: Path
    problems: tuple[str, ...]
    extra_files: tuple[str, ...]
    n_files: int
    n_bytes: int

    @property
    def is_loadable(self) -> bool:
        """True if every byte is as it was written."""
        return not self.problems

    @property
    def is_ok(self) -> bool:
        """True if it is loadable and contains no extra files."""
        return not self.problems and not self.extra_files


class _ProgressCounter:
    """Counter of bytes read that reports progress."""

    def __init__(self, total: int, progress: files.ProgressCallback | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(self.done, self.total, "bytes")


def _hash_ranges(
    descriptor: int, ranges: Sequence[tuple[int, int]], path: Path, buffer: np.ndarray, counter: _ProgressCounter
) -> Iterator[str]:
    """Yield the hash of each range (byte offset, bytes) of a file."""
    if sum(n_bytes for _, n_bytes in ranges) >= MIN_READ_AHEAD_BYTES:
        yield from _hash_ranges_ahead(ranges, path, counter)
        return
    for offset, n_bytes in ranges:
        digest = xxhash.xxh3_128()
        for start in range(0, n_bytes, len(buffer)):
            view = buffer.data[: min(len(buffer), n_bytes - start)]
            files.read_exactly(descriptor, offset + start, view, path)
            digest.update(view)
            counter.add(len(view))
        yield digest.hexdigest()


def _hash_ranges_ahead(ranges: Sequence[tuple[int, int]], path: Path, counter: _ProgressCounter) -> Iterator[str]:
    digest, current = xxhash.xxh3_128(), 0
    with closing(read_ahead([FileRange(path, offset, n_bytes) for offset, n_bytes in ranges])) as blocks:
        for index, _, view in blocks:
            while current < index:
                yield digest.hexdigest()
                digest, current = xxhash.xxh3_128(), current + 1
            digest.update(view)
            counter.add(len(view))
    while current < len(ranges):
        yield digest.hexdigest()
        digest, current = xxhash.xxh3_128(), current + 1


def verify(path: str | os.PathLike[str], *, progress: files.ProgressCallback | None = None) -> VerificationReport:
    """Verify a checkpoint completely.

    Args:
        path: A checkpoint folder.
        progress: Called with the bytes read so far and in all.

    Returns:
        The findings. A damaged checkpoint does not raise.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
        extra = _list_extra_files(folder, manifest)
    except CheckpointError as exc:
        return VerificationReport(path=folder, problems=(str(exc),), extra_files=(), n_files=0, n_bytes=0)
    counter = _ProgressCounter(manifest.n_bytes, progress)
    buffer = np.empty(files.BLOCK_BYTES, np.uint8)
    problems: list[str] = []
    slices = _slices_by_file(manifest)
    for name, record in manifest.files.items():
        try:
            problems += _check_file(folder / name, record, slices.get(name, {}), buffer, counter)
        except CheckpointError as exc:
            problems.append(str(exc))
    return VerificationReport(
        path=folder,
        problems=tuple(problems),
        extra_files=extra,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
    )


def _slices_by_file(manifest: CheckpointManifest) -> dict[str, dict[str, tuple[StoredTensor, str]]]:
    """Return file → key → position and hash of each slice, without files that are hashed as a whole."""
    found: dict[str, dict[str, tuple[StoredTensor, str]]] = {}
    for members in manifest.tensors.values():
        for record in members.values():
            for piece in record.slices:
                if not piece.xxh3_128:
                    continue
                stored = StoredTensor(record.dtype, piece.shape, piece.byte_offset)
                found.setdefault(piece.file, {})[piece.key] = (stored, piece.xxh3_128)
    return found


def _list_extra_files(folder: Path, manifest: CheckpointManifest) -> tuple[str, ...]:
    known = {*manifest.files, MANIFEST, COMMIT}
    with translate_os_errors("listing", folder):
        found = {name for name, _ in iter_files(folder)}
    return tuple(sorted(found - known))


def _check_file(
    path: Path,
    record: FileRecord,
    slices: dict[str, tuple[StoredTensor, str]],
    buffer: np.ndarray,
    counter: _ProgressCounter,
) -> list[str]:
    """Return the problems of one file."""
    problems: list[str] = []
    with translate_os_errors("verifying", path):
        descriptor = files.open_for_reading(path)
        try:
            size = os.fstat(descriptor).st_size
            if size != record.n_bytes:
                return [f"{path}: has {size} bytes, {record.n_bytes} were written"]
            if [*_hash_ranges(descriptor, [(0, record.hashed_bytes)], path, buffer, counter)] != [record.xxh3_128]:
                what = "header has" if TENSOR_FILE.fullmatch(path.name) else "bytes have"
                return [f"{path}: its {what} changed since it was written"]
            if TENSOR_FILE.fullmatch(path.name):
                header = read_header(path)
                if header.tensors != {key: stored for key, (stored, _) in slices.items()}:
                    return [f"{path}: its header does not list the tensors that the manifest lists"]
            ranges = [(stored.byte_offset, stored.n_bytes) for stored, _ in slices.values()]
            digests = _hash_ranges(descriptor, ranges, path, buffer, counter)
            for (key, (_, expected)), digest in zip(slices.items(), digests, strict=True):
                if digest != expected:
                    problems.append(f"{path}: the bytes of tensor {key} have changed since they were written")
        finally:
            os.close(descriptor)
    return problems
