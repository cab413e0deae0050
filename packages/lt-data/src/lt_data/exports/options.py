"""What an export is asked for, checked before anything is opened, and what it did."""

from dataclasses import dataclass
from typing import Literal, get_args

from lt_data.errors import DataError

Format = Literal["hf", "megatron", "smp", "litespark", "litpkds", "mds"]
FORMATS: tuple[Format, ...] = get_args(Format)
RowMode = Literal["concat", "bfd"]
LastRow = Literal["pad", "drop"]
Labels = Literal["masked", "copy"]
Split = Literal["train", "validation", "test"]

_BLOCKS = ("litespark", "litpkds")  # one run of tokens, cut every seq_len + 1


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a store is written in another format.

    Attributes:
        to: the format.
        seq_len: tokens in a row. None: whole documents (hf, smp, mds), the one way of megatron. litespark and litpkds
            need it; their rows have one token more, as their trainers shift the labels.
        pack: how rows are filled: `concat`, or `bfd` (hf, smp, mds).
        last_row: what becomes of a last row that the tokens do not fill: `pad` it, or `drop` its tokens (`concat`).
        pad_id: id of padding. None: the tokenizer's PAD, else its EOS, else 0.
        labels: hf rows: `masked` gives -100 where there is nothing to predict; `copy` repeats the ids, for trainers
            that know no -100 (needs `concat` and `last_row="drop"`).
        gz: smp: whether its files are `.json.gz`.
        split: hf, litespark, litpkds: which split the export says it is.
        file_bytes: about how large a file becomes. None: the custom of the format.

    Raises:
        DataError: unknown value, or options that do not go together.
    """

    to: Format
    seq_len: int | None = None
    pack: RowMode = "concat"
    last_row: LastRow = "pad"
    pad_id: int | None = None
    labels: Labels = "masked"
    gz: bool = True
    split: Split = "train"
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        choices = {"to": FORMATS, "pack": RowMode, "last_row": LastRow, "labels": Labels, "split": Split}
        for name, kind in choices.items():
            known = kind if isinstance(kind, tuple) else get_args(kind)
            if getattr(self, name) not in known:
                raise DataError(f"{name}={getattr(self, name)!r}: one of {', '.join(known)}")
        if self.seq_len is not None and not 1 <= self.seq_len < 2**31 - 1:
            raise DataError(f"seq_len={self.seq_len}: from 1 to {2**31 - 2}")
        if self.file_bytes is not None and self.file_bytes < 1:
            raise DataError(f"file_bytes={self.file_bytes}: at least 1")
        self._check_rows()

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of the files.

        Raises:
            DataError: the options are about documents.
        """
        if self.seq_len is None:
            raise DataError("seq_len: not given, so there are no rows")
        return self.seq_len + (self.to in _BLOCKS)

    def _check_rows(self) -> None:
        if self.to in _BLOCKS and self.seq_len is None:
            raise DataError(f"to={self.to}: its rows have a fixed length; give seq_len (--seq-len)")
        if self.to == "megatron" and self.seq_len is not None:
            raise DataError("seq_len: Megatron cuts rows itself and megatron keeps documents; leave it out")
        if self.seq_len is None and (self.pack, self.last_row, self.labels) != ("concat", "pad", "masked"):
            raise DataError("pack, last_row and labels are about rows: give seq_len too (--seq-len)")
        if self.pack == "bfd" and self.to in _BLOCKS:
            raise DataError(f"pack=bfd: {self.to} is one run of tokens without a mask; choose concat")
        if self.pack == "bfd" and self.last_row == "drop":
            raise DataError("last_row=drop: rows of pack=bfd are padded wherever documents left room; choose pad")
        if self.labels == "copy":
            if self.to != "hf":
                raise DataError(f"labels=copy: {self.to} has no labels; leave it out")
            if (self.pack, self.last_row) != ("concat", "drop"):
                raise DataError(
                    "labels=copy would train on padding: it needs pack=concat and last_row=drop (--last-row drop)"
                )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export holds. `tokens` + `dropped_tokens` are those of the store.

    Attributes:
        to: the format.
        files: number of files.
        bytes: in all of them.
        samples: documents or rows (of one token more than `seq_len` in litespark and litpkds).
        tokens: of the store that are in it.
        padding: other positions.
        dropped_tokens: left out with the last row, on request.
        lost_labels: hf: tokens that the store would predict and the format cannot, because its reader shifts the labels
            within a row: at the end of nearly every row.
    """

    to: Format
    files: int
    bytes: int
    samples: int
    tokens: int
    padding: int = 0
    dropped_tokens: int = 0
    lost_labels: int = 0
