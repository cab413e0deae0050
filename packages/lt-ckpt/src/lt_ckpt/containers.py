"""How the tensors of one file are written: the one interface of all file formats, and safetensors behind it.

A container takes a file's tensors in order and their bytes in blocks of any size, so a conversion can feed hundreds of
files at once while it holds one block. The torch formats are in `torchfile.py` and `xser.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from lt_ckpt.direct import NewFile
from lt_ckpt.tensorfile import TensorSpec, file_order, make_header

Tensors = Sequence[tuple[str, TensorSpec]]
"""Key → dtype and shape, in file order."""


def portions(data: memoryview | np.ndarray, left: Callable[[], int]) -> Iterator[memoryview]:
    """Cuts bytes for one record after the other.

    Args:
        data: The bytes, contiguous.
        left: Tells how many bytes the open record still lacks; asked again for every portion.

    Yields:
        What the open record takes, which must be taken, and the next record begun, before the next one is asked for.
    """
    if not data.nbytes:
        return
    view = (data.data if isinstance(data, np.ndarray) else data).cast("B")
    while len(view):
        part = view[: left()]
        assert len(part), "more bytes than the tensors have"
        yield part
        view = view[len(part) :]


class Container(Protocol):
    """A new file of tensors, being written."""

    def append(self, data: memoryview | np.ndarray) -> None:
        """Take the next bytes, in the order of the tensors."""
        ...

    def close(self) -> None:
        """Finish the file, all of whose bytes have come, and put it on the disk."""
        ...

    def abandon(self) -> None:
        """Let go of the unfinished file, after an error."""
        ...


class Opens(Protocol):
    """Makes a container; raises `OSError` when the file cannot be made."""

    def __call__(self, path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> Container:
        """Lay the file out and make it."""
        ...


class SafetensorsWriter:
    """A new safetensors file; the tensors must come wide elements first (`file_order`)."""

    def __init__(self, path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        entries = dict(tensors)
        assert file_order(entries) == tuple(entries), "wide elements first"
        header, _ = make_header(entries, metadata)
        self._file = NewFile(path, len(header) + sum(spec.n_bytes for spec in entries.values()))
        try:
            self._file.write(header)
        except BaseException:
            self.abandon()
            raise

    def append(self, data: memoryview | np.ndarray) -> None:
        """Take the next bytes."""
        self._file.write(data.data if isinstance(data, np.ndarray) else data)

    def close(self) -> None:
        """Put the file on the disk."""
        try:
            self._file.sync()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._file.close()
