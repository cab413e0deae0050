"""Manifest of a token store: `manifest.json`, format "lt-data-store", version 1.

The shards of a store lie in its parts: folders inside its own, with the shards of each. A store that was prepared as
one is one part, "."; one of several units or stores names theirs. The manifest has every shard itself, so the manifests
in those folders are not read. A shard of which a store has not all documents has a mask (lt_data.store.masks).

The manifest holds every hash and every choice that determined the tokens, and nothing else (no date, no machine): the
same text, tokenizer and policy give the same bytes. `fingerprint` identifies the token sequence, wherever its shards
lie; packs and stream states carry it, so that none is used with other data. `checksum` covers all fields. Reading
checks the format, the version, every type, both hashes, and that the documents read are those stored plus those left
out. Full specification: docs/reference/data-formats.md.

Cost: about 10 microseconds a shard to read.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import check_name
from lt_data.storage import read_file, replace_file, translate_os_errors
from lt_data.store.document_sources import SOURCES_FILE
from lt_data.store.manifest_checks import check_counts, check_hashes
from lt_data.store.megatron import index_size
from lt_data.store.source_files import SourceFiles, combine_source_files

FORMAT = "lt-data-store"
VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SHARD_FOLDER = "shards"
UNIT_FOLDER = "units"
"""Of a store that was prepared in several units (lt_data.preparation.units)."""
PACK_FOLDER = "packs"
MAX_MANIFEST_BYTES = 2**31
MAX_TOKENIZER_BYTES = 2**28
MANIFEST_NAME = re.compile(r"manifest(-\d{5,})?\.json")
"""Name of the manifest of a store, or of one of its generations."""
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
        for name in self.files:
            check_name(name, "tokenizer.files")
        check_hashes("sha256 of a tokenizer file", [self.sha256, *self.files.values()])


ColumnType = Literal["string", "int", "float", "bool"]


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """Kept column: field of the records, type of its values, and number of documents without one.

    That number is of the documents before any were masked, also of shards that masks left nothing of.
    """

    name: str
    type: ColumnType
    nulls: int

    def __post_init__(self) -> None:
        check_counts(nulls=self.nulls)


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Documents of a shard that a store has.

    Attributes:
        file: the mask (lt_data.store.masks), relative to the folder of the store.
        sha256: its SHA-256.
        documents: number of documents that the store has.
        tokens: their ids.
    """

    file: str
    sha256: str
    documents: int
    tokens: int

    def __post_init__(self) -> None:
        check_name(self.file, "mask")
        check_hashes(f"sha256 of {self.file}", [self.sha256])
        check_counts(documents=self.documents, tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """Files `shards/<name>.bin`, `.idx`, `.src` and `.arrow` of a part.

    Attributes:
        name: name of the files without their suffix.
        tokens: ids in the file.
        documents: documents in the file.
        sha256: SHA-256 of the ids.
        idx_sha256: SHA-256 of the index.
        src_sha256: SHA-256 of the sources of the documents; "" if they are unknown, and there is no file.
        arrow_sha256: SHA-256 of the kept columns; "" if there are none.
        arrow_bytes: their bytes.
        mask: the documents that the store has; None: all of them.
    """

    name: str
    tokens: int
    documents: int
    sha256: str
    idx_sha256: str
    src_sha256: str = ""
    arrow_sha256: str = ""
    arrow_bytes: int = 0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "shard")
        check_counts(tokens=self.tokens, documents=self.documents, arrow_bytes=self.arrow_bytes)
        if self.kept_documents > self.documents or self.kept_tokens > self.tokens:
            raise DataError(f"mask of shard {self.name}: it keeps more documents or tokens than there are")
        check_hashes(f"sha256 of shard {self.name}", self.hashes.values())

    @property
    def kept_documents(self) -> int:
        """Documents that the store has."""
        return self.documents if self.mask is None else self.mask.documents

    @property
    def kept_tokens(self) -> int:
        """Ids of the documents that the store has."""
        return self.tokens if self.mask is None else self.mask.tokens

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

    def identity(self, number: int) -> dict[str, Any]:
        """Return what determines the tokens of the shard of a number, for the fingerprint."""
        names = ("tokens", "documents", "sha256", "idx_sha256")
        mask = {} if self.mask is None else {"mask": self.mask.sha256}
        return {"name": f"{number:05d}", **{name: getattr(self, name) for name in names}, **mask}


