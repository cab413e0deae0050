"""Torch.save files of one tensor each, thousands of them, which differ little.

A 70B checkpoint of NxD has 21,000 such files, of a few dozen kinds. What lies in front of a tensor's bytes is the same
for all files of a kind but for the file's name, so torch reads and writes the first of each kind, and the others are
recognized by, and made from, its bytes.

Cost: one small read per file instead of some milliseconds.
"""

import os
from dataclasses import replace
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.laid_out_files import Place
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_ckpt.torchfile.file import load_pt, load_pt_part, write_pt

HEAD_BYTES = 4096
"""Bytes that are read of a file of one tensor; its pickle and headers have about 1,000."""


class TensorFiles:
    """Files of one tensor each; remembers the first of each kind."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], list[tuple[bytes, StoredArray]]] = {}
        """(size, length of the stem) → heads without the stem, and the array behind them."""
        self._written: dict[tuple[TensorSpec, int], tuple[bytes, bytes, bytes]] = {}
        """(spec, length of the stem) → head, what follows the tensor, stem."""

    def locate(self, path: Path, name: str, begin: int = 0, size: int | None = None) -> StoredArray:
        """Return the array of a torch.save file that holds one tensor.

        Args:
            path: The file.
            name: The tensor, for messages.
            begin: Position in `path`, if the torch.save file is only a part of it.
            size: Bytes of that part.

        Raises:
            CheckpointError: The file is missing, damaged, or holds something else.
        """
        with translate_os_errors("reading", path):
            descriptor = files.open_for_reading(path)
            try:
                n_bytes = os.fstat(descriptor).st_size - begin if size is None else size
                head = os.pread(descriptor, min(HEAD_BYTES, n_bytes), begin)
                stem = path.stem.encode() if size is None else b"archive"
                known = self._read.setdefault((n_bytes, len(stem)), [])
                for pattern, array in known:
                    if head[: array.byte_offset].replace(stem + b"/", b"/") == pattern:
                        return replace(array, byte_offset=begin + array.byte_offset)
            finally:
                os.close(descriptor)
        array = load_pt(path) if size is None else load_pt_part(path, begin, size)
        if not isinstance(array, StoredArray):
            raise CheckpointError(f"{path}: must hold a tensor ({name}), holds a {type(array).__name__}")
        if array.byte_offset <= len(head):
            known.append((head[: array.byte_offset].replace(stem + b"/", b"/"), array))
        return replace(array, byte_offset=begin + array.byte_offset)

    def lay_out(self, path: Path, spec: TensorSpec) -> Place:
        """Write a file with room for a tensor."""
        stem = path.stem.encode()
        found = self._written.get((spec, len(stem)))
        if found is None:
            write_pt(path, spec)
            begin = load_pt(path).byte_offset
            with open(path, "rb") as file:
                head = file.read(begin)
                file.seek(begin + spec.n_bytes)
                self._written[spec, len(stem)] = found = head, file.read(), stem
        else:
            head, tail, old = found
            with open(path, "xb") as file:
                file.write(head.replace(old + b"/", stem + b"/"))
                file.seek(len(head) + spec.n_bytes)
                file.write(tail.replace(old + b"/", stem + b"/"))
        return path, len(found[0])
