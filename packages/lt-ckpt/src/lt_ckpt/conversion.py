"""Conversion of any `Source` into any `Target`, in one pass and with a few blocks of memory.

Model tensors are processed in the order in which the target's files hold them. Each is read in blocks of rows, every
block once, cast on request, and the boxes that the target's layout takes from it are appended to their files, which
grow strictly front to back; each is open from its first byte to its last. So every source byte is read once (twice for
a tied head), every target byte is written once, and a 70B model in 256 files needs no more memory than one in a single
file. Threads read the next blocks while others write; each file belongs to one writer thread, which keeps its order.

Every byte is compared with its checksum while it is read, where the source has some (`read_verification.py`).
A folder gets a list of its files' hashes (`hash_list.py`), which threads compute while they are written.
Everything is written into a hidden sibling folder, fsynced, and renamed: the output appears complete or not at all.
What a killed conversion leaves there is continued by the same one, file by file (`atomic_folder.py`).
Invalid requests are refused before the first byte is written.

Memory: blocks of `READ_AHEAD_BYTES` and `WRITE_BEHIND_BYTES` together (or five of one row each, if rows are longer),
reused; per thread up to a block for a cast or a column cut; the planner's staging buffers, and the blocks of
`lt_ckpt.direct_io`.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path, PurePosixPath

import numpy as np

from lt_ckpt import direct_io, files
from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.checked_cast import read_cast
from lt_ckpt.checksums import files_with_tensors, iter_checksum_errors
from lt_ckpt.direct_io import CreateFile
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.executors import ByteCounter, KeyedExecutor, iter_in_order, wait_all
from lt_ckpt.folder_hashing import FolderHasher
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_ckpt.layout import Layout
from lt_ckpt.shards import Box, split_rows
from lt_ckpt.source import Source, TensorGroup, TensorReader
from lt_ckpt.tensor_writers import TensorFileWriter, TensorFileWriterFactory
from lt_ckpt.tensorfile import TensorSpec

BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are read, cast and written in one go."""

MAX_BLOCK_BYTES = 2 * BLOCK_BYTES
"""Largest block, used where every row goes to many files, so that each file gets more at once."""

MIN_WRITE_BYTES = 512 * 2**10
"""Bytes that each of many files should get per block: a small write costs as much as a large one."""

READER_THREADS = 3
"""Reader threads."""

READ_AHEAD_BYTES = 20 * 2**20
"""Bytes of blocks being read, or read and waiting."""

WRITER_THREADS = 3
"""Writer threads; each file belongs to one."""

