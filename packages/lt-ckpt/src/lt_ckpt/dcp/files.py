"""`.distcp` files of torch.distributed.checkpoint: location of each chunk's bytes, and a writer.

Every chunk is a torch.save file inside of a file (or, as an option of torch, all chunks of a file are one safetensors
file). Reading parses the headers of each and returns the position of its bytes. Writing appends whole tensors to files
of bounded size, and writes `.metadata` last, so that a folder without it is unfinished.

Cost of reading: four small reads per chunk; of writing: one pass.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.copy_plan import StoredSlice
from lt_ckpt.dcp.metadata import ChunkedTensor, DcpChunk, dump_metadata
from lt_ckpt.direct_io import CreateFile, DirectFileWriter, WritableFile
from lt_ckpt.errors import CheckpointError
from lt_ckpt.read_verification import StoredChecksum
from lt_ckpt.source import StoredArray
from lt_ckpt.tensor_writers import TensorSpecs, split_at_records
from lt_ckpt.tensorfile import StoredTensor, TensorSpec, read_header
from lt_ckpt.torchfile.file import OpenFile, TorchArchiveWriter, load_pt_range, read_checksums_range
from lt_ckpt.torchfile.safe_globals import TorchTensor

METADATA = ".metadata"
FILE_TEMPLATE = "__0_{}.distcp"
MAX_FILE_BYTES = 5 * 10**9


def locate_chunks(folder: Path, tensors: Mapping[str, ChunkedTensor]) -> dict[str, tuple[StoredSlice, ...]]:
    """Locate the bytes of every chunk.

    Returns:
        Key → the chunks, as slices of the tensor.

    Raises:
        CheckpointError: A file is missing or truncated, or contradicts `.metadata`.
    """
    located: dict[str, tuple[StoredSlice, ...]] = {}
    with ExitStack() as stack:
        opened: dict[str, _DistcpFile] = {}
        for key, tensor in tensors.items():
            stored: list[StoredSlice] = []
            for chunk in tensor.chunks:
                if chunk.file not in opened:
                    opened[chunk.file] = _DistcpFile(
                        stack.enter_context(OpenFile(folder / chunk.file)), folder / chunk.file
                    )
                array = opened[chunk.file].locate_tensor(key, chunk, TensorSpec(tensor.spec.dtype, chunk.box[1]))
                stored.append(
                    StoredSlice(
                        file=chunk.file,
                        byte_offset=array.byte_offset,
                        offset=chunk.box[0],
                        shape=chunk.box[1],
                        array_shape=array.array_shape,
                        array_offset=array.array_offset,
                        transposed=array.transposed,
                    )
                )
            located[key] = tuple(stored)
    return located


def read_checksums(folder: Path, tensors: Mapping[str, ChunkedTensor], file: str) -> tuple[StoredChecksum, ...]:
    """Return the checksums of a file's chunks, which torch does not look at.

    Args:
        folder: The checkpoint.
        tensors: Tensors of `.metadata`, which itself has no checksum.
        file: The file, relative to the folder.

    Raises:
        CheckpointError: The file cannot be read or is truncated.
    """
    chunks = sorted(
        (chunk.byte_offset, chunk.n_bytes, key)
        for key, tensor in tensors.items()
        for chunk in tensor.chunks
        if chunk.file == file
    )
    with OpenFile(folder / file) as opened:
        return tuple(_DistcpFile(opened, folder / file).read_checksums(chunks))


class _DistcpFile:
    """File of chunks, open for reading."""

    def __init__(self, opened: OpenFile, path: Path) -> None:
        self._opened, self._path = opened, path
        self._safetensors: dict[str, StoredTensor] | None = None
        self.is_safetensors = opened.read(0, min(2, opened.size)) != b"PK"

    def locate_tensor(self, key: str, chunk: DcpChunk, spec: TensorSpec) -> StoredArray:
        """Return the location of a chunk's bytes, after checking its dtype and shape."""
        where = f"{self._path}: {key}"
        begin, end = chunk.byte_offset, chunk.byte_offset + chunk.n_bytes
        self._check_range(begin, end, where)
        if self.is_safetensors:
            array = self._locate_in_safetensors(key, where)
        else:
            tensor, _ = load_pt_range(self._opened.read, begin, end, where)
            if not isinstance(tensor, TorchTensor):
                raise CheckpointError(f"{where}: holds a {type(tensor).__name__} instead of a tensor")
            array = tensor.locate()
        if array.spec != spec:
            raise CheckpointError(
                f"{where}: holds {array.spec.dtype} {list(array.spec.shape)}, {METADATA} says {spec.dtype} "
                f"{list(spec.shape)}; they are not from the same save"
            )
        return array

    def read_checksums(self, chunks: Iterable[tuple[int, int, str]]) -> Iterator[StoredChecksum]:
        """Yield the checksums of chunks (begin, bytes, key); none of safetensors, which have none."""
        for begin, n_bytes, key in () if self.is_safetensors else chunks:
            where = f"{self._path}: {key}"
            self._check_range(begin, begin + n_bytes, where)
            yield from read_checksums_range(self._opened.read, begin, begin + n_bytes, where, key)

    def _check_range(self, begin: int, end: int, where: str) -> None:
        if end > self._opened.size:
            raise CheckpointError(
                f"{where}: expected at bytes {begin} to {end}, the file has {self._opened.size} bytes; it is truncated"
            )

    def _locate_in_safetensors(self, key: str, where: str) -> StoredArray:
        """Find a chunk by its key; the positions in `.metadata` are meaningless for such files."""
        if self._safetensors is None:
            try:
                self._safetensors = read_header(self._path).tensors
            except CheckpointError as exc:
                raise CheckpointError(f"{where}: neither a file of torch nor of safetensors: {exc}") from exc
        stored = self._safetensors.get(key)
        if stored is None:
            raise CheckpointError(f"{where}: is not in the file")
        return StoredArray(spec=TensorSpec(stored.dtype, stored.shape), byte_offset=stored.byte_offset)


