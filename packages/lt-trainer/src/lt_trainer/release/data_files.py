"""Data of a release: manifests and packs, and tokens and sources as far as their licenses allow.

    data/STORE/manifest.json, tokenizer/, packs/*/pack.json      of every store
    data/STORE/shards/, packs/*/*.npy                            the tokens, if all its sources may be redistributed
    sources/STORE/NUMBER-NAME                                    each source file that may be redistributed
    data/sources.jsonl                                           a line per source file: `SourceEntry`

A store is released under the name of its field of the recipe: `train`, `train-NAME` of a mixture, `validation`,
`validation-NAME`, its parts as `parts/NUMBER` if they are several. Names of sources pass the filter, so the manifest's
checksum is that of the filtered one; its fingerprint, which identifies the tokens, does not change.
Sources are numbered in the order in which they were read, so a folder of them is prepared to the same tokens.

Cost: one read of all tokens (they are verified first) and of the source files; a copy of what is included.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from lt_data import TokenStore
from lt_data.file_names import to_local_name
from lt_data.packing.pack_index import PACK_FILE
from lt_data.packing.packs import open_pack
from lt_data.sources.reader import summarize_sources
from lt_data.store.document_sources import SOURCES_FILE, encode_source_files
from lt_data.store.manifest import MANIFEST_FILE, PACK_FOLDER, StoreManifest, StorePart, encode_manifest
from lt_data.store.masks import MASK_FOLDER
from lt_trainer.config.data_section import DataOptions
from lt_trainer.evaluation.store_losses import files_of_documents
from lt_trainer.release.bundle import InsidePath, Record, hash_file
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile
from lt_trainer.release.mof import is_open_license

SOURCE_LIST = "data/sources.jsonl"
MAX_NAME = 120
"""Characters of a source's name in the release, its end with the suffix."""


class SourceEntry(Record):
    """Source file of a released store.

    Attributes:
        store: Name of the store in the release.
        path: Name of the file in the store's manifest, filtered.
        bytes: Its size.
        sha256: SHA-256 of its content.
        documents: Documents of the store that are from it; None if the store does not know.
        tokens: Their ids; None likewise.
        license: SPDX expression; "" if none was given.
        redistribute: Whether it may be redistributed, as was given.
        url: Where it can be obtained; may be "".
        file: Path in the release, or in the folder in which it is repeated if it is not in the release.
        left_out: Why it is not in the release; "" if it is.
    """

    store: str
    path: str
    bytes: int
    sha256: str
    documents: int | None
    tokens: int | None
    license: str
    redistribute: bool
    url: str
    file: InsidePath
    left_out: str

    @property
    def problem(self) -> str:
        """Reason why the file does not count as released openly; "" if it does."""
        if not self.license:
            return f"source {self.path} has no license"
        if not is_open_license(self.license):
            return f"source {self.path}: {self.license} is not a license that counts as open"
        if not self.redistribute:
            return f"source {self.path} may not be redistributed"
        if self.left_out and not self.url:
            return f"source {self.path} is not in the release ({self.left_out}) and has no url"
        return ""


def store_names(data: DataOptions) -> dict[str, tuple[str, str]]:
    """Return the name in the release of each store of a recipe, with its field and path."""
    named: dict[str, tuple[str, str]] = {}
    for field, path in data.store_paths().items():
        parts = field.split(".")
        kind = "validation" if parts[1].startswith("validation") else "train"
        named[f"{kind}-{parts[2]}" if len(parts) > 2 else kind] = (field, path)
    return named


