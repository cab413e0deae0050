"""Weighted mixture: one endless sequence of rows from several packs, with weights by phase.

The source of position p is a closed form of p and the weights (lt_data.streaming.interleave): within a phase, after any
number of rows, each source has had its share of them to within one row. Each source has its own epochs, shuffled by a
key that contains its name.

The fingerprint of a position contains only the weights of the phases that began before it: a resumed run may change
later weights, not those already read.

Cost: one period of slots per phase is stored, at most 10,000.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.interleave import Phase, PhasedSchedule, Weight
from lt_data.streaming.permutation import shuffle_positions
from lt_data.streaming.rows import RowReader, Rows, TokenRows, join_rows

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Mixture:
    """Rows of several sources in one sequence; row indices count through the sources in the given order.

        >>> mixture = Mixture({"web": rows, "code": rows}, {"web": 3, "code": 1})
        >>> mixture.counts(100)
        {'web': 75, 'code': 25}

    Args:
        sources: readers by name (letters, digits, `_`, `.`, `-`), all of one tokenizer and row length.
        weights: weight of each source in rows, for the whole sequence; or phases, the first from row 0.
        max_epochs: maximum epochs by source name; unlimited without an entry.

    Attributes:
        sources: as given.

    Raises:
        DataError: an invalid name, weight or phase, or sources that differ in a property.
    """

    def __init__(
        self,
        sources: Mapping[str, RowReader],
        weights: Mapping[str, Weight] | Sequence[Phase],
        *,
        max_epochs: Mapping[str, int] | None = None,
    ) -> None:
        self.sources = dict(sources)
        self._names = tuple(sources)
        self._readers = tuple(sources.values())
        self._max_epochs = dict(max_epochs or {})
        _check_sources(self.sources, self._max_epochs)
        phases = (Phase(weights=weights),) if isinstance(weights, Mapping) else tuple(weights)
        self._schedule = PhasedSchedule(self._names, phases)
        self._boundaries = np.cumsum([0, *(reader.n_rows for reader in self._readers)], dtype=np.int64)

    @property
    def n_rows(self) -> int:
        """Total rows of all sources."""
        return int(self._boundaries[-1])

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self._readers[0].seq_len

    def counts(self, position: int) -> dict[str, int]:
        """Return the rows of each source before a position."""
        return self._schedule.counts(position)

    def fingerprint_at(self, position: int) -> dict[str, str]:
        """Return the fingerprint of the sequence up to a position."""
        phases = self._schedule.shares(position)
        active = {name for shares in phases.values() for name in shares}
        parts = {
            f"{name}.{key}": value
            for name, reader in self.sources.items()
            if name in active
            for key, value in reader.fingerprint.items()
        }
        for start, shares in phases.items():
            parts[f"weights@{start}"] = ",".join(f"{name}={part}" for name, part in shares.items())
        return parts

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices at `count` positions of the endless sequence (int64 [count]).

        Raises:
            DataError: a source would be read more often than `max_epochs` allows.
        """
        source, number = self._schedule.lookup(position, count)
        rows = np.empty(count, np.int64)
        for j in np.unique(source).tolist():
            places, name, n_rows = np.flatnonzero(source == j), self._names[j], self._readers[j].n_rows
            limit = self._max_epochs.get(name)
            if limit is not None and number[places[-1]] >= limit * n_rows:
                raise DataError(
                    f"source {name}: its {n_rows} rows were read {limit} times, its max_epochs; give it a lower "
                    "weight, a phase without it, or a higher max_epochs"
                )
            key = f"{seed}/{name}" if shuffle else None
            rows[places] = shuffle_positions(number[places], n_rows, key) + self._boundaries[j]
        return rows

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epoch of its source, from 0, of each row that `rows_at` returns (int64)."""
        source, number = self._schedule.lookup(position, count)
        return number // np.diff(self._boundaries)[source]

    def locate(self, row: int) -> tuple[str, RowReader, int]:
        """Return the source of a row, its reader, and the row index there."""
        j = int(self._source_indices(np.array([row]))[0])
        return self._names[j], self._readers[j], row - int(self._boundaries[j])

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels in some rows."""
        source = self._source_indices(rows)
        return sum(
            self._readers[j].count_labels(rows[source == j] - self._boundaries[j]) for j in np.unique(source).tolist()
        )

    def read_rows(self, rows: np.ndarray) -> Rows:
        """Read the given rows (integers [n], repeats allowed), in this order, as int32 arrays."""
        return self.read_token_rows(rows).to_int32()

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Read the given rows (integers [n], repeats allowed), in this order, in the store's dtype.

        The bound on the segments of a row is that of all sources, whichever a batch has rows of.
        """
        rows = np.asarray(rows, np.int64)
        source = self._source_indices(rows)
        places = [np.flatnonzero(source == j) for j in range(len(self._readers))]
        parts = [
            reader.read_token_rows(rows[place] - first)
            for reader, place, first in zip(self._readers, places, self._boundaries[:-1], strict=True)
        ]
        return join_rows(parts, places)

    def _source_indices(self, rows: np.ndarray) -> np.ndarray:
        if rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows):
            raise IndexError(f"rows must be in 0..{self.n_rows - 1}")
        return np.searchsorted(self._boundaries, rows, side="right") - 1


def _check_sources(sources: Mapping[str, RowReader], max_epochs: Mapping[str, int]) -> None:
    if not sources:
        raise DataError("a mixture needs at least one source")
    shared: dict[str, tuple[str, object]] = {}
    for name, reader in sources.items():
        if not _NAME.fullmatch(name):
            raise DataError(f"source {name!r}: use letters, digits, '_', '.' and '-'")
        if not reader.n_rows:
            raise DataError(f"source {name}: the pack of {reader.store.path} has no rows; leave it out")
        properties = {
            "row length": reader.seq_len,
            "tokenizer": reader.store.manifest.tokenizer.sha256[:16],
            "type of ids": str(reader.store.dtype),
            "document_mask": reader.document_mask,
        }
        for label, value in properties.items():
            first, expected = shared.setdefault(label, (name, value))
            if value != expected:
                raise DataError(
                    f"sources {first} and {name}: different {label} ({expected} and {value}); make them equal"
                )
    for name, limit in max_epochs.items():
        if name not in sources:
            raise DataError(f"max_epochs: no source {name!r}; the sources are {', '.join(sources)}")
        if type(limit) is not int or limit < 1:
            raise DataError(f"max_epochs of {name}: {limit!r}; give an integer, 1 or more")
