"""Options of exports and imports, checked when they are made, and their reports."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lt_data.errors import DataError
from lt_data.store.manifest import StoreManifest

Format = Literal["hf", "megatron", "smp", "litespark"]
PackingMode = Literal["concat", "bfd"]
LastRow = Literal["pad", "drop"]
Labels = Literal["masked", "copy"]
Split = Literal["train", "validation", "test"]
BoundaryKind = Literal["bos", "eos", "rows", "files"]
_CHOICES = {"to": Format, "packing": PackingMode, "last_row": LastRow, "labels": Labels, "split": Split}


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
    gz: bool = True
    split: Split = "train"
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            _check_choice(name, getattr(self, name), kind)
        if self.seq_len is not None and not 1 <= self.seq_len < 2**31 - 1:
            raise DataError(f"seq_len = {self.seq_len}: from 1 to {2**31 - 2}")
        if self.file_bytes is not None and self.file_bytes < 1:
            raise DataError(f"file_bytes = {self.file_bytes}: at least 1")
        rows, concat, copy = self.seq_len is not None, self.packing == "concat", self.labels == "copy"
        drop, plain = self.last_row == "drop", self.to == "litespark"
        _refuse(
            (plain and not rows, "to = litespark: its rows have a fixed length; give seq_len"),
            (self.to == "megatron" and rows, "seq_len: has no effect with to = megatron, which exports documents"),
            (not rows and (copy or drop or not concat), "packing, last_row and labels apply to rows; give seq_len too"),
            (plain and not concat, "packing = bfd: litespark has no mask; choose concat"),
            (drop and not concat, "last_row = drop: any row of packing = bfd may have padding; choose pad"),
            (copy and self.to != "hf", f"labels = copy: {self.to} has no labels; leave it out"),
            (copy and not drop, "labels = copy: would train on padding; choose last_row = drop"),
        )

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of the files."""
        return (self.seq_len or 0) + (self.to == "litespark")


@dataclass(kw_only=True)
class ExportReport:
    """Totals of an export. `tokens` + `dropped_tokens` are the tokens of the store.

    Attributes:
        samples: documents or rows (of `seq_len` + 1 tokens in litespark).
        tokens: exported tokens of the store.
        padding: padding positions.
        dropped_tokens: tokens dropped with the last row, on request.
        dropped_labels: hf: labels that are lost because the reader shifts labels within a row: one at the end of nearly
            every row.
        files: number of files.
        bytes: total bytes of the files.
    """

    samples: int = 0
    tokens: int = 0
    padding: int = 0
    dropped_tokens: int = 0
    dropped_labels: int = 0
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import.

    Attributes:
        format: the format.
        boundaries: litespark: a document begins at each `bos`, after each `eos`, at each of the `rows`, or at
            each of the `files`.
        seq_len: for `rows`: their length minus one. None: from metadata.json.
        token_bytes: litespark: bytes of a token. None: from metadata.json.
        pad_id: litespark: a run of this id at the end of a file is padding. If it is the EOS id, one of the
            run is kept.
        bos: whether each document begins with the BOS id, which is added if missing. None: from the list of our export,
            else no.
        eos: likewise for EOS at the end.

    Raises:
        DataError: an unknown value or incompatible options.
    """

    format: Literal["litespark", "megatron"]
    boundaries: BoundaryKind | None = None
    seq_len: int | None = None
    token_bytes: int | None = None
    pad_id: int | None = None
    bos: bool | None = None
    eos: bool | None = None

    def __post_init__(self) -> None:
        if self.format in ("hf", "smp"):
            raise DataError(f"format = {self.format!r}: a source of prepare, with tokens_field (--tokens-field)")
        _check_choice("format", self.format, Literal["litespark", "megatron"])
        unused = (self.boundaries, self.seq_len, self.token_bytes, self.pad_id) == (None, None, None, None)
        _refuse(
            (
                self.format == "megatron" and not unused,
                "format = megatron: only bos and eos apply; leave the others out",
            )
        )
        if self.format == "litespark":
            _check_choice("boundaries", self.boundaries, BoundaryKind)
            _refuse(
                (self.seq_len is not None and self.boundaries != "rows", "seq_len: applies to boundaries = rows"),
                (self.seq_len is not None and self.seq_len < 1, f"seq_len = {self.seq_len}: at least 1"),
            )


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """Result of an import: the manifest of the store, and the number of padding positions left out."""

    manifest: StoreManifest
    padding: int


def _check_choice(name: str, value: object, kind: Any) -> None:
    if value not in get_args(kind):
        raise DataError(f"{name} = {value!r}: one of {', '.join(get_args(kind))}")


def _refuse(*problems: tuple[bool, str]) -> None:
    """Raise DataError for the first problem that there is."""
    for is_there, message in problems:
        if is_there:
            raise DataError(message)