class StoreToRelease:
    """Store of the run and what of it is released; hashes the source files that may be redistributed.

    Args:
        name: Its name in the release.
        store: The store.
        data: Section of the recipe, which names the pack.
        licenses: What is said about its sources.
        text_filter: Filter of their names.
        source_folders: Where source files are looked for by hash, besides their own paths.

    Attributes:
        entries: Its source files.
        has_tokens: True if its tokens are released: all its sources are known and may be redistributed.
    """

    def __init__(
        self,
        name: str,
        store: TokenStore,
        data: DataOptions,
        licenses: LicenseFile,
        text_filter: TextFilter,
        source_folders: Sequence[Path],
    ) -> None:
        self.name, self.store, self._text_filter = name, store, text_filter
        self._pack = open_pack(store, seq_len=data.seq_len, mode=data.packing)
        sizes = {file.bytes for file in store.source_files if licenses.source(file.path).redistribute}
        own = [Path(to_local_name(file.path)) for file in store.source_files if "://" not in file.path]
        below = [path for folder in source_folders for path in sorted(folder.rglob("*"))]
        found = [path for path in (*own, *below) if path.is_file() and path.stat().st_size in sizes]
        self._paths = {hash_file(path): path for path in found}
        index, n_files = files_of_documents(store), len(store.source_files)
        documents, tokens = np.bincount(index, minlength=n_files), np.zeros(n_files, np.int64)
        if store.has_sources:
            np.add.at(tokens, index, store.lengths.astype(np.int64))
        self.entries: list[SourceEntry] = []
        for number, file in enumerate(store.source_files):
            given = licenses.source(file.path)
            left_out = (
                "" if file.sha256 in self._paths else "no file with its hash was found where the release was made"
            )
            self.entries.append(
                SourceEntry(
                    store=name,
                    path=readable_path(text_filter.apply(file.path)),
                    bytes=file.bytes,
                    sha256=file.sha256,
                    documents=int(documents[number]) if store.has_sources else None,
                    tokens=int(tokens[number]) if store.has_sources else None,
                    license=given.license or "",
                    redistribute=given.redistribute,
                    url=given.url,
                    file=f"sources/{name}/{number:06}-{name_in_release(file.path)}",
                    left_out=left_out if given.redistribute else "nothing says that it may be redistributed",
                )
            )
        self.has_tokens = bool(self.entries) and all(entry.license and entry.redistribute for entry in self.entries)

    @property
    def is_joined(self) -> bool:
        """True if it has parts that are not units of one `prepare`: it is joined, split or appended to."""
        return any(part.path != "." and not part.path.startswith("units/") for part in self.store.manifest.parts)

    def write(self, bundle: Path) -> None:
        """Write manifest, tokenizer and pack into the release; tokens and sources as far as allowed."""
        folder, store = bundle / "data" / self.name, self.store
        manifest = _filter_manifest(store, self._text_filter)
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
        files = [dataclasses.replace(file, path=self._text_filter.apply(file.path)) for file in store.source_files]
        for part in manifest.parts:
            if part.sources.list_sha256:
                (folder / part.path).mkdir(parents=True, exist_ok=True)
                (folder / part.file(SOURCES_FILE)).write_bytes(encode_source_files(files[: part.sources.files]))
            files = files[part.sources.files :]
        assert self._pack.folder is not None
        packed = [file for file in self._pack.folder.iterdir() if file.name == PACK_FILE or self.has_tokens]
        copied = {f"{PACK_FOLDER}/{self._pack.folder.name}/{file.name}": file for file in packed}
        tokenizer = store.folder / store.manifest.tokenizer_folder
        copied |= {f"{manifest.tokenizer_folder}/{name}": tokenizer / name for name in manifest.tokenizer.files}
        for number, shard in enumerate(manifest.shards if self.has_tokens else ()):
            kinds = [name.rpartition(".")[2] for name in shard.hashes]
            copied |= {manifest.shard_file(number, kind): store.shard_path(number, kind) for kind in kinds}
            mask = store.manifest.shards[number].mask
            if shard.mask is not None and mask is not None:
                copied[shard.mask.file] = store.folder / mask.file
        targets = {folder / name: path for name, path in copied.items()}
        targets |= {bundle / entry.file: self._paths[entry.sha256] for entry in self.entries if not entry.left_out}
        for target, path in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def readable_path(path: str) -> str:
    r"""Return a path as `SourceEntry` has it: bytes that are no UTF-8 are the text `\udcff`."""
    return path.encode("utf-8", "backslashreplace").decode()


def name_in_release(path: str) -> str:
    """Return the file name of a source in the release: its own with `_` for unusual characters, and with a suffix."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.rpartition("/")[2])[-MAX_NAME:]
    return name if PurePosixPath(name).suffix else f"{name}.txt"  # as which a file without one was read


def _filter_manifest(store: TokenStore, text_filter: TextFilter) -> StoreManifest:
    """Return the manifest with filtered names of sources and tokenizer, and parts and masks by number."""
    manifest, parts, shards = store.manifest, list[StorePart](), 0
    files = [dataclasses.replace(file, path=text_filter.apply(file.path)) for file in store.source_files]
    for number, part in enumerate(manifest.parts):
        mine, files = files[: part.sources.files], files[part.sources.files :]
        sources = summarize_sources(mine, skipped_links=part.sources.skipped_links) if mine else part.sources
        masks = [
            shard.mask and dataclasses.replace(shard.mask, file=f"{MASK_FOLDER}/{place:05d}.keep")
            for place, shard in enumerate(part.shards, start=shards)
        ]
        named = (dataclasses.replace(shard, mask=mask) for shard, mask in zip(part.shards, masks, strict=True))
        path = f"parts/{number:05d}" if len(manifest.parts) > 1 else "."
        parts.append(StorePart(path=path, shards=tuple(named), sources=sources))
        shards += len(part.shards)
    tokenizer = dataclasses.replace(manifest.tokenizer, name=text_filter.apply(manifest.tokenizer.name))
    return dataclasses.replace(manifest, parts=tuple(parts), tokenizer=tokenizer, appended=())


def write_source_list(bundle: Path, stores: Sequence[StoreToRelease]) -> None:
    """Write `data/sources.jsonl`."""
    (bundle / "data").mkdir(exist_ok=True)
    lines = [f"{json.dumps(entry.model_dump())}\n" for released in stores for entry in released.entries]
    (bundle / SOURCE_LIST).write_text("".join(lines), encoding="utf-8")


def read_source_list(bundle: Path) -> list[SourceEntry]:
    """Read `data/sources.jsonl`; a ValueError for a line of another form, or with a path out of the release."""
    lines = (bundle / SOURCE_LIST).read_text(encoding="utf-8").split("\n")[:-1]
    return [SourceEntry.model_validate_json(line) for line in lines]
