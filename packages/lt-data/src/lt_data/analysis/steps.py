"""Exact number of steps of an epoch of a pack, with the remaining rows.

Rows are never dropped: rows that do not fill a batch at the end of an epoch begin the next one, so an epoch has a whole
number of steps only if the batch size divides the rows. In a pack of buckets each row length is counted separately: a
batch of B rows of the longest is one of 2B rows of half its length, and so on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Steps of one epoch.

    Attributes:
        seq_len: tokens in a row.
        rows: rows of that length in the pack.
        global_batch_size: rows of that length in a step, over all ranks.
        dp_size: data-parallel ranks.
        steps: whole steps of an epoch.
        remainder: remaining rows: rows = steps x global_batch_size + remainder.
    """

    seq_len: int
    rows: int
    global_batch_size: int
    dp_size: int
    steps: int
    remainder: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank in a step."""
        return self.global_batch_size // self.dp_size

    @property
    def tokens_per_step(self) -> int:
        """Positions in a step, padding included."""
        return self.global_batch_size * self.seq_len

    @property
    def exact_steps(self) -> Fraction:
        """Steps of an epoch as a fraction."""
        return Fraction(self.rows, self.global_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the steps as JSON values."""
        more = {"rows_per_rank": self.rows_per_rank, "tokens_per_step": self.tokens_per_step}
        return {**asdict(self), **more, "exact_steps": str(self.exact_steps)}


def steps_per_epoch(pack: PackIndex, *, global_batch_size: int, dp_size: int = 1) -> tuple[EpochSteps, ...]:
    """Return the steps of an epoch over a pack, for buckets one entry per row length.

    Args:
        pack: the pack.
        global_batch_size: rows in a step, over all ranks; for buckets, rows of the longest length.
        dp_size: data-parallel ranks.

    Raises:
        DataError: the batch cannot be divided.
    """
    if global_batch_size < 1 or dp_size < 1 or global_batch_size % dp_size:
        raise DataError(
            f"global_batch_size = {global_batch_size}: must be a positive multiple of dp_size = {dp_size}, so that all "
            "ranks have the same number of rows"
        )
    kinds: Sequence[tuple[int, int]] = pack.buckets or ((pack.seq_len, pack.n_rows),)
    return tuple(
        EpochSteps(
            seq_len=seq_len,
            rows=rows,
            global_batch_size=batch,
            dp_size=dp_size,
            steps=rows // batch,
            remainder=rows % batch,
        )
        for seq_len, rows in kinds
        for batch in (global_batch_size * (pack.seq_len // seq_len),)
    )
