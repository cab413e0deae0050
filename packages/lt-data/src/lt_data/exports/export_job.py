"""Export job: a store, its export options, and the sizes that follow from them."""

from dataclasses import dataclass
from functools import cached_property

from lt_data.errors import DataError
from lt_data.exports.options import ExportOptions
from lt_data.packing.pack_header import PACK_FILE
from lt_data.packing.pack_index import PackIndex, build_index
from lt_data.packing.packs import open_pack
from lt_data.progress import Progress, no_progress
from lt_data.store.token_store import TokenStore
from lt_data.streaming.rows import RowReader


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """Result of a format's writer, see `lt_data.exports.options.ExportReport`."""

    samples: int
    tokens: int
    padding: int = 0
    dropped_labels: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportJob:
    """Store and options of an export.

    Attributes:
        store: the token store.
        options: the export options.
        progress: called with the tokens written.
    """

    store: TokenStore
    options: ExportOptions
    progress: Progress = no_progress

    @cached_property
    def row_reader(self) -> RowReader:
        """Reader of the rows of the store's pack, or of a temporary pack if the store has none."""
        seq_len, mode = self.options.seq_len, self.options.packing
        assert seq_len is not None
        if (self.store.pack_folder(f"{mode}-{seq_len}") / PACK_FILE).exists():
            return RowReader(self.store, open_pack(self.store, seq_len=seq_len, mode=mode))
        fingerprint = self.store.manifest.fingerprint
        pack: PackIndex = build_index(self.store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=fingerprint)
        return RowReader(self.store, pack)

    @cached_property
    def n_rows(self) -> int:
        """Rows to write.

        Raises:
            DataError: the only row is to be dropped.
        """
        rows = self.row_reader.n_rows
        return self._count_written(rows, self.store.n_tokens == rows * self.row_reader.seq_len)

    @cached_property
    def n_blocks(self) -> int:
        """Blocks of seq_len + 1 tokens to write; errors as for `n_rows`."""
        blocks = -(-self.store.n_tokens // self.block_tokens)
        return self._count_written(blocks, self.store.n_tokens == blocks * self.block_tokens)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        assert self.options.seq_len is not None
        return self.options.seq_len + 1

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

    def _count_written(self, rows: int, full: bool) -> int:
        if self.options.last_row == "pad" or full:
            return rows
        if rows == 1:
            raise DataError(f"last_row = 'drop': {self.store.n_tokens} tokens do not fill one row; choose last_row=pad")
        return rows - 1