class DcpWriter:
    """Writer of a new checkpoint folder of whole tensors, as a tensor file writer.

    Args:
        path: The folder, new or empty.
        tensors: Key → dtype and shape, in order.
        metadata: Text for a file of its own that torch ignores.
        create: Creates the files.
        max_file_bytes: Start a new file once one has this many bytes; a tensor is never split.
    """

    def __init__(
        self,
        path: Path,
        tensors: TensorSpecs,
        metadata: Mapping[str, str],
        *,
        create: CreateFile = DirectFileWriter,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._folder, self._metadata, self._create = path, dict(metadata), create
        self._plan = _plan_chunks(tensors, max_file_bytes)
        self._waiting = list(reversed(self._plan.items()))
        self._file: WritableFile | None = None
        self._name = ""
        self._remaining = 0
        self._records: TorchArchiveWriter | None = None
        if not path.is_dir():
            files.make_folder(path)
        try:
            self._begin_next()
        except BaseException:
            self.abort()
            raise

    def _begin_next(self) -> None:
        """Begin the next tensor that has bytes."""
        while self._waiting and self._records is None:
            _, tensor = self._waiting[-1]
            name = tensor.chunks[0].file
            if name != self._name:
                self._end_file()
                n_bytes = sum(t.chunks[0].n_bytes for t in self._plan.values() if t.chunks[0].file == name)
                self._file, self._name = self._create(self._folder / name, n_bytes), name
            assert self._file is not None
            self._records = TorchArchiveWriter(self._file.write, tensor.spec, {})
            self._remaining = tensor.spec.n_bytes
            if not self._remaining:
                self._end_tensor()

    def _end_tensor(self) -> None:
        records, self._records = self._records, None
        assert records is not None
        records.finish()
        self._waiting.pop()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.sync()
            finally:
                file.close()

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes."""
        for part in split_at_records(data, lambda: self._remaining):
            assert self._records is not None
            self._records.append(part)
            self._remaining -= len(part)
            if not self._remaining:
                self._end_tensor()
                self._begin_next()

    def close(self) -> None:
        """Flush the files to the disk, then write `.metadata`, which makes them a checkpoint."""
        assert not self._waiting, f"{self._waiting[-1][0]} is incomplete"
        self._end_file()
        files.fsync_folder(self._folder)
        if self._metadata:
            files.write_file(self._folder / "metadata.json", strict_json.dumps(self._metadata, "metadata", indent=2))
        files.write_file(self._folder / METADATA, dump_metadata(self._plan))

    def abort(self) -> None:
        """Close the open file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def _plan_chunks(tensors: TensorSpecs, max_file_bytes: int) -> dict[str, ChunkedTensor]:
    """Assign every tensor its position in a file."""
    planned: dict[str, ChunkedTensor] = {}
    n_files = position = 0
    for key, spec in tensors:
        if position >= max_file_bytes:
            n_files, position = n_files + 1, 0
        n_bytes = TorchArchiveWriter.count_bytes(spec, {})
        chunk = DcpChunk(((0,) * len(spec.shape), spec.shape), FILE_TEMPLATE.format(n_files), position, n_bytes)
        planned[key] = ChunkedTensor(spec, (chunk,))
        position += n_bytes
    return planned
