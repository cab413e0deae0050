"""Manifest of a token store: `manifest.json`, format "lt-data-store", version 1.

The manifest holds every hash and every choice that determined the tokens, and nothing else (no date, no machine): the
same text, tokenizer and policy give the same bytes. `fingerprint` identifies the token sequence; packs and stream
states carry it, so that none is used with other data. `checksum` covers all fields. Reading checks the format, the
version, every type, both hashes, and that the documents read are those stored plus those left out; file names are those
of entries of their folder. Full specification: docs/reference/data-formats.md.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.storage import read_file, translate_os_errors
from lt_data.store.manifest_checks import check_counts, check_hashes, check_names
from lt_data.store.megatron import index_size
from lt_data.store.source_files import SourceFiles

FORMAT = "lt-data-store"
VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SHARD_FOLDER = "shards"
PACK_FOLDER = "packs"
MAX_MANIFEST_BYTES = 2**31
MAX_TOKENIZER_BYTES = 2**28
EMPTY = "empty"
DUPLICATE = "duplicate"
_REMEDY = "copy the store again or prepare it again"


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """Tokenizer: hash over its files, 1 + highest id, and the SHA-256 of each file in `tokenizer/`."""

    sha256: str
    vocab_size: int
    files: Mapping[str, str]
    name: str

    def __post_init__(self) -> None:
        check_counts(vocab_size=self.vocab_size)
        check_names("tokenizer file", self.files)
        check_hashes("sha256 of a tokenizer file", [self.sha256, *self.files.values()])


ColumnType = Literal["string", "int", "float", "bool"]


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """Kept column: field of the records, type of its values, and number of documents without one."""

    name: str
    type: ColumnType
    nulls: int

    def __post_init__(self) -> None:
        check_counts(nulls=self.nulls)


_METADATA_FIELDS = ("src_sha256", "arrow_sha256", "arrow_bytes")  # of a shard, outside the fingerprint


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """Files `shards/<name>.bin`, `.idx`, `.src` and `.arrow`: their totals, and the SHA-256 of each file.

    `src_sha256` is "" if the sources of the documents are unknown; then there is no `.src` file. Likewise
    `arrow_sha256` is "" if no columns are kept.
    """

    name: str
    tokens: int
    documents: int
    sha256: str
    idx_sha256: str
    src_sha256: str = ""
    arrow_sha256: str = ""
    arrow_bytes: int = 0

    def __post_init__(self) -> None:
        check_names("shard", [self.name])
        check_counts(tokens=self.tokens, documents=self.documents, arrow_bytes=self.arrow_bytes)
        check_hashes(f"sha256 of shard {self.name}", self.hashes.values())

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 (hex) of each file of the shard, by name."""
        hashes = {"bin": self.sha256, "idx": self.idx_sha256, "src": self.src_sha256, "arrow": self.arrow_sha256}
        return {f"{self.name}.{kind}": sha256 for kind, sha256 in hashes.items() if sha256 or kind in ("bin", "idx")}

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return the bytes of each file of the shard, by name; `dtype` is that of the ids."""
        n_bytes = self.tokens * np.dtype(dtype).itemsize
        sizes = {"bin": n_bytes, "idx": index_size(self.documents), "src": 8 * self.documents}
        sizes["arrow"] = self.arrow_bytes
        return {name: sizes[name.rpartition(".")[2]] for name in self.hashes}

    @property
    def identity(self) -> dict[str, Any]:
        """Part that determines the tokens, for the fingerprint."""
        return {name: value for name, value in vars(self).items() if name not in _METADATA_FIELDS}


@dataclass(frozen=True, kw_only=True)
class DocumentTotals:
    """Number of documents, UTF-8 bytes of their text, and their ids (0 where they were not encoded)."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "DocumentTotals") -> "DocumentTotals":
        return DocumentTotals(
            documents=self.documents + other.documents,
            text_bytes=self.text_bytes + other.text_bytes,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Document filter. Limits are inclusive; None is no limit.

    Attributes:
        min_characters: code points of the text, at least.
        max_characters: code points of the text, at most. Documents that are given as ids pass both.
        min_tokens: ids of the document in the store, BOS and EOS included, at least.
        max_tokens: likewise, at most.
        drop_duplicates: keep only the first of equal documents.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        for unit in ("characters", "tokens"):
            minimum, maximum = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            for name, value in ((f"min_{unit}", minimum), (f"max_{unit}", maximum)):
                if value is not None and value < 1:
                    raise DataError(f"{name} = {value}: at least 1 (empty documents are always left out)")
            if minimum is not None and maximum is not None and minimum > maximum:
                raise DataError(f"min_{unit} = {minimum}, max_{unit} = {maximum}: no document satisfies both")


@dataclass(frozen=True, kw_only=True)
class RecordMapInfo:
    """Function of the user over the records: `module:function`, arguments, and the SHA-256 of its code."""

    function: str
    arguments: Mapping[str, Any]
    sha256: str

    def __post_init__(self) -> None:
        check_hashes(f"sha256 of {self.function}", [self.sha256])


@dataclass(frozen=True, kw_only=True)
class StoreSplit:
    """Side of a split: fingerprint of the store that was split, share held out, and the name."""

    fingerprint: str
    holdout: str
    side: Literal["train", "validation"]

    def __post_init__(self) -> None:
        check_hashes("fingerprint of the store that was split", [self.fingerprint])


@dataclass(frozen=True, kw_only=True)
class StorePart:
    """Part `index` of `num_parts` of a job, and the fingerprint of the whole job's source listing.

    `files` maps the files in the folder `part`, which `merge` needs, to their SHA-256.
    """

    index: int
    num_parts: int
    listing_fingerprint: str
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names("file of the part", self.files)
        check_hashes("sha256 of a file of the part", self.files.values())


@dataclass(frozen=True, kw_only=True)
class DropList:
    """Documents of its parts that a joined store leaves out: duplicates of documents of an earlier part.

    Attributes:
        sha256: SHA-256 of the file of the extents that it has (lt_data.store.extents).
        extents: their number.
        documents: documents that are left out.
        tokens: their ids.
        text_bytes: UTF-8 bytes of the text of the documents that are left; 0 if unknown.
        read: all documents that were read, and the ids of those that one process would have encoded.
        left_out: those left out by reason, by the parts or here.
        special_strings: counts in the documents that are left.
    """

    sha256: str
    extents: int
    documents: int
    tokens: int
    text_bytes: int
    read: DocumentTotals
    left_out: Mapping[str, DocumentTotals]
    special_strings: Mapping[str, int]

    def __post_init__(self) -> None:
        check_hashes("sha256 of the extents", [self.sha256])
        check_counts(extents=self.extents, documents=self.documents, tokens=self.tokens, text_bytes=self.text_bytes)
        check_counts(**self.special_strings)
        for totals in (self.read, *self.left_out.values()):
            check_counts(**asdict(totals))


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """Manifest of a token store.

    Attributes:
        tokenizer: the tokenizer that encoded the documents.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        dtype: dtype of the token files, little-endian.
        shards: the shard files, in document order.
        tokens: ids in the store, BOS and EOS included.
        documents: documents in the store.
        text_bytes: UTF-8 bytes of the text of all documents in the store, for bits per byte.
        read: all documents that were read; their tokens are those that were encoded.
        left_out: documents that were read and are not in the store, by reason.
        skipped: source records without a document, and ids that an attention mask hides, by reason.
        special_strings: counts of literal special strings in the text of the stored documents.
        special_tokens_as: whether such strings were encoded as text or as the special ids.
        selection: the document filter.
        columns: the kept columns.
        map: function of the user that was applied to the records, if any.
        engine: tokenizer engine, and the check that selected it.
        shard_tokens: target number of ids of a shard.
        sources: the source files.
        merged_from: number of parts that were merged; 1 if one process prepared the store.
        split: the store and the side of the split that made this one, if any.
        part: the part of a job that this store is; None for a complete store.
        dropped: documents in the shards that a joined store leaves out; None in the file of a flat store.
        fingerprint: SHA-256 over everything that determines the tokens.
    """

    tokenizer: TokenizerInfo
    bos: bool
    eos: bool
    dtype: Literal["uint16", "uint32"]
    shards: Sequence[ShardFile]
    text_bytes: int
    read: DocumentTotals
    left_out: Mapping[str, DocumentTotals] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    special_strings: Mapping[str, int] = field(default_factory=dict)
    special_tokens_as: Literal["text", "ids"] = "text"
    selection: Selection = field(default_factory=Selection)
    columns: tuple[ColumnInfo, ...] = ()
    map: RecordMapInfo | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    shard_tokens: int
    sources: SourceFiles = field(default_factory=SourceFiles)
    merged_from: int = 1
    split: StoreSplit | None = None
    part: StorePart | None = None
    dropped: DropList | None = None

    def __post_init__(self) -> None:
        for totals in (self.read, *self.left_out.values()):
            check_counts(**asdict(totals))
        for counts in (self.skipped, self.special_strings):
            check_counts(**counts)
        if len({column.name for column in self.columns}) < len(self.columns):
            raise DataError("columns: two of one name")
        # the entries of a large joined store are checked when its index is written (lt_data.store.joined_index)
        entries = self.shards if isinstance(self.shards, tuple) else ()
        if without := [shard.name for shard in entries if bool(shard.arrow_sha256) != bool(self.columns)]:
            raise DataError(f"shard {without[0]}: arrow_sha256 is {'missing' if self.columns else 'of no column'}")
        check_counts(text_bytes=self.text_bytes, shard_tokens=self.shard_tokens, merged_from=self.merged_from)

    @cached_property
    def shard_tokens_each(self) -> list[int]:
        """Ids of each shard, those of documents that a joined store leaves out included."""
        return [shard.tokens for shard in self.shards]

    @cached_property
    def shard_documents(self) -> list[int]:
        """Documents of each shard, likewise."""
        return [shard.documents for shard in self.shards]

    @property
    def tokens(self) -> int:
        """Ids in the store."""
        return sum(self.shard_tokens_each) - (self.dropped.tokens if self.dropped else 0)

    @property
    def documents(self) -> int:
        """Documents in the store."""
        return sum(self.shard_documents) - (self.dropped.documents if self.dropped else 0)

    @property
    def empty_documents(self) -> int:
        """Documents without a token, which are not in the store."""
        return self.left_out.get(EMPTY, DocumentTotals()).documents

    @property
    def kept(self) -> DocumentTotals:
        """Totals of the documents in the store."""
        return DocumentTotals(documents=self.documents, text_bytes=self.text_bytes, tokens=self.tokens)

    @property
    def is_consistent(self) -> bool:
        """True if the documents read are those stored plus those left out."""
        return self.read == sum(self.left_out.values(), self.kept)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over format, tokenizer, BOS/EOS policy, dtype and the shards with their hashes."""
        identity = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": self.tokenizer.sha256,
            "bos": self.bos,
            "eos": self.eos,
            "dtype": self.dtype,
            "shards": [shard.identity for shard in self.shards],
        }
        if self.dropped is not None:
            identity["dropped"] = self.dropped.sha256
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values, in the order of the file."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "documents": self.documents,
            "tokens": self.tokens,
            **asdict(replace(self, shards=(), columns=())),
            "columns": [asdict(column) for column in self.columns],
            "shards": [asdict(shard) for shard in self.shards],
        }
        for entry in (values["sources"], *values["sources"]["listed"]):
            if not entry["unchecked"]:
                del entry["unchecked"]
        for shard in values["shards"]:
            for name in _METADATA_FIELDS:
                if not shard[name]:
                    del shard[name]
        if not values["sources"]["list_sha256"]:
            del values["sources"]["list_sha256"]
        for name in ("columns", "map", "split", "dropped"):
            if not values[name]:
                del values[name]
        return {**values, "checksum": checksum_of(values)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> "StoreManifest":
        """Parse the values of a `manifest.json`; `source` names it in errors.

        Raises:
            DataError: another format or version, a missing or unknown field, or a hash that does not match.
        """
        fields = dict(values)
        if fields.pop("format", None) != FORMAT:
            raise DataError(f"{source}: not the manifest of a token store (format is not {FORMAT!r})")
        if (version := fields.pop("version", None)) != VERSION:
            raise DataError(
                f"{source}: format version {version!r}; this lt-data reads version {VERSION}: update lt-data"
            )
        if "dropped" in fields:
            raise DataError(f"{source}: dropped is a field of joined stores alone; {_REMEDY}")
        checksum = fields.pop("checksum", None)
        stated = {name: fields.pop(name, None) for name in ("fingerprint", "documents", "tokens")}
        manifest = strict_json.parse(cls, fields, source, _REMEDY)
        actual = {name: getattr(manifest, name) for name in stated}
        wrong = [name for name in stated if stated[name] != actual[name]]
        if wrong or not manifest.is_consistent:
            wrong = wrong or ["read"]
            raise DataError(f"{source}: {', '.join(wrong)} does not match the other fields; {_REMEDY}")
        if checksum != checksum_of({name: values[name] for name in values if name != "checksum"}):
            raise DataError(f"{source}: checksum does not match the fields; {_REMEDY}")
        return manifest


def checksum_of(values: Mapping[str, Any]) -> str:
    """Return SHA-256 (hex) over all other fields, as JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode_manifest(manifest: StoreManifest) -> bytes:
    """Return the bytes of `manifest.json`."""
    return (json.dumps(manifest.to_dict(), indent=2) + "\n").encode()


def read_manifest(folder: Path) -> StoreManifest:
    """Read the manifest of the store in `folder`.

    Raises:
        DataError: it is missing, unreadable or broken.
    """
    path = folder / MANIFEST_FILE
    with translate_os_errors("read the token store's", path):
        content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    return StoreManifest.from_dict(strict_json.load_object(content, str(path), _REMEDY), str(path))
