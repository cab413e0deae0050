"""Export manifest `lt-export.json`: the store of an export, its padding, and the hash of each file.

An import reads from it the tokenizer that made the ids, where the tokens end and the padding begins, and that documents
continue across files. Other readers ignore it. `smp` has none: its trainers read every `.json` file of a folder as
data.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.exports.files import ExportedFile
from lt_data.exports.input_files import MAX_DESCRIPTION_BYTES
from lt_data.storage import read_file, translate_os_errors

EXPORT_MANIFEST_FILE = "lt-export.json"
FORMAT = "lt-data-export"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ExportManifest:
    """Manifest of an export.

    Attributes:
        to: its format.
        store: fingerprint of the store.
        tokenizer: SHA-256 of the tokenizer's files.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        seq_len: tokens in a row; None for documents.
        packing: packing mode of the rows.
        samples: number of documents or rows.
        tokens: exported tokens of the store; in token blocks they come before the padding.
        padding: padding positions.
        pad_id: id of padding; None without padding.
        dropped_tokens: tokens of the store that were dropped on request.
        files: all other files.
    """

    to: str
    store: str
    tokenizer: str
    bos: bool
    eos: bool
    seq_len: int | None
    packing: str | None
    samples: int
    tokens: int
    padding: int
    pad_id: int | None
    dropped_tokens: int
    files: tuple[ExportedFile, ...]

    def encode(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n").encode()


def read_export_manifest(folder: Path) -> ExportManifest | None:
    """Read the export manifest of a folder; None without one.

    Raises:
        DataError: it is broken or of another version, or a listed file is missing or has another SHA-256.
    """
    path = folder / EXPORT_MANIFEST_FILE
    if not path.is_file():
        return None
    with translate_os_errors("read", path):
        content = read_file(path, max_bytes=MAX_DESCRIPTION_BYTES)
    values = strict_json.load_object(content, str(path), "export again")
    if (values.pop("format", None), values.pop("version", None)) != (FORMAT, VERSION):
        raise DataError(f"{path}: another format version; update lt-data")
    manifest = strict_json.parse(ExportManifest, values, str(path), "export again")
    for file in manifest.files:
        with (
            translate_os_errors("read the exported file", folder / file.path),
            (folder / file.path).open("rb") as found,
        ):
            if hashlib.file_digest(found, "sha256").hexdigest() != file.sha256:
                raise DataError(
                    f"{folder / file.path}: {found.tell()} bytes that are not the {file.bytes} of the SHA-256 in "
                    f"{EXPORT_MANIFEST_FILE}: copy it again"
                )
    return manifest
