"""Tensor-by-tensor comparison of two models in any formats: bit-exact equality or distance.

Both are read in the same blocks of rows, so memory is a few blocks. Values of different dtypes are compared in float64;
a value and its exact equivalent in another dtype are equal, as after a lossless cast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.files import ProgressCallback
from lt_ckpt.parallel import ByteCounter
from lt_ckpt.shards import split_rows
from lt_ckpt.source import Source, TensorGroup

BLOCK_BYTES = 4 * 2**20


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
    """

    name: str
    is_equal: bool
    problem: str = ""
    dtypes: tuple[str, str] = ("", "")
    n_elements: int = 0
    n_different: int = 0
    max_abs_diff: float = 0.0


def compare(a: Source, b: Source, *, progress: ProgressCallback | None = None) -> Iterator[TensorComparison]:
    """Compare the tensors of all groups of either source, in the first one's order.

    Raises:
        CheckpointError: A file cannot be read.
    """
    kinds = [*a.groups, *(kind for kind in b.groups if kind not in a.groups)]
    total = sum(spec.n_bytes for group in a.groups.values() for spec in group.specs.values())
    count_bytes = ByteCounter(total, progress)
    empty = TensorGroup(specs={}, locations={})
    for kind in kinds:
        left, right = a.groups.get(kind, empty), b.groups.get(kind, empty)
        for name in [*left.specs, *(name for name in right.specs if name not in left.specs)]:
            yield _compare(kind, name, a, b, count_bytes)


def _compare(kind: str, name: str, a: Source, b: Source, count_bytes: ByteCounter) -> TensorComparison:
    full_name = name if kind == "weights" else f"{kind}/{name}"
    for source in (a, b):
        if kind not in source.groups or name not in source.groups[kind].specs:
            return TensorComparison(name=full_name, is_equal=False, problem=f"not in {source.path}")
    spec_a, spec_b = a.groups[kind].specs[name], b.groups[kind].specs[name]
    if spec_a.shape != spec_b.shape:
        return TensorComparison(
            name=full_name, is_equal=False, problem=f"shapes {list(spec_a.shape)} and {list(spec_b.shape)}"
        )
    n_different, max_abs = 0, 0.0
    width = max(item_bytes(spec_a.dtype), item_bytes(spec_b.dtype))
    for box in split_rows(spec_a.shape, BLOCK_BYTES // width):
        left, right = (source.read(name, box, group=kind) for source in (a, b))
        count_bytes(left.size)
        if spec_a.dtype == spec_b.dtype and np.array_equal(left, right):
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
    return TensorComparison(
        name=full_name,
        is_equal=n_different == 0,
        dtypes=(spec_a.dtype, spec_b.dtype),
        n_elements=prod(spec_a.shape),
        n_different=n_different,
        max_abs_diff=max_abs,
    )


def find_replica_mismatches(source: Source, *, progress: ProgressCallback | None = None) -> Iterator[str]:
    """Yield each replica of a box that differs from the first one; nothing when all are equal.

    Formats replicate norms on every rank and repeat key and value heads; a reader takes the first replica.
    """
    repeated = [
        (group, name, replica)
        for group in source.groups.values()
        for name, replicas in group.replicas.items()
        for replica in replicas
    ]
    total = sum(prod(replica.shape) * item_bytes(group.specs[name].dtype) for group, name, replica in repeated)
    count_bytes = ByteCounter(total, progress)
    for group, name, replica in repeated:
        spec = group.specs[name]
        for offset, shape in split_rows(replica.shape, BLOCK_BYTES // item_bytes(spec.dtype)):
            box = tuple(o + c for o, c in zip(offset, replica.offset, strict=True)), shape
            first = source.read_slices(group.locations[name], spec, box, name)
            count_bytes(first.size)
            if not np.array_equal(source.read_slices((replica,), spec, box, name), first):
                yield f"{replica.file}: its replica of {name} differs from that of the first rank"
                break
