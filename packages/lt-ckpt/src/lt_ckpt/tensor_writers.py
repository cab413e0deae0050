"""Writers of tensor files: the interface of all file formats, and its safetensors implementation.

A writer takes a file's tensors in order and their bytes in blocks of any size, so a conversion can feed hundreds of
files at once while it holds one block. The torch formats are in `torchfile/file.py` and `nxd/xser.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from lt_ckpt.direct_io import CreateFile, DirectFileWriter
from lt_ckpt.tensorfile import TensorSpec, file_order, make_header

TensorSpecs = Sequence[tuple[str, TensorSpec]]
"""Key → dtype and shape, in file order."""


def split_at_records(data: memoryview | np.ndarray, remaining: Callable[[], int]) -> Iterator[memoryview]:
    """Split bytes at the ends of records.

    Args:
        data: The bytes, contiguous.
        remaining: Returns the bytes that the open record still lacks; called for every portion.

    Yields:
        The open record's next bytes, which must be written, and the next record begun, before the next portion is
        requested.
    """
    if not data.nbytes:
        return
    view = (data.data if isinstance(data, np.ndarray) else data).cast("B")
    while len(view):
        part = view[: remaining()]
        assert len(part), "more bytes than the tensors have"
        yield part
        view = view[len(part) :]


class TensorFileWriter(Protocol):
    """Interface of a new tensor file being written."""

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes, in the order of the tensors."""
        ...

    def close(self) -> None:
        """Finish the file, all of whose bytes have been written, and flush it to the disk."""
        ...

    def abort(self) -> None:
        """Close the unfinished file after an error."""
        ...


class TensorFileWriterFactory(Protocol):
    """Interface that opens a tensor file writer; raises `OSError` if the file cannot be created."""

    def __call__(
        self, path: Path, tensors: TensorSpecs, metadata: Mapping[str, str], *, create: CreateFile
    ) -> TensorFileWriter:
        """Lay out the file and create it with `create`, as every file beside it."""
        ...


class SafetensorsWriter:
    """Writer of a new safetensors file; tensors must come wide elements first (`file_order`)."""

    def __init__(
        self, path: Path, tensors: TensorSpecs, metadata: Mapping[str, str], *, create: CreateFile = DirectFileWriter
    ) -> None:
        entries = dict(tensors)
        assert file_order(entries) == tuple(entries), "wide elements first"
        header, _ = make_header(entries, metadata)
        self._file = create(path, len(header) + sum(spec.n_bytes for spec in entries.values()))
        try:
            self._file.write(header)
        except BaseException:
            self.abort()
            raise

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes."""
        self._file.write(data.data if isinstance(data, np.ndarray) else data)

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        try:
            self._file.sync()
        finally:
            self._file.close()

    def abort(self) -> None:
        """Close the unfinished file."""
        with suppress(OSError):
            self._file.close()
