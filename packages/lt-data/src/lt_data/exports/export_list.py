"""List of an export, `lt-export.json`: the tokenizer of its ids, its tokens and padding, and the hash of each file.

It stands in exports that `import_tokens` reads, Litespark's and Megatron's; other readers ignore it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import check_name
from lt_data.remote.file_list import sha256_of
from lt_data.storage import read_file, translate_os_errors

EXPORT_LIST = "lt-export.json"
_FORMAT = {"format": "lt-data-export", "version": 2}


@dataclass(frozen=True, kw_only=True)
class ExportList:
    """What the list says.

    Attributes:
        to: the format.
        tokenizer: SHA-256 of the tokenizer's files.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        tokens: exported tokens of the store; in token blocks they come before the padding.
        padding: padding positions.
        files: SHA-256 of each file.
    """

    to: str
    tokenizer: str
    bos: bool
    eos: bool
    tokens: int
    padding: int
    files: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(_FORMAT | asdict(self), indent=2) + "\n").encode()


def read_export_list(folder: Path) -> ExportList | None:
    """Read the list of an export, and every file that it names; None if there is none.

    Raises:
        DataError: it is broken or of another version, or a file is missing or has another SHA-256.
    """
    path = folder / EXPORT_LIST
    if not path.is_file():
        return None
    with translate_os_errors("read", path):
        values = strict_json.load_object(read_file(path, max_bytes=2**28), str(path), "export again")
    if {name: values.pop(name, None) for name in _FORMAT} != _FORMAT:
        raise DataError(f"{path}: another format version; update lt-data")
    listed = strict_json.parse(ExportList, values, str(path), "export again")
    for name, sha256 in listed.files.items():
        file = folder / check_name(name, path)
        if not file.is_file() or sha256_of(file) != sha256:
            raise DataError(f"{file}: its SHA-256 is not the one in {EXPORT_LIST}: copy it again")
    return listed
