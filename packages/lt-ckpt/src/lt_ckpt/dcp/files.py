"""The `.distcp` files of a torch.distributed.checkpoint folder: where each chunk's bytes lie, and how they are written.

Every chunk is a file of torch.save inside of a file (or, where it was asked for, all chunks of a file are one
safetensors file). Reading looks at the headers of each and gives the position of its bytes. Writing puts whole tensors
one after the other into files of bounded size, and `.metadata` last, so that a folder without it is one that was not
finished.

Cost of reading: four small reads per chunk; of writing: one pass.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.containers import Tensors, portions
from lt_ckpt.dcp.metadata import Chunk, Chunked, dump
from lt_ckpt.direct import NewFile
from lt_ckpt.errors import CheckpointError
from lt_ckpt.plan import Stored
from lt_ckpt.source import Held
from lt_ckpt.tensorfile import StoredTensor, TensorSpec, read_header
from lt_ckpt.torchfile.file import OpenFile, TorchRecords, check_records, read_tree
from lt_ckpt.torchfile.names import TorchTensor

METADATA = ".metadata"
FILE = "__0_{}.distcp"
MAX_FILE_BYTES = 5 * 10**9


def locate(folder: Path, tensors: Mapping[str, Chunked]) -> dict[str, tuple[Stored, ...]]:
    """Finds the bytes of every chunk.

    Returns:
        Key → the chunks, as slices of the tensor.

    Raises:
        CheckpointError: A file is missing, cut short, or holds something else than `.metadata` says.
    """
    found: dict[str, tuple[Stored, ...]] = {}
    with ExitStack() as stack:
        opened: dict[str, _Distcp] = {}
        for key, tensor in tensors.items():
            stored: list[Stored] = []
            for chunk in tensor.chunks:
                if chunk.file not in opened:
                    opened[chunk.file] = _Distcp(
                        stack.enter_context(OpenFile(folder / chunk.file)), folder / chunk.file
                    )
                held = opened[chunk.file].held(key, chunk, TensorSpec(tensor.spec.dtype, chunk.box[1]))
                stored.append(
                    Stored(
                        file=chunk.file,
                        begin=held.begin,
                        offset=chunk.box[0],
                        shape=chunk.box[1],
                        whole=held.whole,
                        at=held.at,
                        transposed=held.transposed,
                    )
                )
            found[key] = tuple(stored)
    return found


def check_crc(folder: Path, tensors: Mapping[str, Chunked], *, progress: files.Progress | None = None) -> set[str]:
    """Reads all chunks and compares them with their checksums, which torch does not do.

    Args:
        folder: The checkpoint.
        tensors: What `.metadata` says, which itself has no checksum.
        progress: Told the bytes of chunks read so far and in all.

    Returns:
        Files that carry no checksums, because they are safetensors.

    Raises:
        CheckpointError: A chunk differs, or a file cannot be read.
    """
    unchecked: set[str] = set()
    chunks = [
        (chunk.file, chunk.begin, chunk.n_bytes, key) for key, tensor in tensors.items() for chunk in tensor.chunks
    ]
    done, total = 0, sum(n_bytes for _, _, n_bytes, _ in chunks)
    with ExitStack() as stack:
        opened: dict[str, _Distcp] = {}
        for name, begin, n_bytes, key in sorted(chunks):
            if name not in opened:
                opened[name] = _Distcp(stack.enter_context(OpenFile(folder / name)), folder / name)
            if opened[name].is_safetensors:
                unchecked.add(name)
            else:
                opened[name].check_crc(begin, begin + n_bytes, key)
            done += n_bytes
            if progress is not None:
                progress(done, total, "bytes")
    return unchecked


class _Distcp:
    """A file of chunks, open for reading."""

    def __init__(self, opened: OpenFile, path: Path) -> None:
        self._opened, self._path = opened, path
        self._safetensors: dict[str, StoredTensor] | None = None
        self.is_safetensors = opened.read(0, min(2, opened.size)) != b"PK"

    def held(self, key: str, chunk: Chunk, spec: TensorSpec) -> Held:
        """Returns where a chunk's bytes lie, after checking that it is what it should be."""
        where = f"{self._path}: {key}"
        begin, end = chunk.begin, chunk.begin + chunk.n_bytes
        self._require(begin, end, where)
        if self.is_safetensors:
            held = self._from_safetensors(key, where)
        else:
            tensor, _ = read_tree(self._opened.read, begin, end, where)
            if not isinstance(tensor, TorchTensor):
                raise CheckpointError(f"{where}: holds a {type(tensor).__name__} in place of a tensor")
            held = tensor.locate()
        if held.spec != spec:
            raise CheckpointError(
                f"{where}: holds {held.spec.dtype} {list(held.spec.shape)}, {METADATA} says {spec.dtype} "
                f"{list(spec.shape)}; the two are not of one save"
            )
        return held

    def check_crc(self, begin: int, end: int, key: str) -> None:
        """Compares a chunk's bytes with their checksums."""
        where = f"{self._path}: {key}"
        self._require(begin, end, where)
        check_records(self._opened.read, begin, end, where, lambda done, total, unit: None)

    def _require(self, begin: int, end: int, where: str) -> None:
        if end > self._opened.size:
            raise CheckpointError(
                f"{where}: should lie at {begin} to {end}, the file has {self._opened.size} bytes; it is truncated"
            )

    def _from_safetensors(self, key: str, where: str) -> Held:
        """Finds a chunk by its key: positions in `.metadata` mean nothing for such files."""
        if self._safetensors is None:
            try:
                self._safetensors = read_header(self._path).tensors
            except CheckpointError as exc:
                raise CheckpointError(f"{where}: neither a file of torch nor of safetensors: {exc}") from exc
        stored = self._safetensors.get(key)
        if stored is None:
            raise CheckpointError(f"{where}: is not in the file")
        return Held(spec=TensorSpec(stored.dtype, stored.shape), begin=stored.begin)


