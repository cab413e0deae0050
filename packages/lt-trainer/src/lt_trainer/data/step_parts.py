"""A step of a stream in parts: its rows are read as its micro-batches are needed.

A part has whole micro-batches of at most `PART_POSITIONS` positions, or a single one. The first part is read with the
step, so by the thread that prefetches steps; a step of ordinary size has no other. Each further one is read by a thread
of its own while the one before it is used. The number of labels is known from the packs.

Cost: 8 bytes per row, the first part and, in passing, two more; a thread per step of several parts.

Shapes: M micro-batches, B rows per micro-batch, T positions per row.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from lt_data.streaming.stream import StreamBatch
from lt_trainer.data.training_data import to_micro_batches
from lt_trainer.engine import StepBatch

PART_POSITIONS = 2**20
"""Most positions of a part: 16 MiB of int32 arrays."""
PARTS_IN_PASSING = 2
"""Parts after the first that are held at once: the one in use and the next."""


class StreamStep:
    """Step of a stream; `lt_trainer.engine.StepParts`.

    Args:
        batch: this rank's rows, by micro-batch.
        micro_batch_size: B.
        read_ahead: read a part while the one before it is used.
    """

    def __init__(self, batch: StreamBatch, micro_batch_size: int, *, read_ahead: bool) -> None:
        self._batch, self._micro_batch_size, self._read_ahead = batch, micro_batch_size, read_ahead
        self._part_rows = rows_per_part(micro_batch_size, batch.reader.seq_len)
        self._squared_lengths: dict[int, int] = {}
        """Sum of the squares of the documents' lengths, by the first row of each part made so far."""
        self._first = self._read(0)

    @property
    def valid_tokens(self) -> int:
        """Positions with a label in the global batch."""
        return self._batch.valid_tokens

    @property
    def n_micro_batches(self) -> int:
        """M."""
        return self._batch.row_ids.size // self._micro_batch_size

    @property
    def document_length(self) -> float:
        """Length of a position's document, averaged over the positions of the parts made so far."""
        n_rows = min(self._batch.row_ids.size, len(self._squared_lengths) * self._part_rows)
        return sum(self._squared_lengths.values()) / (n_rows * self._batch.reader.seq_len)

    def parts(self) -> Iterator[StepBatch]:
        """Yield the micro-batches in order, each part when it is asked for."""
        yield self._first
        starts = range(self._part_rows, self._batch.row_ids.size, self._part_rows)
        if not self._read_ahead or not starts:
            yield from map(self._read, starts)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="lt-trainer rows") as executor:
            ahead = executor.submit(self._read, starts[0])
            for start in starts[1:]:
                part = ahead.result()
                ahead = executor.submit(self._read, start)
                yield part
            yield ahead.result()

    def _read(self, start: int) -> StepBatch:
        """Read the part that begins with a row."""
        tokens = self._batch.read(slice(start, start + self._part_rows))
        part = to_micro_batches(
            tokens.to_int32(),
            tokens.segments()[0],
            tokens.max_segments_per_row,
            micro_batch_size=self._micro_batch_size,
            valid_tokens=self._batch.valid_tokens,
        )
        self._squared_lengths[start] = part.squared_document_lengths
        return part


def rows_per_part(micro_batch_size: int, seq_len: int) -> int:
    """Return the rows of a part."""
    return max(1, PART_POSITIONS // (micro_batch_size * seq_len)) * micro_batch_size
