"""What a token store says about itself: `manifest.json`, format "lt-data-store", version 1.

The manifest holds every hash and every choice that made the tokens, and nothing else (no date, no machine): the same
text, tokenizer and policy give the same bytes. `fingerprint` is the name of the token sequence; packs and stream states
carry it, so that nothing goes on silently over other data. Reading checks the format, the version and the fingerprint.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lt_data.errors import DataError
from lt_data.storage import os_errors

FORMAT = "lt-data-store"
VERSION = 1
FILE_NAME = "manifest.json"
LISTED_SOURCES = 1000  # more source files than that are recorded as one digest


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file that was read: name as given, bytes and SHA-256 of its content."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The files that were read: their number, bytes, and a SHA-256 over the lines "sha256 bytes path" in order.

    `listed` holds them one by one when there are at most `LISTED_SOURCES`. `skipped_links` counts symbolic links that
    led out of a source folder (or to a folder) and were not followed.
    """

    files: int = 0
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    skipped_links: int = 0
    listed: tuple[SourceFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer: the hash over its files, 1 + highest id, and each file's SHA-256 (they lie in `tokenizer/`)."""

    sha256: str
    vocab_size: int
    files: Mapping[str, str]
    name: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files `shards/<name>.bin` and `.idx`: how much it holds, and the SHA-256 of each."""

    name: str
    tokens: int
    documents: int
    sha256: str
    idx_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a token store.

    Attributes:
        tokenizer: which tokenizer made the ids.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        dtype: of the token files, little-endian.
        shards: the files, in document order.
        tokens: ids in the store, BOS and EOS included.
        documents: documents in the store.
        text_bytes: UTF-8 bytes of the text of all documents: the base of bits per byte.
        empty_documents: documents that gave no token and are not in the store.
        special_strings: literal special strings found in the text (and kept as text), with their counts.
        sources: the files that were read.
        fingerprint: SHA-256 over all that determines the tokens.
    """

    tokenizer: TokenizerInfo
    bos: bool
    eos: bool
    dtype: Literal["uint16", "uint32"]
    shards: tuple[Shard, ...]
    text_bytes: int
    empty_documents: int = 0
    special_strings: Mapping[str, int] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)

    @property
    def tokens(self) -> int:
        """Ids in the store."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in the store."""
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over format, tokenizer, BOS/EOS policy, dtype and the shards with their hashes."""
        identity = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": self.tokenizer.sha256,
            "bos": self.bos,
            "eos": self.eos,
            "dtype": self.dtype,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, in the order in which it is written."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "documents": self.documents,
            "tokens": self.tokens,
            **asdict(self),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> "Manifest":
        """Read the values of a `manifest.json`; `source` names it in errors.

        Raises:
            DataError: another format or version, a missing or unknown field, or a fingerprint that does not fit.
        """
        fields = dict(values)
        if fields.pop("format", None) != FORMAT:
            raise DataError(f"{source}: not the manifest of a token store (format is not {FORMAT!r})")
        if (version := fields.pop("version", None)) != VERSION:
            raise DataError(
                f"{source}: version {version!r} of the format; this program reads {VERSION}: update lt-data"
            )
        try:
            stated = {name: fields.pop(name) for name in ("fingerprint", "documents", "tokens")}
            fields["tokenizer"] = TokenizerInfo(**fields["tokenizer"])
            fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
            listed = tuple(SourceFile(**file) for file in fields["sources"]["listed"])
            fields["sources"] = Sources(**{**fields["sources"], "listed": listed})
            manifest = cls(**fields)
        except (KeyError, TypeError) as exc:
            raise DataError(f"{source}: broken manifest ({exc}); prepare the store again") from exc
        actual = {name: getattr(manifest, name) for name in stated}
        if wrong := [name for name in stated if stated[name] != actual[name]]:
            raise DataError(f"{source}: {', '.join(wrong)} does not fit the other fields; prepare the store again")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the store in `folder`.

    Raises:
        DataError: it is missing, unreadable or broken.
    """
    path = folder / FILE_NAME
    with os_errors("read the token store's", path):
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except ValueError as exc:
        raise DataError(f"{path}: not JSON ({exc}); prepare the store again") from exc
    if not isinstance(values, dict):
        raise DataError(f"{path}: not the manifest of a token store")
    return Manifest.from_json(values, str(path))