WRITE_BEHIND_BYTES = 16 * 2**20
"""Bytes of blocks handed to the writers."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Output of a conversion.

    Attributes:
        format: `hf`, `nxd`, `dcp` or `pt`.
        layout: The files and the boxes of which their tensors consist.
        specs: Model tensor → dtype in the target, and shape.
        open_writer: Opens the writer of a tensor file.
        metadata: Text for the tensor files that can hold some.
        aux_files: Further files by path, written first.
        marker_files: Completion markers, written last, in this order.
        hashed_folder: Folder of the output whose files are listed with their hashes, by default the output itself.
        single_file: The path in the layout of the one file that is the output, instead of a folder; it gets no list.
        tensor_order: Model tensors in processing order, where the order of the files does not determine it.
        options: The options of the conversion as a text, by which a killed one is recognized.
        allow_overflow: Let finite values beyond the range of the target's dtype become infinite, instead of refusing.
        check: Validates the finished tensor files in the still hidden folder; raises if something is wrong.
    """

    format: str
    layout: Layout
    specs: Mapping[str, TensorSpec]
    open_writer: TensorFileWriterFactory
    metadata: Mapping[str, str] = field(default_factory=dict)
    aux_files: Mapping[str, bytes] = field(default_factory=dict)
    marker_files: Mapping[str, bytes] = field(default_factory=dict)
    hashed_folder: str = ""
    single_file: str = ""
    check: Callable[[Path], None] = lambda folder: None
    tensor_order: Sequence[str] = ()
    options: str = ""
    allow_overflow: bool = False

    def tensors(self, index: int) -> list[tuple[str, TensorSpec]]:
        """Return key, dtype and shape of the tensors of one file, in file order."""
        file = self.layout.files[index]
        return [(t.key, TensorSpec(self.specs[t.regions[0].name].dtype, t.shape)) for t in file.tensors]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors of all files."""
        return sum(
            prod(t.shape) * item_bytes(self.specs[t.regions[0].name].dtype)
            for f in self.layout.files
            for t in f.tensors
        )


@dataclass(frozen=True, slots=True)
class _FileRegion:
    """Part of a model tensor that goes to a file: a range of rows, and the same columns of each."""

    file: int
    begin: int
    end: int
    columns: tuple[slice, ...]

    @classmethod
    def from_box(cls, file: int, box: Box) -> "_FileRegion":
        """Return the region of a box; a 0-dim tensor is taken whole."""
        rows, *columns = [slice(offset, offset + n) for offset, n in zip(*box, strict=True)] or [slice(0, 1)]
        return cls(file, rows.start, rows.stop, tuple(columns))

    def extract(self, box: Box, block: np.ndarray) -> np.ndarray | None:
        """Return the region's part of a block of whole rows, as a view; None if there is none."""
        if not box[1]:
            return block
        first = box[0][0]
        begin, end = max(self.begin, first), min(self.end, first + box[1][0])
        return block[(slice(begin - first, end - first), *self.columns)] if begin < end else None


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
    writes = _plan_writes(source.weights, target)
    with translate_os_errors("converting", folder):
        job = _describe_job(source, target)
        with (
            AtomicFolder(folder, single_file=target.single_file, job=job) as output,
            TensorReader(source.root, source.find_checksums) as reader,
            FolderHasher(output.temp_path / target.hashed_folder, output.create) as hasher,
        ):
            finished = {i for i, file in enumerate(target.layout.files) if output.is_finished(file.path)}
            finished_bytes = sum(spec.n_bytes for i in finished for _, spec in target.tensors(i))
            files.check_free_space(folder.parent, target.n_bytes - finished_bytes)
            for path, data in target.aux_files.items():
                output.write_file(path, data)
            count_bytes = ByteCounter(target.n_bytes, progress)
            count_bytes(finished_bytes)
            remaining = _skip_finished(source, writes, finished)
            create = output.create if target.single_file else hasher.create
            _write_tensors(source, target, remaining, finished, output, create, reader, count_bytes)
            reader.finish()
            target.check(output.temp_path)
            for path, data in target.marker_files.items():
                output.write_file(path, data)
            if not target.single_file:
                hasher.add_rest()
                path = str(PurePosixPath(target.hashed_folder, HASH_LIST))
                output.write_file(path, format_hash_list(hasher.hashes))
    return folder


