"""Token blocks without document boundaries (Litespark), and their splitting into documents.

Such a format concatenates its documents, so an import needs a rule: a document begins at each BOS, after each EOS, at
each row, or at each file. Memory: one document.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

BoundaryKind = Literal["bos", "eos", "rows", "files"]
_CHUNK_IDS = 1 << 22  # ids searched for boundaries at a time


@dataclass(frozen=True, kw_only=True)
class BoundaryRule:
    """Rule for document boundaries: `marker_id` for kinds `bos` and `eos`, `row_tokens` for `rows`."""

    kind: BoundaryKind
    marker_id: int = -1
    row_tokens: int = 0


def split_documents(
    blocks: Iterable[tuple[np.ndarray, str]], rule: BoundaryRule, *, continued: bool
) -> Iterator[tuple[np.ndarray, str]]:
    """Split blocks into documents.

    Args:
        blocks: the ids of each file (integers [n]), and its path.
        rule: where documents begin.
        continued: whether the last document of a file goes on in the next one (unless each file is a document).

    Yields:
        The ids of a document, and the file and position at which it begins.
    """
    step = _CHUNK_IDS if rule.kind != "rows" else max(1, _CHUNK_IDS // rule.row_tokens) * rule.row_tokens
    parts: list[np.ndarray] = []
    source = ""
    for block, path in blocks:
        if parts and (rule.kind == "files" or not continued):
            yield _join(parts), source
            parts = []
        for begin in range(0, block.size, step):
            ids = block[begin : begin + step]
            boundaries = _find_boundaries(ids, rule)
            for number, (first, last) in enumerate(pairwise([0, *boundaries, ids.size])):
                if last > first:
                    source = source if parts else f"{path} from id {begin + first}"
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
