"""The checksums that other formats carry: torch.save's zips have a CRC32 of every record, which torch never looks at.

Cost: every file is read once.
"""

from collections.abc import Iterator
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.source import Source

TENSORS = ".tensors/"
"""In the path of a file that holds one tensor (NxD's xser), what follows the name of the file that refers to it."""

UNSUMMED = ("hf", "lt")
"""Formats whose files are safetensors, which carry none (ours have hashes of their own: `lt_ckpt.integrity`)."""


def carries_checksums(source: Source) -> bool:
    """Tells whether all of a source's tensors lie in files with checksums."""
    if source.format != "dcp":
        return source.format not in UNSUMMED
    with storage("reading", source.root):
        return all(_first_bytes(source.root / name) == b"PK" for name in _held(source))


def _held(source: Source) -> set[str]:
    """Returns the files in which tensors lie."""
    lists = [places for group in source.groups.values() for places in (*group.places.values(), *group.copies.values())]
    return {place.file for places in lists for place in places}


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(2)


def damaged_files(source: Source, *, progress: files.Progress | None = None) -> Iterator[str]:
    """Yields what is wrong with a source's files as far as their checksums tell; nothing when all of them fit.

    Files of safetensors have none. A file whose writer left its checksums out (an option of torch) does not fit either.
    """
    if source.format == "dcp":
        yield from _damaged_dcp(source, progress)
        return
    if source.format in UNSUMMED:
        return
    from lt_ckpt.torchfile.file import check_crc

    held = _held(source)
    for name in list(held):
        refers, of_one_tensor, _ = name.rpartition(TENSORS)
        if of_one_tensor:  # also what says which tensor it is
            held |= {beside for beside in (refers, f"{refers}.info.pt") if (source.root / beside).is_file()}
    for name in sorted(held):
        try:
            check_crc(source.root / name, progress=progress)
        except CheckpointError as exc:
            yield str(exc)


def _damaged_dcp(source: Source, progress: files.Progress | None) -> Iterator[str]:
    from lt_ckpt.dcp.files import check_crc
    from lt_ckpt.dcp.format import read_metadata

    try:
        check_crc(source.root, read_metadata(source.root).tensors, progress=progress)
    except CheckpointError as exc:
        yield str(exc)
