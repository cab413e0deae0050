"""Checksums in a source's files: which have some, and a comparison of all their bytes with them.

Checkpoints of lt have a hash per slice, the files of torch.save (NxD, .pt, Meta, most of
torch.distributed.checkpoint) a CRC-32 per record, which torch never looks at, unless their writer left them out (an
option of torch); safetensors files have none. A folder that a conversion wrote also has a list of its files' hashes
(`hash_list.py`), which stand for the checksums that files lack. `read_verification.py` compares what is read for
another purpose.

Cost: of the comparison, one read of every file; of the rest, the files' headers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lt_ckpt.errors import CheckpointError
from lt_ckpt.executors import ByteCounter
from lt_ckpt.files import ProgressCallback
from lt_ckpt.hash_list import HASH_LIST, HashList
from lt_ckpt.read_verification import StoredChecksum, check_range
from lt_ckpt.source import Source

MAX_NAMED_FILES = 3


def with_hash_list(source: Source, found: HashList | None) -> Source:
    """Return a source with the list of hashes in its folder, if there is one."""
    own = source.find_checksums
    if found is None:
        return source

    def find_checksums(file: str) -> Sequence[StoredChecksum]:
        checksums = own(file) if own is not None else ()
        listed = None if checksums else found.find_checksum(file)
        return checksums if listed is None else (listed,)

    return replace(source, hash_list=found, find_checksums=find_checksums)


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
        listed = "" if source.hash_list is None else f" ({HASH_LIST} lists {len(source.hash_list.hashes)} files)"
        return f"every file has checksums{listed}"
    if len(unchecked) == n_files:
        return f"its files have no checksums ({source.format}), so damaged bytes look like good ones"
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


def iter_damages(source: Source, *, progress: ProgressCallback | None = None) -> Iterator[str]:
    """Yield what is wrong with the files in a source's hash list or, without one, with checksums.

    A file that is missing or not listed is wrong too: readers take files by their names.
    """
    if source.hash_list is None:
        yield from iter_checksum_errors(source, progress=progress)
        return
    found, sizes = source.hash_list, dict[str, int]()
    for file in sorted(found.hashes):
        try:
            stored = found.find_checksum(file)
            sizes[file] = 0 if stored is None else stored.n_bytes
        except CheckpointError as exc:
            yield str(exc)
    count_bytes = ByteCounter(sum(sizes.values()), progress)
    for file in sizes:
        try:
            found.check_file(file, count_bytes)
        except CheckpointError as exc:
            yield str(exc)
    for file in found.find_unlisted():
        yield (
            f"{found.folder / file}: is not in {HASH_LIST}; remove it or, if it is yours, append the output of "
            f"`sha256sum {file}` to the list"
        )
