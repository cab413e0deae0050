"""What a reader of one kind of file yields, and how it says that something in it is bad.

A `Record` carries either what was read or a `Bad`: a reader goes on after a bad record, so that leaving it out is
possible. A file that cannot be read on raises `Damaged`. What becomes of either is decided in one place, reader.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used.

    Attributes:
        reason: a few words that are the same for all such records, under which they are counted.
        message: what is wrong with this one and what to do, to follow the name of its place.
    """

    reason: str
    message: str


class Record(NamedTuple):
    """One record of a file.

    Attributes:
        following: index of the record after it.
        place: what follows the file's name in its source, such as ":3"; "" for a whole file.
        value: its text, its ids ([tokens] int64), or what is wrong with it.
        masked: ids of it that were left out because its attention_mask is 0 there.
    """

    following: int
    place: str
    value: "str | np.ndarray | Bad"
    masked: int = 0


class Damaged(Exception):
    """A file cannot be read on; the message says why, to follow the file's name."""


def decode(content: bytes | bytearray) -> str | Bad:
    """UTF-8 bytes as text."""
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        return Bad(
            "not UTF-8",
            f"not UTF-8 at byte {exc.start} ({exc.reason}); convert the file, for example with iconv, or leave it out",
        )


def whole(text: str) -> str | Bad:
    """The text, or what is wrong where it holds half of a surrogate pair, which UTF-8 cannot express."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as exc:
        return Bad(
            "half of a surrogate pair",
            f"character {exc.start} is half of a surrogate pair, which is not text; correct it",
        )
    return text
