"""Verification of every byte of a checkpoint against the hashes taken while it was written.

Each tensor file's header has a hash, each slice has one, every other file has one (also NxD's files with tensors), and
COMMIT holds the manifest's hash; so a flipped bit, a truncated or swapped file, or a missing one is always found. All
files are checked, also after the first problem. Cost: one read of the checkpoint, a file per thread.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.checkpoint import READER_THREADS, read_manifest
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST, iter_files
from lt_ckpt.manifest import CheckpointManifest
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
    slices = _slices_by_file(manifest)
    lock, done = threading.Lock(), 0

    def count_bytes(n_bytes: int) -> None:
        nonlocal done
        with lock:
            done += n_bytes
            if progress is not None:
                progress(done, manifest.n_bytes, "bytes")

    def check(name: str) -> list[str]:
        try:
            return _check_file(folder / name, manifest.files[name], slices.get(name, []), count_bytes)
        except CheckpointError as exc:
            return [str(exc)]

    with ThreadPoolExecutor(READER_THREADS, "lt-ckpt-verify") as pool:
        problems = [problem for found in pool.map(check, manifest.files) for problem in found]
    return VerificationReport(
        path=folder,
        problems=tuple(problems),
        extra_files=extra,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
    )


def _slices_by_file(manifest: CheckpointManifest) -> dict[str, list[tuple[str, int, int, str]]]:
    """Return file → key, byte offset, bytes and hash of each slice, without files that are hashed as a whole."""
    found: dict[str, list[tuple[str, int, int, str]]] = {}
    for members in manifest.tensors.values():
        for record in members.values():
            for piece in record.slices:
                if piece.xxh3_128:
                    stored = piece.key, piece.byte_offset, record.slice_bytes(piece), piece.xxh3_128
                    found.setdefault(piece.file, []).append(stored)
    return found


def _check_file(
    path: Path,
    record: FileRecord,
    slices: list[tuple[str, int, int, str]],
    count_bytes: Callable[[int], None],
) -> list[str]:
    """Return the problems of one file."""

    def has_changed(position: int, n_bytes: int, expected: str) -> bool:
        digest = xxhash.xxh3_128()
        for block in files.iter_blocks(path, position, n_bytes):
            digest.update(block)
            count_bytes(len(block))
        return digest.hexdigest() != expected

    with translate_os_errors("verifying", path):
        size = os.stat(path).st_size
        if size != record.n_bytes:
            return [f"{path}: has {size} bytes, {record.n_bytes} were written"]
        if has_changed(0, record.hashed_bytes, record.xxh3_128):
            return [f"{path}: its {'header has' if slices else 'bytes have'} changed since it was written"]
        return [
            f"{path}: the bytes of tensor {key} have changed since they were written"
            for key, position, n_bytes, expected in slices
            if has_changed(position, n_bytes, expected)
        ]
