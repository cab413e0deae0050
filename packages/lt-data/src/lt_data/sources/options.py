"""Options of reading sources, validated on construction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lt_data.errors import DataError
from lt_data.file_names import COMPRESSIONS

OnBad = Literal["error", "skip"]

DEFAULT_MAX_DOCUMENT_BYTES = 1 << 25
SKIP_REMEDY = "; to leave out and count bad input give on_bad='skip' (--on-bad skip)"

_CONTENT = (".txt", ".jsonl", ".ndjson", ".json")
_COMPRESSED = [f"{content}{compression}" for content in _CONTENT for compression in COMPRESSIONS]
SUFFIXES = (*_CONTENT, *_COMPRESSED, ".md", ".rst", ".py", ".parquet", ".arrow", ".pdf")
"""Suffixes read in a folder."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of reading sources.

        >>> options = SourceOptions(text_field="body")
        >>> prepare([{"body": "A text."}], tokenizer=tokenizer, out="bodies", options=options).documents
        1

    Attributes:
        suffixes: suffixes of the files to read in a folder, case-insensitive; a file given by name is always read.
        text_field: field of a record, or column of a table, with the text.
        tokens_field: field or column with ids; replaces `text_field`.
        max_document_bytes: largest document, in bytes of its line, text file or table value; larger ones are bad input.
            `tokenizers` needs about 114 bytes of memory per character of a document: 3.8 GB for the default of 32 MiB.
        on_bad: handling of bad records and damaged files: "error" raises, "skip" leaves them out and counts them. A
            damaged file is left out whole.
        config: configuration of a hub dataset.
        split: split of a hub dataset or saved dataset; of a hub dataset also a slice, such as `train[:10%]`.
        revision: commit, branch or tag of a hub dataset.
        streaming: read a hub dataset without storing it on disk.
        keep_fields: fields or columns of a record to keep in `Document.fields`; True for all.

    Raises:
        DataError: an invalid value.
    """

    suffixes: Sequence[str] = SUFFIXES
    text_field: str = "text"
    tokens_field: str | None = None
    on_bad: OnBad = "error"
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool = False
    keep_fields: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        suffixes = self.suffixes
        if isinstance(suffixes, str) or not suffixes or not all(suffix.startswith(".") for suffix in suffixes):
            raise DataError(f"suffixes = {suffixes!r}: give a list such as ['.txt', '.jsonl']")
        if self.on_bad not in get_args(OnBad):
            raise DataError(f"on_bad = {self.on_bad!r}: choose error or skip")
        for name in ("text_field", "tokens_field", "config", "split", "revision"):
            if getattr(self, name) == "":
                raise DataError(f"{name} = '': give a name, or leave it out")
        if isinstance(self.keep_fields, str):
            raise DataError(f"keep_fields = {self.keep_fields!r}: a single name; pass a list of names")
        if self.max_document_bytes < 1:
            raise DataError(f"max_document_bytes = {self.max_document_bytes}: at least 1")
        object.__setattr__(self, "suffixes", tuple(suffix.lower() for suffix in suffixes))

    @property
    def field(self) -> str:
        """Field or column of the text or ids."""
        return self.tokens_field or self.text_field

    def to_dict(self) -> dict[str, Any]:
        """Return the options that determine good documents as JSON values, for a fingerprint.

        What is done with bad input, and what is too large, has the default here: of input that is good either way the
        documents are the same.
        """
        values = {name: value for name, value in asdict(self).items() if name != "keep_fields"}
        return {**values, "on_bad": "error", "max_document_bytes": DEFAULT_MAX_DOCUMENT_BYTES}
