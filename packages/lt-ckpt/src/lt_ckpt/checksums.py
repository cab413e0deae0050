"""Checksums of other formats: the CRC32 per record in torch.save's zips, which torch never checks.

Cost: every file is read once.
"""

from collections.abc import Iterator
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.source import Source

XSER_TENSORS_SUFFIX = ".tensors/"
"""Suffix of the folder with one file per tensor (NxD's xser), after the name of the file that refers to them."""

FORMATS_WITHOUT_CHECKSUMS = ("hf", "lt")
"""Formats of safetensors files, which have no checksums (our own has hashes: `lt_ckpt.integrity`)."""


def has_checksums(source: Source) -> bool:
    """Return True if all of a source's tensors lie in files with checksums."""
    if source.format != "dcp":
        return source.format not in FORMATS_WITHOUT_CHECKSUMS
    with translate_os_errors("reading", source.root):
        return all(_read_magic(source.root / name) == b"PK" for name in _files_with_tensors(source))


def _files_with_tensors(source: Source) -> set[str]:
    """Return the files that hold tensors."""
    groups = source.groups.values()
    return {s.file for g in groups for slices in (*g.locations.values(), *g.replicas.values()) for s in slices}


def _read_magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(2)


def iter_checksum_errors(source: Source, *, progress: files.ProgressCallback | None = None) -> Iterator[str]:
    """Yield what is wrong with a source's files according to their checksums; nothing when all match.

    Safetensors files have none. A file whose writer left its checksums out (a torch option) is an error too.
    """
    if source.format == "dcp":
        yield from _iter_dcp_checksum_errors(source, progress)
        return
    if source.format in FORMATS_WITHOUT_CHECKSUMS:
        return
    from lt_ckpt.torchfile.file import check_crc

    names = _files_with_tensors(source)
    for name in list(names):
        parent, is_tensor_file, _ = name.rpartition(XSER_TENSORS_SUFFIX)
        if is_tensor_file:  # also the files that name its tensor
            names |= {sibling for sibling in (parent, f"{parent}.info.pt") if (source.root / sibling).is_file()}
    for name in sorted(names):
        try:
            check_crc(source.root / name, progress=progress)
        except CheckpointError as exc:
            yield str(exc)


def _iter_dcp_checksum_errors(source: Source, progress: files.ProgressCallback | None) -> Iterator[str]:
    from lt_ckpt.dcp.files import check_crc
    from lt_ckpt.dcp.format import read_metadata

    try:
        check_crc(source.root, read_metadata(source.root).tensors, progress=progress)
    except CheckpointError as exc:
        yield str(exc)
