"""Export options, validated on construction, and the report of an export."""

from dataclasses import dataclass
from typing import Literal, get_args

from lt_data.errors import DataError

Format = Literal["hf", "megatron", "smp", "litespark"]
FORMATS: tuple[Format, ...] = get_args(Format)
PackingMode = Literal["concat", "bfd"]
LastRow = Literal["pad", "drop"]
Labels = Literal["masked", "copy"]
Split = Literal["train", "validation", "test"]
DocumentBoundaries = Literal["position_ids", "seq_lengths"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        to: the format.
        seq_len: tokens in a row. None: whole documents (hf, smp, megatron, which has only these). Required by
            litespark, whose rows have one more token, as its trainer shifts the labels.
        packing: packing mode of the rows: `concat`, or `bfd` (hf, smp).
        last_row: `pad` an incomplete last row, or `drop` its tokens (`concat`).
        pad_id: id of padding. None: the tokenizer's PAD, else its EOS, else 0.
        labels: hf rows: `masked` has -100 at positions without a label; `copy` repeats the ids, for trainers that do
            not support -100 (requires `concat` and `last_row="drop"`).
        document_boundaries: hf rows of `bfd`: the column that says where documents begin: `position_ids`, which the
            flash attention of transformers reads, or `seq_lengths`, for TRL's collator.
        gz: smp: whether the files are `.json.gz`.
        split: hf, litespark: name of the split.
        file_bytes: target size of a file. None: the format's default.

    Raises:
        DataError: an unknown value or incompatible options.
    """

    to: Format
    seq_len: int | None = None
    packing: PackingMode = "concat"
    last_row: LastRow = "pad"
    pad_id: int | None = None
    labels: Labels = "masked"
    document_boundaries: DocumentBoundaries = "position_ids"
    gz: bool = True
    split: Split = "train"
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        choices = {
            "to": FORMATS,
            "packing": PackingMode,
            "last_row": LastRow,
            "labels": Labels,
            "document_boundaries": DocumentBoundaries,
            "split": Split,
        }
        for name, kind in choices.items():
            allowed = kind if isinstance(kind, tuple) else get_args(kind)
            if getattr(self, name) not in allowed:
                raise DataError(f"{name} = {getattr(self, name)!r}: one of {', '.join(allowed)}")
        if self.seq_len is not None and not 1 <= self.seq_len < 2**31 - 1:
            raise DataError(f"seq_len = {self.seq_len}: from 1 to {2**31 - 2}")
        if self.file_bytes is not None and self.file_bytes < 1:
            raise DataError(f"file_bytes = {self.file_bytes}: at least 1")
        self._check_rows()

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of the files.

        Raises:
            DataError: whole documents are exported.
        """
        if self.seq_len is None:
            raise DataError("seq_len = None: documents are exported, not rows; give seq_len")
        return self.seq_len + (self.to == "litespark")

    def _check_rows(self) -> None:
        if self.to == "litespark" and self.seq_len is None:
            raise DataError("to = litespark: its rows have a fixed length; give seq_len (--seq-len)")
        if self.to == "megatron" and self.seq_len is not None:
            raise DataError("seq_len: has no effect with to = megatron, which exports documents; leave it out")
        if self.seq_len is None and (self.packing, self.last_row, self.labels) != ("concat", "pad", "masked"):
            raise DataError("packing, last_row and labels apply to rows; give seq_len too (--seq-len)")
        if self.document_boundaries != "position_ids" and (self.to, self.packing) != ("hf", "bfd"):
            raise DataError("document_boundaries: applies to to = hf with packing = bfd; leave it out")
        if self.packing == "bfd" and self.to == "litespark":
            raise DataError("packing = bfd: litespark has no mask; choose concat")
        if self.packing == "bfd" and self.last_row == "drop":
            raise DataError("last_row = drop: any row of packing = bfd may have padding; choose pad")
        if self.labels == "copy":
            if self.to != "hf":
                raise DataError(f"labels = copy: {self.to} has no labels; leave it out")
            if (self.packing, self.last_row) != ("concat", "drop"):
                raise DataError(
                    "labels = copy: would train on padding; choose packing=concat and last_row=drop (--last-row drop)"
                )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Totals of an export. `tokens` + `dropped_tokens` are the tokens of the store.

    Attributes:
        to: the format.
        files: number of files.
        bytes: total bytes of the files.
        samples: documents or rows (of `seq_len` + 1 tokens in litespark).
        tokens: exported tokens of the store.
        padding: padding positions.
        dropped_tokens: tokens dropped with the last row, on request.
        dropped_labels: hf: labels that are lost because the reader shifts labels within a row: one at the end of nearly
            every row.
    """

    to: Format
    files: int
    bytes: int
    samples: int
    tokens: int
    padding: int = 0
    dropped_tokens: int = 0
    dropped_labels: int = 0
