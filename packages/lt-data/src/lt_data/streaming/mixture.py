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
from dataclasses import replace
from typing import cast

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.interleave import Weight
from lt_data.streaming.phases import Phase, PhasedSchedule
from lt_data.streaming.rows import RowReader, Rows, TokenRows
from lt_data.streaming.shuffle import shuffle_positions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Mixture:
    """Rows of several sources in one sequence; row indices count through the sources in the given order.

    Args:
        sources: readers by name (letters, digits, `_`, `.`, `-`), all of one tokenizer and row length.
        weights: weight of each source in rows, for the whole sequence; or phases, the first from row 0.
        max_epochs: maximum epochs by source name; unlimited without an entry.

    Attributes:
        sources: as given.
        names: names of the sources, in order.

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
        self.names = tuple(sources)
        self._readers = tuple(sources.values())
        self._max_epochs = dict(max_epochs or {})
        self._check_sources()
        phases = (Phase(weights=weights),) if isinstance(weights, Mapping) else tuple(weights)
        self._schedule = PhasedSchedule(self.names, phases)
        self._boundaries = np.cumsum([0, *(reader.n_rows for reader in self._readers)], dtype=np.int64)

    @property
    def n_rows(self) -> int:
        """Total rows of all sources."""
        return int(self._boundaries[-1])

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self._readers[0].seq_len

    @property
    def shares(self) -> list[dict[str, int]]:
        """Quantized weights of each phase, by source."""
        return self._schedule.shares

    def counts(self, position: int) -> dict[str, int]:
        """Return the rows of each source before a position."""
        return self._schedule.counts(position)

    def epochs(self, position: int) -> dict[str, float]:
        """Return the epochs of each source before a position."""
        return {name: count / self.sources[name].n_rows for name, count in self.counts(position).items()}

    def fingerprint_at(self, position: int) -> str:
        """Return the fingerprint of the sequence up to a position, in words."""
        active = self._schedule.active_sources(position)
        words = [
            f"{name}.{part}"
            for name, reader in self.sources.items()
            if name in active
            for part in reader.fingerprint.split()
        ]
        return " ".join([*words, *self._schedule.fingerprint_words(position)])

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices at `count` positions of the endless sequence (int64 [count]).

        Raises:
            DataError: a source would be read more often than `max_epochs` allows.
        """
        source, number = self._schedule.lookup(position, count)
        rows = np.empty(count, np.int64)
        for j in sorted(set(source.tolist())):
            places = np.flatnonzero(source == j)
            self._check_epochs(j, int(number[places[-1]]))
            key = f"{seed}/{self.names[j]}" if shuffle else None
            rows[places] = shuffle_positions(number[places], self._readers[j].n_rows, key) + self._boundaries[j]
        return rows

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epoch of its source, from 0, of each row that `rows_at` returns (int64)."""
        source, number = self._schedule.lookup(position, count)
        return number // np.array([reader.n_rows for reader in self._readers])[source]

    def locate(self, row: int) -> tuple[RowReader, int]:
        """Return the reader of a row, and its row index there."""
        j = int(self._source_indices(np.array([row]))[0])
        return self._readers[j], row - int(self._boundaries[j])

    def source_names(self, rows: np.ndarray) -> list[str]:
        """Return the source of each row."""
        return [self.names[j] for j in self._source_indices(rows).tolist()]

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels in some rows."""
        source = self._source_indices(rows)
        return sum(self._readers[j].count_labels(rows[source == j] - self._boundaries[j]) for j in set(source.tolist()))

    def read_rows(self, rows: np.ndarray) -> Rows:
        """Read the given rows (integers [n], repeats allowed), in this order, as int32 arrays."""
        return self.read_token_rows(rows).to_int32()

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Read the given rows (integers [n], repeats allowed), in this order, in the store's dtype."""
        rows = np.asarray(rows, np.int64)
        source = self._source_indices(rows)
        parts: list[TokenRows] = []
        places: list[np.ndarray] = []
        for j in sorted(set(source.tolist())):
            places.append(np.flatnonzero(source == j))
            parts.append(self._readers[j].read_token_rows(rows[places[-1]] - self._boundaries[j]))
        max_segments = max(reader.max_segments_per_row for reader in self._readers)
        if len(parts) == 1:
            return replace(parts[0], max_segments_per_row=max_segments)
        if not parts:
            return self._readers[0].read_token_rows(rows)
        input_ids = np.empty((rows.size, self.seq_len), parts[0].input_ids.dtype)
        for place, part in zip(places, parts, strict=True):
            input_ids[place] = part.input_ids
        row = np.concatenate([place[part.slice_row] for place, part in zip(places, parts, strict=True)])
        order = np.argsort(row, kind="stable")

        def concat(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])[order]

        local = np.concatenate([part.slice_begin - part.slice_row * self.seq_len for part in parts])
        return TokenRows(
            input_ids=input_ids,
            slice_row=row[order],
            slice_begin=(row * self.seq_len + local)[order],
            slice_length=concat("slice_length"),
            next_ids=concat("next_ids"),
            has_next=concat("has_next"),
            document_mask=parts[0].document_mask,
            max_segments_per_row=max_segments,
        )

    def _source_indices(self, rows: np.ndarray) -> np.ndarray:
        if rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows):
            raise IndexError(f"rows must be in 0..{self.n_rows - 1}")
        return np.searchsorted(self._boundaries, rows, side="right") - 1

    def _check_epochs(self, j: int, number: int) -> None:
        name, n_rows = self.names[j], self._readers[j].n_rows
        limit = self._max_epochs.get(name)
        if limit is not None and number >= limit * n_rows:
            raise DataError(
                f"source {name}: its {n_rows} rows were read {limit} times, its max_epochs; give it a lower weight, a "
                "phase without it, or a higher max_epochs"
            )

    def _check_sources(self) -> None:
        if not self.sources:
            raise DataError("a mixture needs at least one source")
        for name, reader in self.sources.items():
            if not _NAME.fullmatch(name):
                raise DataError(f"source {name!r}: use letters, digits, '_', '.' and '-'")
            if not reader.n_rows:
                raise DataError(f"source {name}: the pack of {reader.store.path} has no rows; leave it out")
        first_name, first = next(iter(self.sources.items()))
        for name, reader in self.sources.items():
            for label, value_of in _SHARED_PROPERTIES.items():
                if value_of(reader) != value_of(first):
                    raise DataError(
                        f"sources {first_name} and {name}: different {label} ({value_of(first)} and "
                        f"{value_of(reader)}); make them equal"
                    )
        for name, limit in self._max_epochs.items():
            if name not in self.sources:
                raise DataError(f"max_epochs: no source {name!r}; the sources are {', '.join(self.names)}")
            if type(limit) is not int or limit < 1:
                raise DataError(f"max_epochs of {name}: {limit!r}; give an integer, 1 or more")


_SHARED_PROPERTIES = {
    "row length": lambda reader: cast(RowReader, reader).seq_len,
    "tokenizer": lambda reader: cast(RowReader, reader).store.manifest.tokenizer.sha256[:16],
    "type of ids": lambda reader: str(cast(RowReader, reader).store.dtype),
    "document_mask": lambda reader: cast(RowReader, reader).document_mask,
}
