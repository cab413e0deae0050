"""Conversion: any `Source` into any `Target`, in one pass, with the memory of a few blocks.

The model's tensors are walked in the order in which the target's files hold them. Each is read in blocks of rows, every
block once, cast if asked for, and the boxes that the target's layout cuts out of it are appended to their files, which
are all open and grow strictly from front to back. So every source byte is read once (twice for a tied head), every
target byte is written once, and a 70B model in 256 files needs no more memory than one in a single file. Some threads
read the blocks that come next while others write; each file belongs to one of those, so its order is kept.

Everything is written into a hidden sibling folder, put on the disk, and renamed: the output is there complete or not at
all. What cannot be right is refused before the first byte is written.

Memory: `READERS` + `BEHIND` + 1 blocks of `BLOCK_BYTES` (one row where that is longer), for each thread as much again
where it casts or cuts by columns, the planner's staging buffers, and the blocks of `lt_ckpt.direct`.
"""

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from lt_ckpt import files
from lt_ckpt.containers import Container, Opens
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import new_token
from lt_ckpt.layout import Layout, Piece
from lt_ckpt.pipeline import Lanes, finish, in_order
from lt_ckpt.shards import Box, intersect, row_blocks
from lt_ckpt.source import Group, Reader, Source
from lt_ckpt.tensorfile import TensorSpec

BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are read, cast and written in one go."""

READERS = 3
"""Threads that read, and blocks that they are ahead."""

WRITERS = 3
"""Threads that write; each file belongs to one."""

BEHIND = 4
"""Blocks that may wait for the writers."""


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
    """A piece of the model tensor that is being walked: which file takes it, and how many bytes of it have gone."""

    file: int
    piece: Piece


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
        if os.path.lexists(folder) and (target.single_file or not _is_empty_folder(folder)):
            wanted = "" if target.single_file else " and not an empty folder"
            raise CheckpointError(f"{folder}: is there already{wanted}; choose another path")
        files.make_folders(folder.parent)
        with NewFolder(folder) as made, Reader(source.root) as reader:
            for path, data in target.small.items():
                made.write(path, data)
            _write_tensors(source, target, walk, made, reader, Progress(target.n_bytes, progress))
            target.check(made.hidden)
            for path, data in target.last.items():
                made.write(path, data)
            if target.single_file:
                made.publish_file(target.single_file)
    return folder


def require_cast(source: str, target: str) -> None:
    """Refuses a cast that is not possible, before anything is read (CheckpointError)."""
    cast(np.empty(0, np.uint8), source, target)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


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
    walk: dict[str, list[_Cut]] = {}
    for i, file in enumerate(target.layout.files):
        for tensor in file.tensors:
            dtypes = {target.specs[piece.name].dtype for piece in tensor.pieces}
            if len(dtypes) > 1:
                raise CheckpointError(f"{file.path}: {tensor.key} joins tensors of {' and '.join(sorted(dtypes))}")
            for piece in tensor.pieces:
                walk.setdefault(piece.name, []).append(_Cut(i, piece))
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
    made: "NewFolder",
    reader: Reader,
    tell: "Progress",
) -> None:
    def read(name: str, box: Box) -> tuple[str, Box, np.ndarray]:
        return name, box, block(source.weights, name, box, target.specs[name].dtype, reader)

    def write(container: Container, box: Box, data: np.ndarray, wanted: Box) -> None:
        part = _cut(box, data, wanted)
        if part is not None:
            container.append(part)
            tell(part.nbytes)

    tasks = (partial(read, name, box) for name in walk for box in boxes(source.weights, name, target.specs[name].dtype))
    opened: list[Container] = []
    with ThreadPoolExecutor(READERS, "lt-ckpt-convert-read") as readers, Lanes(WRITERS, "lt-ckpt-convert") as writers:
        try:
            for i, file in enumerate(target.layout.files):
                opened.append(target.opens(made.path(file.path), target.tensors(i), target.metadata))
            behind: deque[list[Future[None]]] = deque()
            for name, box, data in in_order(readers, tasks, ahead=READERS):
                if len(behind) == BEHIND:
                    finish(behind.popleft())
                # Of a tensor that many files share, a block of rows goes to few.
                cuts = [(cut.file, cut.piece.box) for cut in walk[name] if not box[1] or intersect(box, cut.piece.box)]
                behind.append([writers.submit(f, write, opened[f], box, data, wanted) for f, wanted in cuts])
                del data
            while behind:
                finish(behind.popleft())
            finish([writers.submit(i, container.close) for i, container in enumerate(opened)])
        except BaseException:
            readers.shutdown(cancel_futures=True)
            writers.stop()
            for container in opened:
                container.abandon()
            raise


def blocks(group: Group, name: str, dtype: str, reader: Reader) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields a tensor in blocks of rows, cast to `dtype`: the box, and its elements as integers of their width."""
    for box in boxes(group, name, dtype):
        yield box, block(group, name, box, dtype, reader)


