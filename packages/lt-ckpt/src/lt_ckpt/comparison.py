"""Tensor-by-tensor comparison of two models in any formats: bit-exact equality or distance.

Both are read in the same blocks of rows, so memory is a few blocks. Values of different dtypes are compared in float64;
a value and its exact equivalent in another dtype are equal, as after a lossless cast.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from lt_ckpt.conversion import BLOCK_BYTES
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.executors import ByteCounter, iter_in_order
from lt_ckpt.files import ProgressCallback
from lt_ckpt.shards import Box, split_rows
from lt_ckpt.source import Source, TensorGroup, TensorReader
from lt_model import config_from_hf

READ_AHEAD_BLOCKS = 3
"""Blocks of both models that are read and compared ahead, one per thread."""


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """Comparison of one tensor.

    Attributes:
        name: The model tensor, with its group in front unless that is `weights`.
        is_equal: Same shape, and all values equal; bit for bit if the dtypes are equal.
        problem: Why it could not be compared: missing in one, another shape. Empty otherwise.
        dtypes: The two dtypes.
        n_elements: Elements of the tensor.
        n_different: Elements that differ.
        max_abs_diff: Largest difference; nan where only one of the two is not a number.
        relative_diff: `max_abs_diff` over the largest absolute value of the first.
    """

    name: str
    is_equal: bool
    problem: str = ""
    dtypes: tuple[str, str] = ("", "")
    n_elements: int = 0
    n_different: int = 0
    max_abs_diff: float = 0.0
    relative_diff: float = 0.0


def compare(a: Source, b: Source, *, progress: ProgressCallback | None = None) -> Iterator[TensorComparison]:
    """Compare the tensors of all groups of either source, in the first one's order.

    Raises:
        CheckpointError: A file cannot be read.
    """
    kinds = [*a.groups, *(kind for kind in b.groups if kind not in a.groups)]
    total = sum(spec.n_bytes for group in a.groups.values() for spec in group.specs.values())
    count_bytes = ByteCounter(total, progress)
    empty = TensorGroup(specs={}, locations={})
    with (
        TensorReader(a.root) as reader_a,
        TensorReader(b.root) as reader_b,
        ThreadPoolExecutor(READ_AHEAD_BLOCKS, thread_name_prefix="lt-ckpt-compare") as pool,
    ):
        for kind in kinds:
            left, right = a.groups.get(kind, empty), b.groups.get(kind, empty)
            for name in [*left.specs, *(name for name in right.specs if name not in left.specs)]:
                yield _compare(kind, name, (left, reader_a), (right, reader_b), (a.path, b.path), pool, count_bytes)


def _compare(
    kind: str,
    name: str,
    a: tuple[TensorGroup, TensorReader],
    b: tuple[TensorGroup, TensorReader],
    paths: tuple[object, object],
    pool: Executor,
    count_bytes: ByteCounter,
) -> TensorComparison:
    full_name = name if kind == "weights" else f"{kind}/{name}"
    for (group, _), path in zip((a, b), paths, strict=True):
        if name not in group.specs:
            return TensorComparison(name=full_name, is_equal=False, problem=f"not in {path}")
    spec_a, spec_b = a[0].specs[name], b[0].specs[name]
    if spec_a.shape != spec_b.shape:
        return TensorComparison(
            name=full_name, is_equal=False, problem=f"shapes {list(spec_a.shape)} and {list(spec_b.shape)}"
        )
    n_different, max_abs, largest, n_elements = 0, 0.0, 0.0, 0
    equal: list[Box] = []

    def read(box: Box) -> tuple[Box, np.ndarray, np.ndarray, bool]:
        left, right = a[1].read(a[0], name, box), b[1].read(b[0], name, box)
        return box, left, right, spec_a.dtype == spec_b.dtype and _bytes_equal(left, right)

    width = max(item_bytes(spec_a.dtype), item_bytes(spec_b.dtype))
    reads = (partial(read, box) for box in split_rows(spec_a.shape, BLOCK_BYTES // width))
    for box, left, right, same in iter_in_order(pool, reads, max_in_flight=READ_AHEAD_BLOCKS):
        n_elements += left.size // item_bytes(spec_a.dtype)
        count_bytes(left.size)
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
        largest = max(largest, _max_abs(x))
    for box in equal if n_different else ():  # their magnitude is only needed if something differs
        largest = max(largest, _max_abs(cast(a[1].read(a[0], name, box), spec_a.dtype, "F64").view("<f8")))
    return TensorComparison(
        name=full_name,
        is_equal=n_different == 0,
        dtypes=(spec_a.dtype, spec_b.dtype),
        n_elements=n_elements,
        n_different=n_different,
        max_abs_diff=max_abs,
        relative_diff=max_abs / largest if largest else max_abs,
    )


def _bytes_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Compare bytes, eight at a time."""
    n = left.size // 8 * 8
    return bool((left[:n].view("<u8") == right[:n].view("<u8")).all() and (left[n:] == right[n:]).all())


def _max_abs(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


def config_differences(a: Source, b: Source) -> Iterator[str]:
    """Yield the configuration fields in which two sources differ, as text; nothing if one has no config."""
    if a.config is None or b.config is None:
        return
    left, right = (config_from_hf(dict(s.config or {}), source=f"{s.path}: config").to_dict() for s in (a, b))
    for name, value in left.items():
        if value != right.get(name):
            yield f"configuration: {name} is {value!r}, in {b.path} {right.get(name)!r}"


def find_replica_mismatches(source: Source, *, progress: ProgressCallback | None = None) -> Iterator[str]:
    """Yield each replica of a box that differs from the first one; nothing when all are equal.

    Formats replicate norms on every rank and repeat key and value heads; a reader takes the first replica.
    """
    total = sum(
        int(np.prod(replica.shape, dtype=np.int64)) * item_bytes(group.specs[name].dtype)
        for group in source.groups.values()
        for name, replicas in group.replicas.items()
        for replica in replicas
    )
    count_bytes = ByteCounter(total, progress)
    with TensorReader(source.root) as reader:
        for group in source.groups.values():
            for name, replicas in group.replicas.items():
                for replica in replicas:
                    for offset, shape in split_rows(replica.shape, BLOCK_BYTES // item_bytes(group.specs[name].dtype)):
                        box = tuple(o + c for o, c in zip(offset, replica.offset, strict=True)), shape
                        first = reader.read(group, name, box)
                        count_bytes(first.size)
                        if (
                            reader.read_locations(group.specs, {name: (replica,)}, name, box, str(source.path)) != first
                        ).any():
                            yield f"{replica.file}: its replica of {name} differs from that of the first rank"
                            break
