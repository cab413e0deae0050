"""A weighted mixture: one endless sequence of rows out of several packs, with weights that change at given rows.

Whose row stands at position p is a closed form of p and the weights (lt_data.streaming.apportion): within a phase,
after any number of rows, each source has given its share of them, less than one row more or less. Each source is read
in its own order, epoch after epoch, shuffled by a key that its name is part of; its epochs end where its own rows do.

The fingerprint of a position holds the weights of the phases that began before it, and no others: the weights ahead may
be changed in a run that goes on, those that were read may not.

Cost: nothing is held but one period of turns per phase, at most 10,000.
"""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.apportion import Weight
from lt_data.streaming.order import shuffled_rows
from lt_data.streaming.phases import Phase, PhasedTurns
from lt_data.streaming.rows import RowReader, Rows, TokenRows

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Mixture:
    """Rows of several sources in one sequence. A row's number counts through the sources in their given order.

    Args:
        sources: readers by name (letters, digits, `_`, `.`, `-`), all of one tokenizer and row length.
        weights: of each source in rows, for the whole sequence; or phases, the first from row 0.
        max_epochs: how often a source may be read, by name; without an entry as often as needed.

    Attributes:
        sources: as given.
        names: of the sources, in their order.

    Raises:
        DataError: a name, a weight or a phase is wrong, or the sources do not fit together.
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
        self._turns = PhasedTurns(self.names, phases)
        self._borders = np.cumsum([0, *(reader.n_rows for reader in self._readers)], dtype=np.int64)

    @property
    def n_rows(self) -> int:
        """Rows of all sources together."""
        return int(self._borders[-1])

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self._readers[0].seq_len

    @property
    def shares(self) -> list[dict[str, int]]:
        """The parts of each source in each phase, as whole numbers: what the weights were rounded to."""
        return self._turns.shares

    def counts(self, position: int) -> dict[str, int]:
        """How many of the rows before a position each source gives."""
        return self._turns.counts(position)

    def epochs(self, position: int) -> dict[str, float]:
        """How often each source was read before a position."""
        return {name: count / self.sources[name].n_rows for name, count in self.counts(position).items()}

    def fingerprint_at(self, position: int) -> str:
        """What the sequence up to a position is made of, in words."""
        used = self._turns.used(position)
        words = [
            f"{name}.{part}"
            for name, reader in self.sources.items()
            if name in used
            for part in reader.fingerprint.split()
        ]
        return " ".join([*words, *self._turns.words(position)])

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Numbers of the rows at some positions of the endless sequence (int64 [count]).

        Raises:
            DataError: a source would be read more often than `max_epochs` allows.
        """
        source, number = self._turns.at(position, count)
        rows = np.empty(count, np.int64)
        for j in sorted(set(source.tolist())):
            places = np.flatnonzero(source == j)
            self._check_epochs(j, int(number[places[-1]]))
            key = f"{seed}/{self.names[j]}" if shuffle else None
            rows[places] = shuffled_rows(number[places], self._readers[j].n_rows, key) + self._borders[j]
        return rows

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Which pass over its source each of the rows that `rows_at` gives belongs to, from 0 (int64)."""
        source, number = self._turns.at(position, count)
        return number // np.array([reader.n_rows for reader in self._readers])[source]

    def locate(self, row: int) -> tuple[RowReader, int]:
        """The reader that has a row, and its number there."""
        j = int(self._source_of(np.array([row]))[0])
        return self._readers[j], row - int(self._borders[j])

    def source_names(self, rows: np.ndarray) -> list[str]:
        """The source of each of some rows."""
        return [self.names[j] for j in self._source_of(rows).tolist()]

    def labels_in(self, rows: np.ndarray) -> int:
        """Positions with a label in some rows together."""
        source = self._source_of(rows)
        return sum(self._readers[j].labels_in(rows[source == j] - self._borders[j]) for j in set(source.tolist()))

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows of these numbers (integers [n], repeats allowed), in this order, as int32 arrays."""
        return self.compact(rows).widen()

    def compact(self, rows: np.ndarray) -> TokenRows:
        """The rows of these numbers (integers [n], repeats allowed), in this order, as the store holds them."""
        rows = np.asarray(rows, np.int64)
        source = self._source_of(rows)
        parts: list[TokenRows] = []
        places: list[np.ndarray] = []
        for j in sorted(set(source.tolist())):
            places.append(np.flatnonzero(source == j))
            parts.append(self._readers[j].compact(rows[places[-1]] - self._borders[j]))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._readers[0].compact(rows)
        input_ids = np.empty((rows.size, self.seq_len), parts[0].input_ids.dtype)
        for place, part in zip(places, parts, strict=True):
            input_ids[place] = part.input_ids
        row = np.concatenate([place[part.slice_row] for place, part in zip(places, parts, strict=True)])
        order = np.argsort(row, kind="stable")

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])[order]

        local = np.concatenate([part.slice_begin - part.slice_row * self.seq_len for part in parts])
        return TokenRows(
            input_ids=input_ids,
            slice_row=row[order],
            slice_begin=(row * self.seq_len + local)[order],
            slice_length=joined("slice_length"),
            next_ids=joined("next_ids"),
            has_next=joined("has_next"),
            document_mask=parts[0].document_mask,
        )

    def _source_of(self, rows: np.ndarray) -> np.ndarray:
        if rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows):
            raise IndexError(f"rows must be in 0..{self.n_rows - 1}")
        return np.searchsorted(self._borders, rows, side="right") - 1

    def _check_epochs(self, j: int, number: int) -> None:
        name, n_rows = self.names[j], self._readers[j].n_rows
        most = self._max_epochs.get(name)
        if most is not None and number >= most * n_rows:
            raise DataError(
                f"source {name}: its {n_rows} rows were read {most} times, which is its max_epochs; give it a lower "
                "weight, a phase without it, or a higher max_epochs"
            )

    def _check_sources(self) -> None:
        if not self.sources:
            raise DataError("a mixture needs a source")
        for name, reader in self.sources.items():
            if not _NAME.fullmatch(name):
                raise DataError(f"source {name!r}: a name is made of letters, digits, '_', '.' and '-'")
            if not reader.n_rows:
                raise DataError(f"source {name}: the pack of {reader.store.path} has no rows; leave it out")
        first_name, first = next(iter(self.sources.items()))
        for name, reader in self.sources.items():
            for what, of in _COMMON.items():
                if of(reader) != of(first):
                    raise DataError(
                        f"sources {first_name} and {name} differ in their {what} ({of(first)} and {of(reader)}); make "
                        "them alike"
                    )
        for name, most in self._max_epochs.items():
            if name not in self.sources:
                raise DataError(f"max_epochs: no source {name!r}; the sources are {', '.join(self.names)}")
            if type(most) is not int or most < 1:
                raise DataError(f"max_epochs of {name}: {most!r}; give a whole number, 1 or more")


_COMMON = {
    "row length": lambda reader: cast(RowReader, reader).seq_len,
    "tokenizer": lambda reader: cast(RowReader, reader).store.manifest.tokenizer.sha256[:16],
    "type of ids": lambda reader: str(cast(RowReader, reader).store.dtype),
    "document_mask": lambda reader: cast(RowReader, reader).document_mask,
}
