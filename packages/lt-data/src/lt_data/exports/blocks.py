"""Runs of tokens without borders (Litespark, LITPKDS) and how documents are made of them again.

Such a format joined its documents, so whoever imports it says where one begins: at each BOS, after each EOS, at each
row, or at each file. A document goes on into the next file where the two belong together. Memory: one document.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

Borders = Literal["bos", "eos", "rows", "files"]
_PART = 1 << 22  # ids searched for borders at a time


@dataclass(frozen=True, eq=False)
class Chunk:
    """The ids of one file (integers [n]), its path, and a name that files have in common which belong together."""

    ids: np.ndarray
    source: str
    series: str


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where documents begin: `marker` is the id that `bos` or `eos` looks for, `row` the ids in a row."""

    borders: Borders
    marker: int = -1
    row: int = 0


def numbered(files: Iterable[Path]) -> list[Path]:
    """Files in the order of their names."""
    return sorted(files, key=lambda file: file.name)


def documents(chunks: Iterable[Chunk], cut: Cut) -> Iterator[tuple[np.ndarray, str]]:
    """Cut chunks into documents.

    Yields:
        The ids of a document, and the file and the position in it where it begins.
    """
    step = _PART if cut.borders != "rows" else max(1, _PART // cut.row) * cut.row
    parts: list[np.ndarray] = []
    begun = series = ""
    for chunk in chunks:
        if parts and (cut.borders == "files" or chunk.series != series):
            yield _joined(parts), begun
            parts = []
        series = chunk.series
        for begin in range(0, chunk.ids.size, step):
            ids = chunk.ids[begin : begin + step]
            borders = _borders(ids, cut)
            for number, (first, last) in enumerate(pairwise([0, *borders, ids.size])):
                if last > first:
                    begun = begun if parts else f"{chunk.source} from id {begin + first}"
                    parts.append(ids[first:last])
                if parts and number < len(borders):
                    yield _joined(parts), begun
                    parts = []
    if parts:
        yield _joined(parts), begun


def _borders(ids: np.ndarray, cut: Cut) -> list[int]:
    """Positions in `ids` (0 to their number) before which a document ends."""
    if cut.borders == "bos":
        return np.flatnonzero(ids == cut.marker).tolist()
    if cut.borders == "eos":
        return (np.flatnonzero(ids == cut.marker) + 1).tolist()
    if cut.borders == "rows":
        return list(range(cut.row, ids.size + 1, cut.row))
    return []


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
