"""Conversion: any `Source` into any `Target`, in one pass, with the memory of a few blocks.

The model's tensors are walked in the order in which the target's files hold them. Each is read in blocks of rows, every
block once, cast if asked for, and the boxes that the target's layout cuts out of it are appended to their files, which
grow strictly from front to back; each is open from its first byte to its last. So every source byte is read once (twice
for a tied head), every target byte is written once, and a 70B model in 256 files needs no more memory than one in a
single file. Some threads read the blocks that come next while others write; each file belongs to one of those, so its
order is kept.

Everything is written into a hidden sibling folder, put on the disk, and renamed: the output is there complete or not at
all. What cannot be right is refused before the first byte is written.

Memory: blocks of `AHEAD_BYTES` and `BEHIND_BYTES` together (or five of one row each, where a row is that long), used
again and again; for each thread as much as a block where it casts, or what a file gets of one where it cuts by columns;
the planner's staging buffers, and the blocks of `lt_ckpt.direct`.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from lt_ckpt import direct, files
from lt_ckpt.containers import Container, Opens
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.layout import Layout
from lt_ckpt.new_folder import NewFolder
from lt_ckpt.pipeline import Lanes, Tally, finish, in_order
from lt_ckpt.shards import Box, row_blocks
from lt_ckpt.source import Group, Reader, Source
from lt_ckpt.tensorfile import TensorSpec

BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are read, cast and written in one go."""

WIDE_BLOCK_BYTES = 2 * BLOCK_BYTES
"""As much at most where every row goes to many files, so that each file gets more at once."""

PIECE_BYTES = 512 * 2**10
"""What each of many files should get at once: a file costs as much work for a small piece as for a large one."""

READERS = 3
"""Threads that read."""

AHEAD_BYTES = 20 * 2**20
"""Blocks that are being read, or were read and wait."""

WRITERS = 3
"""Threads that write; each file belongs to one."""

BEHIND_BYTES = 16 * 2**20
"""Blocks that the writers have been given."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be written.

    Attributes:
        format: `hf`, `nxd`, `dcp` or `pt`.
        layout: The files and what their tensors are made of.
        specs: Model tensor → dtype in the target, and shape.
        opens: Makes a file's container.
        metadata: Text for the containers that can hold some.
        small: Further files, written first, by path.
        last: Files that say that all is there (markers), written last, in this order.
        single_file: The path in the layout of the one file that is to be the output, instead of a folder.
        order: Model tensors in the order in which they are walked, where that of the files is not enough to tell it.
        check: Looks at the finished tensor files, in the folder that is still hidden; raises when it finds fault.
    """

    format: str
    layout: Layout
    specs: Mapping[str, TensorSpec]
    opens: Opens
    metadata: Mapping[str, str] = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)
    last: Mapping[str, bytes] = field(default_factory=dict)
    single_file: str = ""
    check: Callable[[Path], None] = lambda folder: None
    order: Sequence[str] = ()

    def tensors(self, index: int) -> list[tuple[str, TensorSpec]]:
        """Key → dtype and shape of the tensors of one file, in file order."""
        file = self.layout.files[index]
        return [(t.key, TensorSpec(self.specs[t.pieces[0].name].dtype, t.shape)) for t in file.tensors]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors of all files."""
        return sum(
            prod(t.shape) * item_bytes(self.specs[t.pieces[0].name].dtype) for f in self.layout.files for t in f.tensors
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a file takes of a model tensor: some of its rows, and of each the same columns."""

    file: int
    begin: int
    end: int
    columns: tuple[slice, ...]

    @classmethod
    def of(cls, file: int, box: Box) -> "_Cut":
        """A box as a cut; of a 0-dim tensor all."""
        rows, *columns = [slice(offset, offset + n) for offset, n in zip(*box, strict=True)] or [slice(0, 1)]
        return cls(file, rows.start, rows.stop, tuple(columns))

    def part(self, box: Box, block: np.ndarray) -> np.ndarray | None:
        """Returns what it takes of a block of whole rows, as a view; None when there is nothing."""
        if not box[1]:
            return block
        first = box[0][0]
        begin, end = max(self.begin, first), min(self.end, first + box[1][0])
        return block[(slice(begin - first, end - first), *self.columns)] if begin < end else None