def boxes(group: Group, name: str, dtype: str) -> list[Box]:
    """Returns a tensor's blocks of rows, of at most `BLOCK_BYTES` before and after a cast to `dtype`."""
    spec = group.specs[name]
    return row_blocks(spec.shape, BLOCK_BYTES // max(item_bytes(spec.dtype), item_bytes(dtype)))


def block(group: Group, name: str, box: Box, dtype: str, reader: Reader) -> np.ndarray:
    """Reads one block, cast to `dtype`: its elements as integers of their width."""
    data = cast(reader.read(group, name, box), group.specs[name].dtype, dtype)
    return data.view(f"<u{item_bytes(dtype)}").reshape(box[1])


def _cut(box: Box, block: np.ndarray, wanted: Box) -> np.ndarray | None:
    """Returns the part of a block that lies in the wanted box, as contiguous bytes; None when there is none."""
    common = intersect(box, wanted) if box[1] else (box[0], box[1])
    if common is None:
        return None
    part = block[tuple(slice(o - b, o - b + n) for o, n, b in zip(common[0], common[1], box[0], strict=True))]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


class Progress:
    """Adds up the bytes that are done and tells them."""

    def __init__(self, total: int, tell: files.Progress | None) -> None:
        self._done, self._total, self._tell = 0, total, tell
        self._lock = threading.Lock()

    def __call__(self, n_bytes: int) -> None:
        """So many bytes more; from any thread."""
        with self._lock:
            self._done += n_bytes
            if self._tell is not None:
                self._tell(self._done, self._total, "bytes")


class NewFolder:
    """A folder in the making, under a hidden name of its own beside the final one.

    A context: at its end everything in the folder is on the disk and the folder gets its name; after an error it is
    removed. Nobody else knows the hidden name, so all that lies under it was made here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hidden = folder.with_name(f".{folder.name}.tmp-{new_token()}")
        self._publish = ""

    def path(self, relative: str) -> Path:
        """Returns where a file of the folder is to be made, and makes the folders above it."""
        assert not relative.startswith("/"), relative
        assert ".." not in Path(relative).parts, relative
        path = self.hidden / relative
        files.make_folders(path.parent)
        return path

    def write(self, relative: str, data: bytes) -> None:
        """Writes a small file whole."""
        files.write_file(self.path(relative), data)

    def publish_file(self, relative: str) -> None:
        """Lets the output be this one file in place of the folder."""
        self._publish = relative

    def __enter__(self) -> "NewFolder":
        try:
            files.make_folder(self.hidden)
        except OSError:  # perhaps after it was made
            shutil.rmtree(self.hidden, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for folder, _, _ in os.walk(self.hidden, topdown=False):
                    files.fsync_folder(Path(folder))
                files.rename(self.hidden / self._publish, self._folder)
                files.fsync_folder(self._folder.parent)
        finally:
            shutil.rmtree(self.hidden, ignore_errors=True)
