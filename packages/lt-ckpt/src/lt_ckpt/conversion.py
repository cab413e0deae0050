"""Conversion of any `Source` into any `Target`, with a few blocks of memory.

Everything is checked first: the tensors, the casts, the room on the disk. The target's files are then laid out in a
hidden folder, filled block by block (`laid_out_files.py`), hashed and fsynced, and the folder is renamed: the output
appears complete or not at all (`atomic_folder.py`), and a killed conversion is begun anew. A folder gets a list of its
files' hashes (`hash_list.py`).

Cost: every byte of the source read once, every byte of the output written and then read once, for its hash.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.checked_cast import read_cast
from lt_ckpt.errors import translate_os_errors
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_ckpt.joined_experts import join_blocks
from lt_ckpt.laid_out_files import Fill
from lt_ckpt.output_hashes import OutputHashes
from lt_ckpt.parallel import ByteCounter
from lt_ckpt.shards import Box
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Target:
    """Output of a conversion.

    Attributes:
        specs: Model tensor → dtype in the target, and shape.
        fill: Writes the tensor files.
        n_bytes: Bytes of the tensors of all files, replicas and padding included; 0: each is written once.
        aux_files: Further files by path, written first.
        marker_files: Completion markers, written last, in this order.
        hashed_folder: Folder of the output whose files are listed with their hashes, by default the output itself.
        single_file: The one file that is the output, instead of a folder; it gets no list.
        allow_overflow: Let finite values beyond the range of the target's dtype become infinite, instead of refusing.
    """

    specs: Mapping[str, TensorSpec]
    fill: Fill
    n_bytes: int = 0
    aux_files: Mapping[str, bytes] = field(default_factory=dict)
    marker_files: Mapping[str, bytes] = field(default_factory=dict)
    hashed_folder: str = ""
    single_file: str = ""
    allow_overflow: bool = False


def convert(
    source: Source, target: Target, out: str | os.PathLike[str], *, progress: files.ProgressCallback | None = None
) -> Path:
    """Write `source` as `target` into a new folder.

    Args:
        source: What to convert; its group `weights`.
        target: What to write.
        out: The folder to make (an existing one must be empty), or the file.
        progress: Called with the bytes written so far and in all.

    Returns:
        The folder.

    Raises:
        CheckpointError: The two do not fit together, `out` is not empty, or the disk fails. Nothing is left behind.
    """
    folder = Path(os.path.abspath(out))

    def read(name: str, box: Box):
        return read_cast(source, name, box, target.specs[name].dtype, allow_overflow=target.allow_overflow)

    with (
        translate_os_errors("converting", folder),
        AtomicFolder(folder, single_file=target.single_file) as output,
    ):
        n_bytes = target.n_bytes or sum(spec.n_bytes for spec in target.specs.values())
        files.check_free_space(folder.parent, n_bytes)
        for path, data in target.aux_files.items():
            output.write_file(path, data)
        written = OutputHashes(is_listed=not target.single_file)
        target.fill(output.temp_path, join_blocks(read), ByteCounter(n_bytes, progress), written.settle)
        hashes = written.finish(output.temp_path / target.hashed_folder)
        for path, data in target.marker_files.items():
            output.write_file(path, data)
            hashes[Path(path).relative_to(target.hashed_folder).as_posix()] = hashlib.sha256(data).hexdigest()
        if not target.single_file:
            output.write_file(str(Path(target.hashed_folder, HASH_LIST)), format_hash_list(hashes))
    return folder