def convert(
    source: Source, target: Target, out: str | os.PathLike[str], *, progress: files.Progress | None = None
) -> Path:
    """Writes `source` as `target` into a new folder.

    Args:
        source: What to convert; its group `weights`.
        target: What to make of it.
        out: The folder to make (one that is there must be empty), or the file.
        progress: Told the bytes written so far and in all.

    Returns:
        The folder.

    Raises:
        CheckpointError: The two do not fit together, `out` is not empty, or the disk fails. Nothing is left behind.
    """
    folder = Path(os.path.abspath(out))
    walk = _walk(source.weights, target)
    with storage("converting", folder):
        if os.path.lexists(folder) and (target.single_file or not (folder.is_dir() and not any(folder.iterdir()))):
            wanted = "" if target.single_file else " and not an empty folder"
            raise CheckpointError(f"{folder}: is there already{wanted}; choose another path")
        files.make_folders(folder.parent)
        with NewFolder(folder) as made, Reader(source.root) as reader:
            for path, data in target.small.items():
                made.write(path, data)
            _write_tensors(source, target, walk, made, reader, Tally(target.n_bytes, progress))
            target.check(made.hidden)
            for path, data in target.last.items():
                made.write(path, data)
            if target.single_file:
                made.publish_file(target.single_file)
    return folder


def require_cast(source: str, target: str) -> None:
    """Refuses a cast that is not possible, before anything is read (CheckpointError)."""
    cast(np.empty(0, np.uint8), source, target)


def _walk(group: Group, target: Target) -> dict[str, list[_Cut]]:
    """Returns model tensor → its pieces, in the order in which the files hold them, after checking everything.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or a cast is not possible.
    """
    target.layout.check({name: spec.shape for name, spec in target.specs.items()})
    for name, spec in target.specs.items():
        if name not in group.specs:
            raise CheckpointError(f"{name}: the source has no such tensor")
        found = group.specs[name]
        if found.shape != spec.shape:
            raise CheckpointError(f"{name}: has shape {list(found.shape)}, the model asks for {list(spec.shape)}")
        require_cast(found.dtype, spec.dtype)
    walk: dict[str, list[_Cut]] = {name: [] for name in target.order}
    for i, file in enumerate(target.layout.files):
        for tensor in file.tensors:
            dtypes = {target.specs[piece.name].dtype for piece in tensor.pieces}
            if len(dtypes) > 1:
                raise CheckpointError(f"{file.path}: {tensor.key} joins tensors of {' and '.join(sorted(dtypes))}")
            for piece in tensor.pieces:
                walk.setdefault(piece.name, []).append(_Cut.of(i, piece.box))
    _require_forwards(target.layout, list(walk))
    return walk


def _require_forwards(layout: Layout, order: list[str]) -> None:
    """Our own formats must let every file be written from front to back."""
    rank = {name: i for i, name in enumerate(order)}
    for file in layout.files:
        at = [(rank[p.name], p.offset[:1]) for tensor in file.tensors for p in tensor.pieces]
        assert at == sorted(at), f"{file.path}: not in the order of the walk"
        for tensor in file.tensors:
            assert all(p.shape[1:] == tensor.shape[1:] for p in tensor.pieces), f"{tensor.key}: joined side by side"


