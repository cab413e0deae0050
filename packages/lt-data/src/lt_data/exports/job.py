"""One export at work: the store, what is asked for, and the numbers that follow before anything is written."""

from dataclasses import dataclass
from functools import cached_property

from lt_data.errors import DataError
from lt_data.exports.options import ExportOptions
from lt_data.packing.packs import FILE_NAME, PackIndex, build_index, open_pack
from lt_data.progress import Progress, silent
from lt_data.store.manifest import PACK_FOLDER
from lt_data.store.token_store import TokenStore
from lt_data.streaming.rows import RowReader


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a format's writer wrote, see `lt_data.exports.options.ExportReport`."""

    samples: int
    tokens: int
    padding: int = 0
    lost_labels: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A store and how it is written.

    Attributes:
        store: the tokens.
        options: what is asked for.
        progress: told of the tokens written.
    """

    store: TokenStore
    options: ExportOptions
    progress: Progress = silent

    @cached_property
    def rows(self) -> RowReader:
        """The rows of the pack: the one in the store where it was made before, else made here and not kept."""
        seq_len, mode = self.options.seq_len, self.options.pack
        assert seq_len is not None
        if (self.store.path / PACK_FOLDER / f"{mode}-{seq_len}" / FILE_NAME).exists():
            return RowReader(self.store, open_pack(self.store, seq_len=seq_len, mode=mode))
        fingerprint = self.store.manifest.fingerprint
        pack: PackIndex = build_index(self.store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=fingerprint)
        return RowReader(self.store, pack)

    @cached_property
    def n_rows(self) -> int:
        """Rows to write.

        Raises:
            DataError: none, because the one there is, is to be dropped.
        """
        rows = self.rows.n_rows
        return self._kept(rows, self.store.n_tokens == rows * self.rows.seq_len)

    @cached_property
    def n_blocks(self) -> int:
        """Blocks of seq_len + 1 tokens to write; errors as for `n_rows`."""
        blocks = -(-self.store.n_tokens // self.block)
        return self._kept(blocks, self.store.n_tokens == blocks * self.block)

    @property
    def block(self) -> int:
        """Tokens in a block."""
        assert self.options.seq_len is not None
        return self.options.seq_len + 1

    @cached_property
    def pad_id(self) -> int:
        """The id of padding.

        Raises:
            DataError: the id given is not in the vocabulary.
        """
        given = self.options.pad_id
        if given is None:
            tokenizer = self.store.tokenizer()
            return next((found for found in (tokenizer.pad_id, tokenizer.eos_id) if found is not None), 0)
        if not 0 <= given < self.store.vocab_size:
            raise DataError(f"pad_id={given}: the ids of this store are 0 to {self.store.vocab_size - 1}")
        return given

    def _kept(self, rows: int, full: bool) -> int:
        if self.options.last_row == "pad" or full:
            return rows
        if rows == 1:
            raise DataError(f"last_row=drop: {self.store.n_tokens} tokens do not fill one row; nothing would be left")
        return rows - 1
