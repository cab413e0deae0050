"""Job of an export: the samples of a store in batches, the files they go to, and their totals.

A sample is a document, a row of a pack, or (Litespark) a row of seq_len + 1 tokens of the concatenated store. Memory:
one batch of about a million tokens; a longer document is a batch of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.options import ExportOptions, ExportReport
from lt_data.packing.pack_index import build_index
from lt_data.progress import Progress, no_progress
from lt_data.storage import create_file, fsync, translate_os_errors
from lt_data.store.token_store import TokenStore
from lt_data.streaming.rows import RowReader, Rows

BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class Samples:
    """Consecutive samples.

    Attributes:
        ids: their ids, one sample after the other, padding included (integers).
        lengths: ids of each sample (int64).
        mask: False in padding (bool, for each id).
        rows: the rows they are; None for documents.
    """

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    rows: Rows | None = None


@dataclass(kw_only=True)
class ExportJob:
    """Store, options and folder of an export, and the totals of what was written.

    Attributes:
        store: the token store.
        options: the export options.
        folder: where the files are made.
        progress: called with the tokens written.
        report: totals so far.
    """

    store: TokenStore
    options: ExportOptions
    folder: Path
    progress: Progress = no_progress
    report: ExportReport = field(default_factory=ExportReport)

    @cached_property
    def pad_id(self) -> int:
        """Id of padding.

        Raises:
            DataError: the given id is not in the vocabulary.
        """
        pad_id = self.options.pad_id
        if pad_id is None:
            tokenizer = self.store.tokenizer()
            return next((id_ for id_ in (tokenizer.pad_id, tokenizer.eos_id) if id_ is not None), 0)
        if not 0 <= pad_id < self.store.vocab_size:
            raise DataError(f"pad_id = {pad_id}: the ids of this store are 0 to {self.store.vocab_size - 1}")
        return pad_id

    def files(self, bytes_per_token: int, default_bytes: int) -> Iterator[tuple[int, Iterator[Samples]]]:
        """Yield number and samples of each file, of about `file_bytes` or the default of a format.

        Raises:
            DataError: the only row is to be dropped.
        """
        tokens_per_file = max(1, (self.options.file_bytes or default_bytes) // bytes_per_token)
        batch_tokens = min(BATCH_TOKENS, tokens_per_file)
        batches = self._read_documents(batch_tokens) if self.options.seq_len is None else self._read_rows(batch_tokens)
        groups = groupby(batches, key=lambda batch: (self.report.tokens + self.report.padding) // tokens_per_file)
        for number, (_, group) in enumerate(groups):
            yield number, map(self._count, group)

    def _count(self, batch: Samples) -> Samples:
        used = int(np.count_nonzero(batch.mask))
        self.report.samples += batch.lengths.size
        self.report.tokens += used
        self.report.padding += batch.mask.size - used
        self.progress(self.report.tokens, self.store.n_tokens, "tokens")
        return batch

    def _read_documents(self, batch_tokens: int) -> Iterator[Samples]:
        offsets, first = self.store.offsets, 0
        while first < self.store.n_documents:
            last = max(int(np.searchsorted(offsets, offsets[first] + batch_tokens, side="right")) - 1, first + 1)
            begin, end = offsets[[first, last]].tolist()
            yield Samples(
                self.store.tokens(begin, end - begin), np.diff(offsets[first : last + 1]), np.ones(end - begin, bool)
            )
            first = last

    def _read_rows(self, batch_tokens: int) -> Iterator[Samples]:
        mode, store, row_tokens = self.options.packing, self.store, self.options.row_tokens
        fingerprint = store.manifest.fingerprint
        pack = build_index(store.lengths, seq_len=row_tokens, mode=mode, store_fingerprint=fingerprint)
        reader, step = RowReader(store, pack), max(1, batch_tokens // row_tokens)
        n_rows = reader.n_rows - (self.options.last_row == "drop" and store.n_tokens % row_tokens > 0)
        if not n_rows:
            raise DataError(f"last_row = 'drop': {store.n_tokens} tokens do not fill one row; choose last_row = pad")
        for first in range(0, n_rows, step):
            rows = reader.read_rows(np.arange(first, min(first + step, n_rows)))
            mask = rows.doc_ids >= 0
            ids = np.where(mask, rows.input_ids, np.int32(self.pad_id))
            yield Samples(ids.reshape(-1), np.full(len(ids), row_tokens), mask.reshape(-1), rows)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Create a file and its parent folders; sync it when the block ends without an error.

        Raises:
            DataError: a file system error.
        """
        path = self.folder / name
        with translate_os_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with create_file(path) as file:
                yield file
                file.flush()
                fsync(file.fileno())
