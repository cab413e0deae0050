"""Verification: every byte of a checkpoint against the hashes that were taken while it was written.

Each tensor file's header has a hash, each slice has one, every other file has one (also one of NxD's with tensors in
it), the manifest's hash stands in COMMIT; so a flipped bit, a cut or swapped file, or a missing one is always found.
All files are looked at, also after the first problem. Cost: one read of the checkpoint through a few buffers.
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
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, files_below
from lt_ckpt.manifest import Manifest
from lt_ckpt.readahead import WORTH_BYTES, Stretch, read_ahead
from lt_ckpt.records import TENSOR_FILE, FileRecord
from lt_ckpt.tensorfile import StoredTensor, read_header


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verification found.

    Attributes:
        path: The checkpoint's folder.
        problems: What makes it unusable, in words, one per finding.
        extra: Files in the folder that no manifest lists. Nothing reads them.
        n_files: Files that were checked.
        n_bytes: Their bytes.
    """

    path: Path
    problems: tuple[str, ...]
    extra: tuple[str, ...]
    n_files: int
    n_bytes: int

    @property
    def loadable(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems

    @property
    def ok(self) -> bool:
        """Whether it is loadable and holds nothing else."""
        return not self.problems and not self.extra


class _Counter:
    """Adds up the bytes read and tells the progress."""

    def __init__(self, total: int, progress: files.Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(self.done, self.total, "bytes")


def _hashes(
    descriptor: int, parts: Sequence[tuple[int, int]], path: Path, buffer: np.ndarray, counter: _Counter
) -> Iterator[str]:
    """Yields the hash of each part (begin, bytes) of a file."""
    if sum(n_bytes for _, n_bytes in parts) >= WORTH_BYTES:
        yield from _hashes_ahead(parts, path, counter)
        return
    for begin, n_bytes in parts:
        digest = xxhash.xxh3_128()
        for start in range(0, n_bytes, len(buffer)):
            view = buffer.data[: min(len(buffer), n_bytes - start)]
            files.read_exactly(descriptor, begin + start, view, path)
            digest.update(view)
            counter.add(len(view))
        yield digest.hexdigest()


def _hashes_ahead(parts: Sequence[tuple[int, int]], path: Path, counter: _Counter) -> Iterator[str]:
    digest, current = xxhash.xxh3_128(), 0
    with closing(read_ahead([Stretch(path, begin, n_bytes) for begin, n_bytes in parts])) as blocks:
        for index, _, view in blocks:
            while current < index:
                yield digest.hexdigest()
                digest, current = xxhash.xxh3_128(), current + 1
            digest.update(view)
            counter.add(len(view))
    while current < len(parts):
        yield digest.hexdigest()
        digest, current = xxhash.xxh3_128(), current + 1


def verify(path: str | os.PathLike[str], *, progress: files.Progress | None = None) -> Report:
    """Checks a checkpoint completely.

    Args:
        path: A checkpoint folder.
        progress: Told the bytes read so far and in all.

    Returns:
        What was found. It does not raise for a broken checkpoint.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
        extra = _extra(folder, manifest)
    except CheckpointError as exc:
        return Report(path=folder, problems=(str(exc),), extra=(), n_files=0, n_bytes=0)
    counter = _Counter(manifest.n_bytes, progress)
    buffer = np.empty(files.BLOCK_BYTES, np.uint8)
    problems: list[str] = []
    slices = _slices_by_file(manifest)
    for name, record in manifest.files.items():
        try:
            problems += _check_file(folder / name, record, slices.get(name, {}), buffer, counter)
        except CheckpointError as exc:
            problems.append(str(exc))
    return Report(
        path=folder,
        problems=tuple(problems),
        extra=extra,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
    )


def _slices_by_file(manifest: Manifest) -> dict[str, dict[str, tuple[StoredTensor, str]]]:
    """Returns file → key → where the slice lies and its hash; files that are hashed as a whole are left out."""
    found: dict[str, dict[str, tuple[StoredTensor, str]]] = {}
    for members in manifest.tensors.values():
        for record in members.values():
            for piece in record.slices:
                if not piece.xxh3_128:
                    continue
                stored = StoredTensor(record.dtype, piece.shape, piece.begin)
                found.setdefault(piece.file, {})[piece.key] = (stored, piece.xxh3_128)
    return found


def _extra(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    known = {*manifest.files, MANIFEST, COMMIT}
    with storage("listing", folder):
        found = {name for name, _ in files_below(folder)}
    return tuple(sorted(found - known))


def _check_file(
    path: Path,
    record: FileRecord,
    slices: dict[str, tuple[StoredTensor, str]],
    buffer: np.ndarray,
    counter: _Counter,
) -> list[str]:
    """Returns the problems of one file."""
    problems: list[str] = []
    with storage("verifying", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != record.n_bytes:
                return [f"{path}: has {size} bytes, {record.n_bytes} were written"]
            if [*_hashes(descriptor, [(0, record.hashed_bytes)], path, buffer, counter)] != [record.xxh3_128]:
                what = "header has" if TENSOR_FILE.fullmatch(path.name) else "bytes have"
                return [f"{path}: its {what} changed since it was written"]
            if TENSOR_FILE.fullmatch(path.name):
                header = read_header(path)
                if header.tensors != {key: stored for key, (stored, _) in slices.items()}:
                    return [f"{path}: its header does not list the tensors that the manifest lists"]
            parts = [(stored.begin, stored.n_bytes) for stored, _ in slices.values()]
            found = _hashes(descriptor, parts, path, buffer, counter)
            for (key, (_, expected)), digest in zip(slices.items(), found, strict=True):
                if digest != expected:
                    problems.append(f"{path}: the bytes of tensor {key} have changed since they were written")
        finally:
            os.close(descriptor)
    return problems
