"""Checksums in a source's files: which have some, and a comparison of all their bytes with them.

Checkpoints of lt have a hash per slice, the files of torch.save (NxD, .pt, Meta, most of
torch.distributed.checkpoint) a CRC-32 per record, which torch never looks at, unless their writer left them out (an
option of torch); safetensors files have none. `read_verification.py` compares what is read for another purpose.

Cost: of the comparison, one read of every file; of the rest, the files' headers.
"""

from collections.abc import Iterator

from lt_ckpt.errors import CheckpointError
from lt_ckpt.executors import ByteCounter
from lt_ckpt.files import ProgressCallback
from lt_ckpt.read_verification import StoredChecksum, check_range
from lt_ckpt.source import Source

MAX_NAMED_FILES = 3


def files_with_tensors(source: Source) -> set[str]:
    """Return the files that hold tensors."""
    groups = source.groups.values()
    return {s.file for g in groups for slices in (*g.locations.values(), *g.replicas.values()) for s in slices}


def files_without_checksums(source: Source) -> list[str]:
    """Return the files that hold tensors without any checksum."""
    find = source.find_checksums
    return sorted(file for file in files_with_tensors(source) if find is None or not find(file))


def describe_checksums(source: Source) -> str:
    """Return a sentence on which of a source's files have checksums."""
    unchecked, n_files = files_without_checksums(source), len(files_with_tensors(source))
    if not unchecked:
        return "every file has checksums"
    if len(unchecked) == n_files:
        return f"its files have no checksums ({source.format}), so damaged bytes cannot be told from good ones"
    more = ", ..." if len(unchecked) > MAX_NAMED_FILES else ""
    return f"{len(unchecked)} of {n_files} files have no checksums: {', '.join(unchecked[:MAX_NAMED_FILES])}{more}"


def iter_checksum_errors(source: Source, *, progress: ProgressCallback | None = None) -> Iterator[str]:
    """Yield what is wrong with a source's files according to their checksums; nothing when all match."""
    if source.find_checksums is None:
        return
    ranges: list[tuple[str, StoredChecksum]] = []
    for file in sorted(files_with_tensors(source) | set(source.other_files)):
        try:
            ranges += [(file, stored) for stored in source.find_checksums(file)]
        except CheckpointError as exc:
            yield str(exc)
    count_bytes = ByteCounter(sum(stored.n_bytes for _, stored in ranges), progress)
    for file, stored in ranges:
        try:
            check_range(source.root / file, stored, count_bytes)
        except CheckpointError as exc:
            yield str(exc)
