"""What a token store says about itself: `manifest.json`, format "lt-data-store", version 2.

The manifest holds every hash and every choice that made the tokens, and nothing else (no date, no machine): the same
text, tokenizer and policy give the same bytes. `fingerprint` is the name of the token sequence; packs and stream states
carry it, so that nothing goes on silently over other data. Reading checks the format, the version, the fingerprint and
that what was read is what is there plus what was left out. The whole format: docs/formats/token-store.md.

Version 1, which said nothing of what was left out but empty documents, is read; the same tokens have the same
fingerprint in both. `checksum`, from version 2 on, is over all fields, so that damage to any of them is found.
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
VERSION = 2
READABLE = (1, 2)
_FINGERPRINT_VERSION = 1  # the token sequence is described as in version 1, so that its name stays
FILE_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SHARD_FOLDER = "shards"
PACK_FOLDER = "packs"
LISTED_SOURCES = 1000  # more source files than that are recorded as one digest
EMPTY = "empty"
DUPLICATE = "duplicate"


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
class Amount:
    """Documents with the UTF-8 bytes of their text, and the ids they became (0 where they were not encoded)."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            documents=self.documents + other.documents,
            text_bytes=self.text_bytes + other.text_bytes,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents are taken. A limit is inclusive; None is no limit.

    Attributes:
        min_characters: of the text (code points).
        max_characters: of the text. Documents that came as ids have no characters and pass.
        min_tokens: of the document in the store, BOS and EOS included.
        max_tokens: likewise.
        drop_duplicates: of equal documents only the first is taken.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        for unit in ("characters", "tokens"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            for name, value in ((f"min_{unit}", least), (f"max_{unit}", most)):
                if value is not None and value < 1:
                    raise DataError(f"{name}={value}: at least 1 (empty documents are always left out)")
            if least is not None and most is not None and least > most:
                raise DataError(f"min_{unit}={least} and max_{unit}={most}: no document can be both")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a job a store is: the files of `rank` of `world`, of the listing with that fingerprint.

    `files` are those in the folder `part`, which merging needs, with their SHA-256.
    """

    rank: int
    world: int
    listing: str
    files: Mapping[str, str] = field(default_factory=dict)


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
        text_bytes: UTF-8 bytes of the text of all documents in the store: the base of bits per byte.
        read: all documents that were read; their tokens are those that were encoded. None in version 1.
        left_out: documents that were read and are not in the store, by reason.
        skipped: records of the sources that gave no document, by reason.
        special_strings: literal special strings found in the text of the documents in the store, with their counts.
        specials: whether such strings were encoded as text or as the special ids.
        selection: which documents were to be taken.
        engine: what encoded, and how that was checked.
        shard_tokens: about how many ids a shard was to hold. None in version 1.
        sources: the files that were read.
        merged_from: parts that this store was merged from; 1 when one process made it.
        part: which part of a job this is; None for a whole store.
        fingerprint: SHA-256 over all that determines the tokens.
    """

    tokenizer: TokenizerInfo
    bos: bool
    eos: bool
    dtype: Literal["uint16", "uint32"]
    shards: tuple[Shard, ...]
    text_bytes: int
    read: Amount | None = None
    left_out: Mapping[str, Amount] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    special_strings: Mapping[str, int] = field(default_factory=dict)
    specials: Literal["text", "ids"] = "text"
    selection: Selection = field(default_factory=Selection)
    engine: Mapping[str, Any] = field(default_factory=dict)
    shard_tokens: int | None = None
    sources: Sources = field(default_factory=Sources)
    merged_from: int = 1
    part: Part | None = None

    @property
    def tokens(self) -> int:
        """Ids in the store."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in the store."""
        return sum(shard.documents for shard in self.shards)

    @property
    def empty_documents(self) -> int:
        """Documents that gave no token and are not in the store."""
        return self.left_out.get(EMPTY, Amount()).documents

    @property
    def kept(self) -> Amount:
        """What is in the store."""
        return Amount(documents=self.documents, text_bytes=self.text_bytes, tokens=self.tokens)

    @property
    def adds_up(self) -> bool:
        """Whether what was read is what is in the store and what was left out; version 1 cannot tell."""
        return self.read is None or self.read == sum(self.left_out.values(), self.kept)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over format, tokenizer, BOS/EOS policy, dtype and the shards with their hashes."""
        identity = {
            "format": FORMAT,
            "version": _FINGERPRINT_VERSION,
            "tokenizer": self.tokenizer.sha256,
            "bos": self.bos,
            "eos": self.eos,
            "dtype": self.dtype,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, in the order in which it is written."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "documents": self.documents,
            "tokens": self.tokens,
            **asdict(self),
        }
        return {**values, "checksum": _checksum(values)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> "Manifest":
        """Read the values of a `manifest.json`; `source` names it in errors.

        Raises:
            DataError: another format or version, a missing or unknown field, or a fingerprint that does not fit.
        """
        fields = dict(values)
        if fields.pop("format", None) != FORMAT:
            raise DataError(f"{source}: not the manifest of a token store (format is not {FORMAT!r})")
        if (version := fields.pop("version", None)) not in READABLE:
            raise DataError(
                f"{source}: version {version!r} of the format; this program reads up to {VERSION}: update lt-data"
            )
        checksum = fields.pop("checksum", None)
        try:
            stated = {name: fields.pop(name) for name in ("fingerprint", "documents", "tokens")}
            fields["tokenizer"] = TokenizerInfo(**fields["tokenizer"])
            fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
            listed = tuple(SourceFile(**file) for file in fields["sources"]["listed"])
            fields["sources"] = Sources(**{**fields["sources"], "listed": listed})
            if version == 1:
                empty = fields.pop("empty_documents")
                fields["left_out"] = {EMPTY: Amount(documents=empty)} if empty else {}
            else:
                fields["read"] = Amount(**fields["read"]) if fields["read"] else None
                fields["left_out"] = {reason: Amount(**amount) for reason, amount in fields["left_out"].items()}
                fields["selection"] = Selection(**fields["selection"])
                fields["part"] = Part(**fields["part"]) if fields["part"] else None
            manifest = cls(**fields)
        except (AttributeError, KeyError, TypeError) as exc:
            raise DataError(f"{source}: broken manifest ({exc}); prepare the store again") from exc
        actual = {name: getattr(manifest, name) for name in stated}
        wrong = [name for name in stated if stated[name] != actual[name]]
        if wrong or not manifest.adds_up:
            wrong = wrong or ["what was read"]
            raise DataError(f"{source}: {', '.join(wrong)} does not fit the other fields; prepare the store again")
        if version > 1 and checksum != _checksum({name: values[name] for name in values if name != "checksum"}):
            raise DataError(f"{source}: its checksum is not that of its fields; copy it again or prepare again")
        return manifest


def _checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over all other fields, as JSON with sorted keys and no blanks: a change of any is noticed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