def _write_tensors(
    source: Source,
    target: Target,
    walk: Mapping[str, list[_Cut]],
    made: NewFolder,
    reader: Reader,
    tell: Tally,
) -> None:
    memory = _Memory()

    def read(name: str, box: Box, n_bytes: int) -> tuple[str, Box, np.ndarray, np.ndarray]:
        taken = memory.take(n_bytes)
        return name, box, block(source.weights, name, box, target.specs[name].dtype, reader, taken), taken

    reads = [
        (name, box, n_bytes)
        for name, cuts in walk.items()
        for box, n_bytes in _sized_boxes(source.weights.specs[name], target.specs[name].dtype, cuts)
    ]
    tasks, sizes = (partial(read, *task) for task in reads), (n_bytes for _, _, n_bytes in reads)
    left = [sum(spec.n_bytes for _, spec in target.tensors(i)) for i in range(len(target.layout.files))]
    opened: dict[int, Container] = {}

    def container(file: int) -> Container:
        if file not in opened:
            path = made.path(target.layout.files[file].path)
            opened[file] = target.opens(path, target.tensors(file), target.metadata)
        return opened[file]

    with ThreadPoolExecutor(READERS, "lt-ckpt-convert-read") as readers, Lanes(WRITERS, "lt-ckpt-convert") as writers:
        try:
            behind: deque[tuple[np.ndarray, list[Future[None]]]] = deque()
            held = 0
            for name, box, data, taken in in_order(readers, tasks, ahead=AHEAD_BYTES, sizes=sizes):
                while behind and held + len(taken) > BEHIND_BYTES:
                    written, futures = behind.popleft()
                    finish(futures)
                    held -= len(written)
                    memory.give(written)
                lanes: list[list[tuple[Container, np.ndarray, bool]]] = [[] for _ in range(WRITERS)]
                for cut in walk[name]:
                    part = cut.part(box, data)
                    if part is not None:
                        left[cut.file] -= part.nbytes
                        lanes[cut.file % WRITERS].append((container(cut.file), part, not left[cut.file]))
                held += len(taken)
                futures = [writers.submit(lane, _append, parts, tell) for lane, parts in enumerate(lanes) if parts]
                behind.append((taken, futures))
            for _, futures in behind:
                finish(futures)
            empty = [i for i in range(len(left)) if i not in opened]
            finish([writers.submit(i, container(i).close) for i in empty])
        except BaseException:
            readers.shutdown(cancel_futures=True)
            writers.stop()
            for unfinished in opened.values():
                unfinished.abandon()
            raise


class _Memory:
    """Blocks of memory for what is read, used again and again."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, n_bytes: int) -> np.ndarray:
        """Returns a block of so many bytes; free ones of another size are given up."""
        while self._free:
            with suppress(IndexError):  # another thread may take it meanwhile
                block = self._free.pop()
                if len(block) == n_bytes:
                    return block
        return direct.take_block(n_bytes)

    def give(self, block: np.ndarray) -> None:
        """Takes memory back."""
        self._free.append(block)


def _append(parts: list[tuple[Container, np.ndarray, bool]], tell: Tally) -> None:
    """Appends to files, and closes those that have everything then."""
    for container, part, is_last in parts:
        container.append(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        if is_last:
            container.close()
    tell(sum(part.nbytes for _, part, _ in parts))


def _sized_boxes(spec: TensorSpec, dtype: str, cuts: Sequence[_Cut]) -> list[tuple[Box, int]]:
    """Returns the blocks of rows of a tensor that are read in one go, and the bytes of memory that each needs."""
    together = sum(cut.begin < cuts[0].end and cuts[0].begin < cut.end for cut in cuts)
    limit = min(max(BLOCK_BYTES, together * PIECE_BYTES), max(BLOCK_BYTES, WIDE_BLOCK_BYTES))
    width = max(item_bytes(spec.dtype), item_bytes(dtype))
    around = 2 * direct.ALIGN  # what is read begins and ends anywhere in a page of the file
    found = row_blocks(spec.shape, max(1, (limit - around) // width))
    memory = -(-(prod(found[0][1]) * width + around) // BLOCK_BYTES) * BLOCK_BYTES
    return [(box, memory) for box in found]


def blocks(group: Group, name: str, dtype: str, reader: Reader) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields a tensor in blocks of rows, cast to `dtype`: the box, and its elements as integers of their width."""
    for box in boxes(group, name, dtype):
        yield box, block(group, name, box, dtype, reader)


def boxes(group: Group, name: str, dtype: str) -> list[Box]:
    """Returns a tensor's blocks of rows, of at most `BLOCK_BYTES` before and after a cast to `dtype`."""
    spec = group.specs[name]
    return row_blocks(spec.shape, BLOCK_BYTES // max(item_bytes(spec.dtype), item_bytes(dtype)))


def block(
    group: Group, name: str, box: Box, dtype: str, reader: Reader, memory: np.ndarray | None = None
) -> np.ndarray:
    """Reads one block, cast to `dtype`: its elements as integers of their width."""
    data = cast(reader.read(group, name, box, memory=memory), group.specs[name].dtype, dtype)
    return data.view(f"<u{item_bytes(dtype)}").reshape(box[1])