def _describe_job(source: Source, target: Target) -> str:
    """Return a hash of all that determines the output: version, options, the source's files and tensors.

    A file is the same if its size, its times and its inode are; the time of the last change cannot be set back.
    """
    digest = hashlib.sha256()
    stats = {name: os.stat(source.root / name) for name in sorted(files_with_tensors(source))}
    for part in (
        (version("lt-ckpt"), target.format, target.options, str(source.root)),
        [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats.items()],
        [(kind, group.specs, group.locations) for kind, group in source.groups.items()],
        (target.layout, target.specs, target.metadata, target.tensor_order, target.allow_overflow),
        (target.aux_files, target.marker_files),
    ):
        digest.update(repr(part).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _skip_finished(
    source: Source, writes: Mapping[str, list[_FileRegion]], finished: set[int]
) -> dict[str, list[_FileRegion]]:
    """Return the file regions that are still to be written.

    What went to finished files was compared with its checksums only as far as it was read before the kill; tensors that
    are not read again are compared here.
    """
    remaining = {name: [r for r in regions if r.file not in finished] for name, regions in writes.items()}
    skipped = [name for name, regions in writes.items() if regions and not remaining[name]]
    if skipped:
        group = source.weights
        part = TensorGroup(
            specs={name: group.specs[name] for name in skipped},
            locations={name: group.locations[name] for name in skipped},
        )
        problem = next(iter_checksum_errors(replace(source, groups={"weights": part}, other_files=())), "")
        if problem:
            raise CheckpointError(problem)
    return {name: regions for name, regions in remaining.items() if name not in skipped}


def check_castable(source: str, target: str) -> None:
    """Raise a CheckpointError for an impossible cast, before anything is read."""
    cast(np.empty(0, np.uint8), source, target)


def _plan_writes(group: TensorGroup, target: Target) -> dict[str, list[_FileRegion]]:
    """Check everything and return model tensor → its file regions, in the order of the files.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or a cast is not possible.
    """
    target.layout.check({name: spec.shape for name, spec in target.specs.items()})
    for name, spec in target.specs.items():
        if name not in group.specs:
            raise CheckpointError(f"{name}: the source has no such tensor")
        found = group.specs[name]
        if found.shape != spec.shape:
            raise CheckpointError(f"{name}: has shape {list(found.shape)}, expected {list(spec.shape)}")
        check_castable(found.dtype, spec.dtype)
    writes: dict[str, list[_FileRegion]] = {name: [] for name in target.tensor_order}
    for i, file in enumerate(target.layout.files):
        for tensor in file.tensors:
            dtypes = {target.specs[region.name].dtype for region in tensor.regions}
            if len(dtypes) > 1:
                raise CheckpointError(f"{file.path}: {tensor.key} joins tensors of {' and '.join(sorted(dtypes))}")
            for region in tensor.regions:
                writes.setdefault(region.name, []).append(_FileRegion.from_box(i, region.box))
    _check_sequential(target.layout, list(writes))
    return writes


def _check_sequential(layout: Layout, order: list[str]) -> None:
    """Assert that every file can be written front to back."""
    rank = {name: i for i, name in enumerate(order)}
    for file in layout.files:
        at = [(rank[p.name], p.offset[:1]) for tensor in file.tensors for p in tensor.regions]
        assert at == sorted(at), f"{file.path}: not in processing order"
        for tensor in file.tensors:
            assert all(p.shape[1:] == tensor.shape[1:] for p in tensor.regions), f"{tensor.key}: joined along columns"


def _write_tensors(
    source: Source,
    target: Target,
    writes: Mapping[str, list[_FileRegion]],
    finished: set[int],
    output: AtomicFolder,
    create: CreateFile,
    reader: TensorReader,
    count_bytes: ByteCounter,
) -> None:
    memory = _BufferPool()

    def read(name: str, box: Box, n_bytes: int) -> tuple[str, Box, np.ndarray, np.ndarray]:
        buffer = memory.acquire(n_bytes)
        dtype = target.specs[name].dtype
        allow = target.allow_overflow
        return name, box, read_block(source.weights, name, box, dtype, reader, buffer, allow_overflow=allow), buffer

    reads = [
        (name, box, n_bytes)
        for name, regions in writes.items()
        for box, n_bytes in _boxes_with_sizes(source.weights.specs[name], target.specs[name].dtype, regions)
    ]
    tasks, sizes = (partial(read, *task) for task in reads), (n_bytes for _, _, n_bytes in reads)
    remaining = [sum(spec.n_bytes for _, spec in target.tensors(i)) for i in range(len(target.layout.files))]
    opened: dict[int, TensorFileWriter] = {}

    def get_writer(file: int) -> TensorFileWriter:
        if file not in opened:
            path = output.file_path(target.layout.files[file].path)
            opened[file] = target.open_writer(path, target.tensors(file), target.metadata, create=create)
        return opened[file]

    def close_writer(file: int) -> None:
        get_writer(file).close()
        output.record_finished(target.layout.files[file].path)

    with (
        ThreadPoolExecutor(READER_THREADS, "lt-ckpt-convert-read") as readers,
        KeyedExecutor(WRITER_THREADS, "lt-ckpt-convert") as writers,
    ):
        try:
            written_behind: deque[tuple[np.ndarray, list[Future[None]]]] = deque()
            behind_bytes = 0
            for name, box, data, buffer in iter_in_order(readers, tasks, max_in_flight=READ_AHEAD_BYTES, sizes=sizes):
                while written_behind and behind_bytes + len(buffer) > WRITE_BEHIND_BYTES:
                    written, futures = written_behind.popleft()
                    wait_all(futures)
                    behind_bytes -= len(written)
                    memory.release(written)
                batches: list[list[_Append]] = [[] for _ in range(WRITER_THREADS)]
                for region in writes[name]:
                    part = region.extract(box, data)
                    if part is not None:
                        remaining[region.file] -= part.nbytes
                        batch = batches[region.file % WRITER_THREADS]
                        close = None if remaining[region.file] else partial(close_writer, region.file)
                        batch.append((get_writer(region.file), part, close))
                behind_bytes += len(buffer)
                futures = [
                    writers.submit(worker, _append_blocks, batch, count_bytes)
                    for worker, batch in enumerate(batches)
                    if batch
                ]
                written_behind.append((buffer, futures))
            for _, futures in written_behind:
                wait_all(futures)
            empty = [i for i in range(len(remaining)) if i not in opened and i not in finished]
            wait_all([writers.submit(i, close_writer, i) for i in empty])
        except BaseException:
            readers.shutdown(cancel_futures=True)
            writers.shutdown()
            for unfinished in opened.values():
                unfinished.abort()
            raise


class _BufferPool:
    """Reusable memory blocks for reads."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def acquire(self, n_bytes: int) -> np.ndarray:
        """Return a block of `n_bytes`; free blocks of another size are dropped."""
        while self._free:
            with suppress(IndexError):  # another thread may take it meanwhile
                block = self._free.pop()
                if len(block) == n_bytes:
                    return block
        return direct_io.acquire_block(n_bytes)

    def release(self, block: np.ndarray) -> None:
        """Return a block to the pool."""
        self._free.append(block)


_Append = tuple[TensorFileWriter, np.ndarray, Callable[[], None] | None]
"""Writer of a file, its next bytes, and what closes the file after its last ones."""


def _append_blocks(parts: list[_Append], count_bytes: ByteCounter) -> None:
    """Append blocks to files, and close the files that are then complete."""
    for writer, part, close in parts:
        writer.append(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        if close is not None:
            close()
    count_bytes(sum(part.nbytes for _, part, _ in parts))


def _boxes_with_sizes(spec: TensorSpec, dtype: str, regions: Sequence[_FileRegion]) -> list[tuple[Box, int]]:
    """Return a tensor's blocks of rows to read, each with the bytes of memory it needs."""
    n_overlapping = sum(region.begin < regions[0].end and regions[0].begin < region.end for region in regions)
    limit = min(max(BLOCK_BYTES, n_overlapping * MIN_WRITE_BYTES), max(BLOCK_BYTES, MAX_BLOCK_BYTES))
    width = max(item_bytes(spec.dtype), item_bytes(dtype))
    padding = 2 * direct_io.ALIGN  # a read starts and ends anywhere in a page of the file
    found = split_rows(spec.shape, max(1, (limit - padding) // width))
    memory = -(-(prod(found[0][1]) * width + padding) // BLOCK_BYTES) * BLOCK_BYTES
    return [(box, memory) for box in found]


def iter_blocks(group: TensorGroup, name: str, dtype: str, reader: TensorReader) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield a tensor in blocks of rows cast to `dtype`: the box, and its elements as unsigned integers."""
    for box in block_boxes(group, name, dtype):
        yield box, read_block(group, name, box, dtype, reader)


def block_boxes(group: TensorGroup, name: str, dtype: str) -> list[Box]:
    """Return a tensor's blocks of rows, at most `BLOCK_BYTES` before and after a cast to `dtype`."""
    spec = group.specs[name]
    return split_rows(spec.shape, BLOCK_BYTES // max(item_bytes(spec.dtype), item_bytes(dtype)))


def read_block(
    group: TensorGroup,
    name: str,
    box: Box,
    dtype: str,
    reader: TensorReader,
    memory: np.ndarray | None = None,
    *,
    allow_overflow: bool = False,
) -> np.ndarray:
    """Read one block like `read_cast`; return its elements as unsigned integers of their width."""
    data = read_cast(group, name, box, dtype, reader, memory, allow_overflow=allow_overflow)
    return data.view(f"<u{item_bytes(dtype)}").reshape(box[1])
