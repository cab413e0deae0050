"""`lt-export.json`, the note beside an export: which store it came from, what is padding, and each file's hash.

With it an import knows the tokenizer that made the ids, where the tokens end and the padding begins, and that
documents go on from one file into the next. Other readers pass it over. `smp` has none: its trainers take every
`.json` file of a folder for data.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.exports.files import ExportedFile
from lt_data.storage import os_errors

FILE_NAME = "lt-export.json"
FORMAT = "lt-data-export"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Note:
    """What an export says about itself.

    Attributes:
        to: its format.
        store: fingerprint of the store.
        tokenizer: SHA-256 of the tokenizer's files.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        seq_len: tokens in a row; None for documents.
        pack: how rows were filled.
        samples: documents or rows.
        tokens: of the store; they come first in a run of tokens.
        padding: positions that are none.
        pad_id: the id of padding; None without any.
        dropped_tokens: of the store that were left out, on request.
        files: every other file.
    """

    to: str
    store: str
    tokenizer: str
    bos: bool
    eos: bool
    seq_len: int | None
    pack: str | None
    samples: int
    tokens: int
    padding: int
    pad_id: int | None
    dropped_tokens: int
    files: Sequence[ExportedFile]

    def encode(self) -> bytes:
        """The content of the file."""
        return (json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n").encode()


def read_note(folder: Path) -> Note | None:
    """The note in a folder; None without one.

    Raises:
        DataError: it is broken, of another version, or a file that it lists is missing or has another size.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    with os_errors("read", path):
        content = path.read_bytes()
    try:
        values: dict[str, Any] = json.loads(content)
        if (values.pop("format"), values.pop("version")) != (FORMAT, VERSION):
            raise DataError(f"{path}: another version of the format: update lt-data")
        values["files"] = tuple(ExportedFile(**file) for file in values["files"])
        note = Note(**values)
    except DataError:  # is a ValueError too
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"{path}: broken ({exc!r}); export again") from exc
    for file in note.files:
        with os_errors("read the exported file", folder / file.path):
            size = (folder / file.path).stat().st_size
        if size != file.bytes:
            raise DataError(f"{folder / file.path}: {size} bytes, {FILE_NAME} says {file.bytes}: copy it again")
    return note