class DcpWriter:
    """A new checkpoint folder of whole tensors, as a container.

    Args:
        path: The folder, new or empty.
        tensors: Key → dtype and shape, in order.
        metadata: Text to keep in a file of its own that torch does not look at.
        max_file_bytes: A new file is begun when one has as many bytes; a tensor is never cut.
    """

    def __init__(
        self, path: Path, tensors: Tensors, metadata: Mapping[str, str], *, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._folder, self._metadata = path, dict(metadata)
        self._plan = _planned(tensors, max_file_bytes)
        self._waiting = list(reversed(self._plan.items()))
        self._file: NewFile | None = None
        self._name = ""
        self._left = 0
        self._records: TorchRecords | None = None
        if not path.is_dir():
            files.make_folder(path)
        try:
            self._begin_next()
        except BaseException:
            self.abandon()
            raise

    def _begin_next(self) -> None:
        """Begins the next tensor that has bytes."""
        while self._waiting and self._records is None:
            _, tensor = self._waiting[-1]
            name = tensor.chunks[0].file
            if name != self._name:
                self._end_file()
                n_bytes = sum(t.chunks[0].n_bytes for t in self._plan.values() if t.chunks[0].file == name)
                self._file, self._name = NewFile(self._folder / name, n_bytes), name
            assert self._file is not None
            self._records = TorchRecords(self._file.write, tensor.spec, {})
            self._left = tensor.spec.n_bytes
            if not self._left:
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
        """Take the next bytes."""
        for part in portions(data, lambda: self._left):
            assert self._records is not None
            self._records.append(part)
            self._left -= len(part)
            if not self._left:
                self._end_tensor()
                self._begin_next()

    def close(self) -> None:
        """Put the files on the disk, and then `.metadata`, which makes them a checkpoint."""
        assert not self._waiting, f"{self._waiting[-1][0]} has not come whole"
        self._end_file()
        files.fsync_folder(self._folder)
        if self._metadata:
            files.write_file(self._folder / "metadata.json", strict_json.dumps(self._metadata, "metadata", indent=2))
        files.write_file(self._folder / METADATA, dump(self._plan))

    def abandon(self) -> None:
        """Let go of the file that is open."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def _planned(tensors: Tensors, max_file_bytes: int) -> dict[str, Chunked]:
    """Gives every tensor its place in a file."""
    planned: dict[str, Chunked] = {}
    n_files = position = 0
    for key, spec in tensors:
        if position >= max_file_bytes:
            n_files, position = n_files + 1, 0
        n_bytes = TorchRecords.n_bytes(spec, {})
        chunk = Chunk(((0,) * len(spec.shape), spec.shape), FILE.format(n_files), position, n_bytes)
        planned[key] = Chunked(spec, (chunk,))
        position += n_bytes
    return planned
