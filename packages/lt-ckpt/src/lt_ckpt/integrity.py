"""Verification of every byte of a checkpoint against the hashes taken while it was written.

Each tensor file's header has a hash, each slice has one, every other file has one (also NxD's files with tensors), and
COMMIT holds the manifest's hash; so a flipped bit, a truncated or swapped file, or a missing one is always found. All
files are checked, also after the first problem. Cost: one read of the checkpoint, a file per thread.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST, iter_files
from lt_ckpt.manifest import Segment
from lt_ckpt.parallel import ByteCounter, iter_in_threads
from lt_ckpt.records import FileRecord


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
        with translate_os_errors("listing", folder):
            extra = tuple(sorted({*iter_files(folder)} - {*manifest.files, MANIFEST, COMMIT}))
    except CheckpointError as exc:
        return VerificationReport(path=folder, problems=(str(exc),), extra_files=(), n_files=0, n_bytes=0)
    segments = manifest.segments()
    count_bytes = ByteCounter(manifest.n_bytes, progress)

    def check(name: str) -> list[str]:
        try:
            return _check_file(folder / name, manifest.files[name].n_bytes, segments[name], count_bytes)
        except CheckpointError as exc:
            return [str(exc)]

    problems = [problem for found in iter_in_threads(check, [(name,) for name in manifest.files]) for problem in found]
    return VerificationReport(
        path=folder,
        problems=tuple(problems),
        extra_files=extra,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
    )


def _check_file(path: Path, n_bytes: int, segments: list[Segment], count_bytes: Callable[[int], None]) -> list[str]:
    """Return the problems of one file."""

    def has_changed(part: Segment) -> bool:
        digest = xxhash.xxh3_128()
        files.hash_range(digest, path, part.byte_offset, part.n_bytes, count_bytes)
        return digest.hexdigest() != part.xxh3_128

    with translate_os_errors("verifying", path):
        size = os.stat(path).st_size
        if size != n_bytes:
            return [f"{path}: has {size} bytes, {n_bytes} were written"]
        first, *slices = segments
        if has_changed(first):
            return [f"{path}: its {'header has' if slices else 'bytes have'} changed since it was written"]
        return [
            f"{path}: the bytes of tensor {part.key} have changed since they were written"
            for part in slices
            if has_changed(part)
        ]


def hash_file(path: Path, hashed_bytes: int | None = None) -> FileRecord:
    """Return a file's record as this machine sees it.

    Args:
        path: The file.
        hashed_bytes: Leading bytes to hash; None: all.
    """
    size, digest = os.stat(path).st_size, xxhash.xxh3_128()
    hashed = size if hashed_bytes is None else min(hashed_bytes, size)
    files.hash_range(digest, path, 0, hashed, lambda _: None)
    return FileRecord(n_bytes=size, hashed_bytes=hashed, xxh3_128=digest.hexdigest())
