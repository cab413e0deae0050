"""Manifest of a joined store: parts by path and SHA-256 of their manifest, index, left-out documents.

Cost: two hashes over the fields.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import is_plain_name
from lt_data.store.manifest import DropList, checksum_of
from lt_data.store.manifest_checks import check_counts, check_hashes

FORMAT = "lt-data-joined-store"
VERSION = 1
INDEXED_VERSION = 2
DROPPING_VERSION = 3
_REMEDY = "join the stores again"


@dataclass(frozen=True, kw_only=True)
class JoinedPart:
    """Part of a joined store: path of its folder, and SHA-256 of its manifest.

    The path is relative to the folder of the joined store ("." is that folder), or absolute for a part elsewhere.
    """

    path: str
    sha256: str

    def __post_init__(self) -> None:
        names = self.path.removeprefix("/").split("/")
        if self.path != "." and not all(map(is_plain_name, names)):
            raise DataError(f"part {self.path!r} is neither a path inside the folder nor an absolute one, without ..")
        check_hashes(f"sha256 of part {self.path}", [self.sha256])

    @property
    def is_elsewhere(self) -> bool:
        """True if the path is absolute."""
        return self.path.startswith("/")


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """Index beside a joined manifest: its SHA-256 and size in bytes."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        check_hashes("sha256 of the index", [self.sha256])
        check_counts(bytes=self.bytes)


@dataclass(frozen=True, kw_only=True)
class JoinedManifest:
    """Manifest of a joined store; `fingerprint`, `documents` and `tokens` are those of all parts together.

    `appended` is the fingerprint of the listing of the sources that a generation added, otherwise "". With an `index`
    the version is 2, with documents `dropped` 3: readers of earlier versions would not check them.
    """

    fingerprint: str
    documents: int
    tokens: int
    parts: tuple[JoinedPart, ...]
    appended: str = ""
    index: IndexFile | None = None
    dropped: DropList | None = None

    @property
    def version(self) -> int:
        """Version of the format that it needs."""
        return DROPPING_VERSION if self.dropped else INDEXED_VERSION if self.index else VERSION

    def __post_init__(self) -> None:
        check_hashes("fingerprint", [self.fingerprint, *([self.appended] if self.appended else [])])
        check_counts(documents=self.documents, tokens=self.tokens)
        repeated = [path for path, n in Counter(part.path for part in self.parts).items() if n > 1]
        if repeated or not self.parts:
            raise DataError(f"part {repeated[0]!r} is named twice" if repeated else "it names no part")

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        values = {"format": FORMAT, "version": self.version, **asdict(self)}
        for name in ("appended", "index", "dropped"):
            if not values[name]:
                del values[name]
        return (json.dumps({**values, "checksum": checksum_of(values)}, indent=2) + "\n").encode()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> "JoinedManifest":
        """Parse the values of the file; `source` names it in errors.

        Raises:
            DataError: another version, a field or path that is not allowed, or a wrong checksum.
        """
        fields = dict(values)
        del fields["format"]
        expected = DROPPING_VERSION if "dropped" in fields else INDEXED_VERSION if "index" in fields else VERSION
        if (version := fields.pop("version", None)) != expected:
            raise DataError(
                f"{source}: format version {version!r}; this lt-data reads {VERSION}, with an index {INDEXED_VERSION}, "
                f"with dropped documents {DROPPING_VERSION}: update lt-data"
            )
        checksum = fields.pop("checksum", None)
        manifest = strict_json.parse(cls, fields, source, _REMEDY)
        if checksum != checksum_of({name: value for name, value in values.items() if name != "checksum"}):
            raise DataError(f"{source}: checksum does not match the fields; copy the file again, or {_REMEDY}")
        return manifest
