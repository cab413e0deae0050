"""Token blocks without document boundaries (Litespark, LITPKDS), and their splitting into documents.

Such a format concatenates its documents, so an import needs a rule: a document begins at each BOS, after each EOS, at
each row, or at each file. Documents continue across files of the same series. Memory: one document.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

BoundaryKind = Literal["bos", "eos", "rows", "files"]
_CHUNK_IDS = 1 << 22  # ids searched for boundaries at a time


@dataclass(frozen=True, eq=False)
class TokenBlock:
    """Ids of one file (integers [n]), its path, and the name of its series of files."""

    ids: np.ndarray
    source: str
    series: str


@dataclass(frozen=True, kw_only=True)
class BoundaryRule:
    """Rule for document boundaries: `marker_id` for kinds `bos` and `eos`, `row_tokens` for `rows`."""

    kind: BoundaryKind
    marker_id: int = -1
    row_tokens: int = 0


def sort_by_name(files: Iterable[Path]) -> list[Path]:
    """Return the files sorted by name."""
    return sorted(files, key=lambda file: file.name)


def split_documents(blocks: Iterable[TokenBlock], rule: BoundaryRule) -> Iterator[tuple[np.ndarray, str]]:
    """Split blocks into documents.

    Yields:
        The ids of a document, and the file and position at which it begins.
    """
    step = _CHUNK_IDS if rule.kind != "rows" else max(1, _CHUNK_IDS // rule.row_tokens) * rule.row_tokens
    parts: list[np.ndarray] = []
    source = series = ""
    for block in blocks:
        if parts and (rule.kind == "files" or block.series != series):
            yield _join(parts), source
            parts = []
        series = block.series
        for begin in range(0, block.ids.size, step):
            ids = block.ids[begin : begin + step]
            boundaries = _find_boundaries(ids, rule)
            for number, (first, last) in enumerate(pairwise([0, *boundaries, ids.size])):
                if last > first:
                    source = source if parts else f"{block.source} from id {begin + first}"
                    parts.append(ids[first:last])
                if parts and number < len(boundaries):
                    yield _join(parts), source
                    parts = []
    if parts:
        yield _join(parts), source


def _find_boundaries(ids: np.ndarray, rule: BoundaryRule) -> list[int]:
    """Return the positions in `ids` (0 to their number) before which a document ends."""
    if rule.kind == "bos":
        return np.flatnonzero(ids == rule.marker_id).tolist()
    if rule.kind == "eos":
        return (np.flatnonzero(ids == rule.marker_id) + 1).tolist()
    if rule.kind == "rows":
        return list(range(rule.row_tokens, ids.size + 1, rule.row_tokens))
    return []


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
