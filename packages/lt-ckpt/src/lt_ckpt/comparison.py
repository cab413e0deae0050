"""Two models, tensor by tensor, whatever their formats: equal bit for bit, or how far apart.

Both are read in the same blocks of rows, so the memory is a few blocks. Of different dtypes the values are compared, in
float64; a value and its equal in another dtype are equal, which is what a cast that loses nothing gives.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from lt_ckpt.convert import BLOCK_BYTES
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.files import Progress
from lt_ckpt.pipeline import Tally, in_order
from lt_ckpt.shards import Box, row_blocks
from lt_ckpt.source import Group, Reader, Source
from lt_model import LlamaConfig

AHEAD = 3
"""Blocks of both that are read and compared ahead, each by a thread."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found about one tensor.

    Attributes:
        name: The model tensor, with its group in front unless that is `weights`.
        equal: Same shape, and all values equal; of one dtype bit for bit.
        problem: Why it could not be compared: missing in one, another shape. Empty otherwise.
        dtypes: Of the two.
        n_elements: Elements of the tensor.
        n_different: Elements that differ.
        max_abs: Largest difference; nan where something is not a number in only one of them.
        relative: `max_abs` over the largest absolute value of the first.
    """

    name: str
    equal: bool
    problem: str = ""
    dtypes: tuple[str, str] = ("", "")
    n_elements: int = 0
    n_different: int = 0
    max_abs: float = 0.0
    relative: float = 0.0


def compare(a: Source, b: Source, *, progress: Progress | None = None) -> Iterator[Comparison]:
    """Compares the tensors of the groups that either has, in the first one's order; see `Comparison`.

    Raises:
        CheckpointError: A file cannot be read.
    """
    kinds = [*a.groups, *(kind for kind in b.groups if kind not in a.groups)]
    total = sum(spec.n_bytes for group in a.groups.values() for spec in group.specs.values())
    tell = Tally(total, progress)
    empty = Group(specs={}, places={})
    with (
        Reader(a.root) as read_a,
        Reader(b.root) as read_b,
        ThreadPoolExecutor(AHEAD, thread_name_prefix="lt-ckpt-compare") as pool,
    ):
        for kind in kinds:
            left, right = a.groups.get(kind, empty), b.groups.get(kind, empty)
            for name in [*left.specs, *(name for name in right.specs if name not in left.specs)]:
                yield _compare(kind, name, (left, read_a), (right, read_b), (a.path, b.path), pool, tell)


def _compare(
    kind: str,
    name: str,
    a: tuple[Group, Reader],
    b: tuple[Group, Reader],
    paths: tuple[object, object],
    pool: Executor,
    tell: Tally,
) -> Comparison:
    shown = name if kind == "weights" else f"{kind}/{name}"
    for (group, _), path in zip((a, b), paths, strict=True):
        if name not in group.specs:
            return Comparison(name=shown, equal=False, problem=f"not in {path}")
    spec_a, spec_b = a[0].specs[name], b[0].specs[name]
    if spec_a.shape != spec_b.shape:
        return Comparison(name=shown, equal=False, problem=f"shapes {list(spec_a.shape)} and {list(spec_b.shape)}")
    n_different, max_abs, largest, n_elements = 0, 0.0, 0.0, 0
    equal: list[Box] = []

    def read(box: Box) -> tuple[Box, np.ndarray, np.ndarray, bool]:
        left, right = a[1].read(a[0], name, box), b[1].read(b[0], name, box)
        return box, left, right, spec_a.dtype == spec_b.dtype and _same_bytes(left, right)

    width = max(item_bytes(spec_a.dtype), item_bytes(spec_b.dtype))
    reads = (partial(read, box) for box in row_blocks(spec_a.shape, BLOCK_BYTES // width))
    for box, left, right, same in in_order(pool, reads, ahead=AHEAD):
        n_elements += left.size // item_bytes(spec_a.dtype)
        tell(left.size)
        if same:
            equal.append(box)
            continue
        x, y = (cast(raw, dtype, "F64").view("<f8") for raw, dtype in ((left, spec_a.dtype), (right, spec_b.dtype)))
        if spec_a.dtype == spec_b.dtype:
            different = left.view(f"<u{width}") != right.view(f"<u{width}")
        else:
            different = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        n_different += int(different.sum())
        if different.any():
            with np.errstate(invalid="ignore"):
                max_abs = float(np.maximum(max_abs, np.abs(x - y)[different].max()))
        largest = max(largest, _largest(x))
    for box in equal if n_different else ():  # only then it is asked how large the values are
        largest = max(largest, _largest(cast(a[1].read(a[0], name, box), spec_a.dtype, "F64").view("<f8")))
    return Comparison(
        name=shown,
        equal=n_different == 0,
        dtypes=(spec_a.dtype, spec_b.dtype),
        n_elements=n_elements,
        n_different=n_different,
        max_abs=max_abs,
        relative=max_abs / largest if largest else max_abs,
    )


def _same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    """Compares bytes, eight at a time."""
    n = left.size // 8 * 8
    return bool((left[:n].view("<u8") == right[:n].view("<u8")).all() and (left[n:] == right[n:]).all())


def _largest(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


def config_differences(a: Source, b: Source) -> Iterator[str]:
    """Yields the fields in which the models of two sources differ, in words; nothing where one has no configuration."""
    if a.config is None or b.config is None:
        return
    left, right = (LlamaConfig.from_hf(dict(s.config or {}), source=f"{s.path}: config").to_dict() for s in (a, b))
    for name, value in left.items():
        if value != right.get(name):
            yield f"configuration: {name} is {value!r}, in {b.path} {right.get(name)!r}"


def unequal_copies(source: Source, *, progress: Progress | None = None) -> Iterator[str]:
    """Yields, for each copy of a box that a format keeps besides the first, what differs; nothing when all are equal.

    Formats keep norms on every rank and key and value heads several times; a reader takes the first.
    """
    total = sum(
        int(np.prod(copy.shape, dtype=np.int64)) * item_bytes(group.specs[name].dtype)
        for group in source.groups.values()
        for name, copies in group.copies.items()
        for copy in copies
    )
    tell = Tally(total, progress)
    with Reader(source.root) as reader:
        for group in source.groups.values():
            for name, copies in group.copies.items():
                for copy in copies:
                    for offset, shape in row_blocks(copy.shape, BLOCK_BYTES // item_bytes(group.specs[name].dtype)):
                        box = tuple(o + c for o, c in zip(offset, copy.offset, strict=True)), shape
                        first = reader.read(group, name, box)
                        tell(first.size)
                        if (reader.read_at(group.specs, {name: (copy,)}, name, box, str(source.path)) != first).any():
                            yield f"{copy.file}: its copy of {name} differs from that of the first rank"
                            break
