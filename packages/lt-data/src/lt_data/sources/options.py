"""What a caller chooses about reading, checked when it is made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lt_data.errors import DataError

OnBad = Literal["error", "skip"]

# What a folder is searched for. A `.json` file is more often a setting than text, so it has to be asked for.
SUFFIXES = (
    ".txt",
    ".txt.gz",
    ".txt.zst",
    ".md",
    ".rst",
    ".py",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json.gz",
    ".json.zst",
    ".parquet",
    ".pdf",
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How sources are read.

    Attributes:
        suffixes: which files of a folder are taken, whatever the case of their letters; a file that is named itself is
            always taken.
        text_field: the field of a record, or the column of a table, that holds the text.
        tokens_field: the field or column that holds ready-made ids; given, `text_field` is not looked at.
        on_bad: what happens to a record that cannot be used and to a damaged file: "error" stops with its name, "skip"
            leaves it out and counts it.
        config: configuration of a dataset of the hub.
        split: split of a dataset of the hub or of a saved dataset, with a slice if wanted, such as `train[:10%]`.
        revision: commit, branch or tag of a dataset of the hub.
        streaming: read a dataset of the hub as it comes, without keeping it on the disk.

    Raises:
        DataError: a value is not one of those.
    """

    suffixes: Sequence[str] = SUFFIXES
    text_field: str = "text"
    tokens_field: str | None = None
    on_bad: OnBad = "error"
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        suffixes = self.suffixes
        if isinstance(suffixes, str) or not suffixes or not all(suffix.startswith(".") for suffix in suffixes):
            raise DataError(f"suffixes={suffixes!r}: give a list such as ['.txt', '.jsonl']")
        if self.on_bad not in get_args(OnBad):
            raise DataError(f"on_bad={self.on_bad!r}: choose error or skip")
        for name in ("text_field", "tokens_field", "config", "split", "revision"):
            if getattr(self, name) == "":
                raise DataError(f"{name}='': give a name, or leave it out")
        object.__setattr__(self, "suffixes", tuple(suffix.lower() for suffix in suffixes))

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, for a fingerprint."""
        return asdict(self)
