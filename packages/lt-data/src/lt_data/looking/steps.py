"""How many steps an epoch of a pack has, with what is left over, exactly.

Rows are never dropped: what does not fill a batch at the end of an epoch is read first in the next one. So an epoch has
a whole number of steps only where the batch divides the rows. In a pack of buckets each length is counted by itself: a
batch of B rows of the longest is one of 2B rows of half its length, and so on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from lt_data.errors import DataError
from lt_data.packing.packs import PackIndex


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """The steps of one epoch.

    Attributes:
        seq_len: tokens in a row.
        rows: rows of that length in the pack.
        global_batch: rows of that length in a step, over all ranks.
        dp_size: data-parallel ranks.
        steps: whole steps in the rows.
        remainder: rows that are left over, less than a batch: rows = steps x global_batch + remainder.
    """

    seq_len: int
    rows: int
    global_batch: int
    dp_size: int
    steps: int
    remainder: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank in a step."""
        return self.global_batch // self.dp_size

    @property
    def tokens_per_step(self) -> int:
        """Positions in a step, padding included."""
        return self.global_batch * self.seq_len

    @property
    def exact(self) -> Fraction:
        """Steps in an epoch as a fraction."""
        return Fraction(self.rows, self.global_batch)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        more = {"rows_per_rank": self.rows_per_rank, "tokens_per_step": self.tokens_per_step}
        return {**asdict(self), **more, "exact": str(self.exact)}


def steps_per_epoch(pack: PackIndex, *, global_batch: int, dp_size: int = 1) -> tuple[EpochSteps, ...]:
    """The steps of an epoch over a pack.

    Args:
        pack: its rows; of a pack of buckets, each length of rows gives one result.
        global_batch: rows in a step, over all ranks; of a pack of buckets, rows of the longest.
        dp_size: data-parallel ranks that share them.

    Raises:
        DataError: the batch cannot be divided.
    """
    if global_batch < 1 or dp_size < 1 or global_batch % dp_size:
        raise DataError(
            f"global_batch={global_batch} over dp_size={dp_size} ranks: give a multiple of the ranks, so that all "
            "have the same number of rows"
        )
    kinds: Sequence[tuple[int, int]] = pack.buckets or ((pack.seq_len, pack.n_rows),)
    return tuple(
        EpochSteps(
            seq_len=seq_len,
            rows=rows,
            global_batch=batch,
            dp_size=dp_size,
            steps=rows // batch,
            remainder=rows % batch,
        )
        for seq_len, rows in kinds
        for batch in (global_batch * (pack.seq_len // seq_len),)
    )