@dataclass(frozen=True, kw_only=True)
class StorePart:
    """Part of a store: a folder with shards.

    Attributes:
        path: the folder, relative to that of the store; "." is the store's own.
        shards: the shards, in document order.
        sources: the source files of its documents.
    """

    path: str = "."
    shards: tuple[ShardFile, ...] = ()
    sources: SourceFiles = field(default_factory=SourceFiles)

    def __post_init__(self) -> None:
        if self.path != ".":
            check_name(self.path, "part")

    def file(self, name: str) -> str:
        """Return the name of a file of the part, relative to the folder of the store."""
        return name if self.path == "." else f"{self.path}/{name}"

    def moved(self, folder: str) -> "StorePart":
        """Return the part as that of a store whose folder is `folder` of another one."""

        def move(shard: ShardFile) -> ShardFile:
            mask = shard.mask
            return shard if mask is None else replace(shard, mask=replace(mask, file=f"{folder}/{mask.file}"))

        path = folder if self.path == "." else f"{folder}/{self.path}"
        return replace(self, path=path, shards=tuple(map(move, self.shards)))


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
class StoreManifest:
    """Manifest of a token store.

        >>> store.manifest.documents == len(store)
        True

    Attributes:
        tokenizer: the tokenizer that encoded the documents.
        bos: whether each document begins with the BOS id.
        eos: whether each document ends with the EOS id.
        dtype: dtype of the token files, little-endian.
        parts: the folders of the shards, in document order.
        text_bytes: UTF-8 bytes of the text of all documents in the store, for bits per byte; 0 if unknown.
        read: all documents that were read; their tokens are those that were encoded.
        left_out: documents that were read and are not in the store, by reason.
        skipped: source records without a document, and ids that an attention mask hides, by reason.
        special_strings: counts of literal special strings in the text of the documents, those included that equal a
            document of an earlier part.
        special_tokens_as: whether such strings were encoded as text or as the special ids.
        selection: the document filter.
        columns: the kept columns.
        map: function of the user that was applied to the records, if any.
        engine: tokenizer engine, and the check that selected it; empty if parts have others.
        shard_tokens: target number of ids of a shard.
        split: the store and the side of the split that made this one, if any.
        appended: fingerprints of the listings of the sources that were appended; their number is that of the
            generation (lt_data.store.generations).
        fingerprint: SHA-256 over everything that determines the tokens.
    """

    tokenizer: TokenizerInfo
    bos: bool
    eos: bool
    dtype: Literal["uint16", "uint32"]
    parts: tuple[StorePart, ...]
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
    split: StoreSplit | None = None
    appended: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for totals in (self.read, *self.left_out.values()):
            check_counts(**asdict(totals))
        for counts in (self.skipped, self.special_strings):
            check_counts(**counts)
        check_counts(text_bytes=self.text_bytes, shard_tokens=self.shard_tokens)
        if not self.parts:
            raise DataError("parts: none")

    @cached_property
    def shards(self) -> tuple[ShardFile, ...]:
        """The shards of all parts, in document order."""
        return tuple(shard for part in self.parts for shard in part.shards)

    @cached_property
    def part_of_shard(self) -> list[int]:
        """Index of the part of each shard."""
        return [index for index, part in enumerate(self.parts) for _ in part.shards]

    @cached_property
    def sources(self) -> SourceFiles:
        """The source files of all parts."""
        return combine_source_files([part.sources for part in self.parts])

    @property
    def tokens(self) -> int:
        """Ids in the store, BOS and EOS included."""
        return sum(shard.kept_tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in the store."""
        return sum(shard.kept_documents for shard in self.shards)

    @property
    def empty_documents(self) -> int:
        """Documents without a token, which are not in the store."""
        return self.left_out.get(EMPTY, DocumentTotals()).documents

    @property
    def kept(self) -> DocumentTotals:
        """Totals of the documents in the store."""
        return DocumentTotals(documents=self.documents, text_bytes=self.text_bytes, tokens=self.tokens)

    def _check_totals(self) -> None:
        """Raise DataError unless the documents read are those stored plus those left out."""
        expected = sum(self.left_out.values(), self.kept)
        for name, count in asdict(expected).items():
            if (stated := getattr(self.read, name)) != count:
                raise DataError(f"read.{name} = {stated}: the documents stored and left out have {count}")

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
            "shards": [shard.identity(number) for number, shard in enumerate(self.shards)],
        }
        return _hash_json(identity)

    def shard_file(self, number: int, kind: str) -> str:
        """Return the name of a file of a shard by its suffix, relative to the folder of the store."""
        part = self.parts[self.part_of_shard[number]]
        return part.file(f"{SHARD_FOLDER}/{self.shards[number].name}.{kind}")

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer's files, relative to that of the store."""
        return self.parts[0].file(TOKENIZER_FOLDER)

    def file_hashes(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of each file of the store but the manifest, by its name in the store's folder."""
        found = {f"{self.tokenizer_folder}/{name}": sha256 for name, sha256 in self.tokenizer.files.items()}
        for part in self.parts:
            if part.sources.list_sha256:
                found[part.file(SOURCES_FILE)] = part.sources.list_sha256
            for shard in part.shards:
                found |= {part.file(f"{SHARD_FOLDER}/{name}"): sha256 for name, sha256 in shard.hashes.items()}
                if shard.mask is not None:
                    found[shard.mask.file] = shard.mask.sha256
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values, in the order of the file."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "documents": self.documents,
            "tokens": self.tokens,
            **asdict(replace(self, parts=(StorePart(),))),
        }
        values["parts"] = [
            {
                "path": part.path,
                "sources": _without_empty(asdict(part.sources), ("unchecked", "list_sha256", "listed")),
                "shards": [_without_empty(asdict(shard), _OPTIONAL) for shard in part.shards],
            }
            for part in self.parts
        ]
        values = _without_empty(values, ("columns", "map", "split", "appended", "engine"))
        return {**values, "checksum": checksum_of(values)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> "StoreManifest":
        """Parse the values of a `manifest.json`; `source` names it in errors.

        Raises:
            DataError: another format or version, a missing or unknown field, a name that leads out of the folder, or a
                hash that does not match.
        """
        fields = dict(values)
        if fields.pop("format", None) != FORMAT:
            raise DataError(f"{source}: not the manifest of a token store (format is not {FORMAT!r})")
        if (version := fields.pop("version", None)) != VERSION:
            raise DataError(
                f"{source}: format version {version!r}; this lt-data reads version {VERSION}: update lt-data"
            )
        checksum = fields.pop("checksum", None)
        stated = {name: fields.pop(name, None) for name in ("fingerprint", "documents", "tokens")}
        manifest = strict_json.parse(cls, fields, source, _REMEDY)
        if wrong := [name for name in stated if stated[name] != getattr(manifest, name)]:
            raise DataError(f"{source}: {', '.join(wrong)} does not match the other fields; {_REMEDY}")
        if checksum != checksum_of({name: values[name] for name in values if name != "checksum"}):
            raise DataError(f"{source}: checksum does not match the fields; {_REMEDY}")
        try:
            manifest._check_totals()
        except DataError as exc:
            raise DataError(f"{source}: {exc}; {_REMEDY}") from None
        return manifest


_OPTIONAL = ("src_sha256", "arrow_sha256", "arrow_bytes", "mask")


def _without_empty(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value or name not in names}


def checksum_of(values: Mapping[str, Any]) -> str:
    """Return SHA-256 (hex) over all other fields, as JSON with sorted keys and no spaces."""
    return _hash_json(values)


def _hash_json(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode_manifest(manifest: StoreManifest) -> bytes:
    """Return the bytes of `manifest.json`."""
    return (json.dumps(manifest.to_dict(), indent=2) + "\n").encode()


def manifest_file(path: Path) -> Path:
    """Return the manifest of a store: of its folder, or a file of that name (lt_data.store.generations)."""
    return path if MANIFEST_NAME.fullmatch(path.name) else path / MANIFEST_FILE


def read_manifest(path: Path) -> StoreManifest:
    """Read the manifest of a store, given as its folder or as this file.

    Raises:
        DataError: it is missing, unreadable or broken.
    """
    path = manifest_file(path)
    if not path.exists() and (path.parent / UNIT_FOLDER).is_dir():
        raise DataError(f"{path.parent}: not all of its units are prepared; run the same lt data prepare again")
    if path.parent.exists() and not path.exists():
        remedy = f"to make one of its text: lt data prepare {path.parent} --tokenizer TOKENIZER --out STORE"
        raise DataError(f"{path.parent} is not a token store (it has no {path.name}); {remedy}")
    with translate_os_errors("read the token store's", path):
        content = read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    return StoreManifest.from_dict(strict_json.load_object(content, str(path), _REMEDY), str(path))


def write_manifest(manifest: StoreManifest, path: Path) -> None:
    """Write a manifest so that a reader sees the one before or this.

    Raises:
        DataError: a file system error; nothing is left.
    """
    replace_file(path, encode_manifest(manifest))
