"""The checksums that other formats carry: torch.save's zips have a CRC32 of every record, which torch never looks at.

Cost: every file is read once.
"""

from collections.abc import Iterator
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError
from lt_ckpt.source import Source

ZIPPED = (".pt", ".pth")


def damaged_files(source: Source, *, progress: files.Progress | None = None) -> Iterator[str]:
    """Yields what is wrong with a source's files as far as their checksums tell; nothing when all of them fit.

    Files of safetensors have none. A file whose writer left its checksums out (an option of torch) does not fit either.
    """
    if source.format == "dcp":
        yield from _damaged_dcp(source, progress)
        return
    held = {place.file for group in source.groups.values() for places in group.places.values() for place in places}
    held |= {place.file for group in source.groups.values() for places in group.copies.values() for place in places}
    for name in sorted(name for name in held if Path(name).suffix in ZIPPED):
        from lt_ckpt.torchfile.file import check_crc

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
