"""What a folder on this machine, or one in a bucket, consists of, and what makes it whole.

A token store is whole where its `manifest.json` lies, which names every shard by its SHA-256; any other folder where
its listing lies (lt_data.remote.contents), which names every file. An upload leaves a listing beside a store's manifest
too, for its packs and for readers of single blocks; a store that other programs have copied does without.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.names import portable
from lt_data.remote.contents import LISTING, Listed, check_name, decode_listing
from lt_data.remote.s3 import S3Folder
from lt_data.storage import os_errors
from lt_data.store.manifest import FILE_NAME as MANIFEST
from lt_data.store.manifest import FORMAT, Manifest
from lt_data.store.megatron import index_size
from lt_data.store.token_store import PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER, TokenStore

MARKS = (LISTING, MANIFEST)  # what makes a folder whole, in the order in which they are written
_LARGEST_MARK = 2**31
_PACK_HEADER = "pack.json"


@dataclass(frozen=True, kw_only=True)
class LocalParcel:
    """A folder on this machine that is to be sent.

    Attributes:
        folder: where it is.
        sizes: its files in the order in which they are sent, a store's manifest left out: name → bytes.
        hashes: the SHA-256 (hex) that the store's manifest tells of some of them.
        manifest: the bytes of the store's manifest; None for a folder of another kind.
    """

    folder: Path
    sizes: dict[str, int]
    hashes: dict[str, str]
    manifest: bytes | None

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(self.sizes.values())


def of_folder(folder: Path) -> LocalParcel:
    """Look at a folder that is to be sent; nothing but a store's manifest is read.

    Raises:
        DataError: it is no folder or has no files, something in it is no plain file, or it is a store in parts.
    """
    sizes: dict[str, int] = {}
    with os_errors("look at", folder):
        for at, folders, files in os.walk(folder, onerror=_raise):
            for name in (*folders, *files):
                path = Path(at, name)
                if path.is_symlink() or not (path.is_dir() if name in folders else path.is_file()):
                    raise DataError(f"{path}: not a plain file or folder: put what it stands for in its place")
            for name in files:
                path = Path(at, name)
                sizes[_name(path.relative_to(folder))] = path.stat().st_size
    if not sizes:
        raise DataError(f"{folder}: there is nothing to upload: no such folder, or no file in it")
    sizes.pop(LISTING, None)  # of an earlier download: made anew
    content = _manifest_of(folder) if MANIFEST in sizes else None
    hashes: dict[str, str] = {}
    if content is not None:
        hashes = file_hashes(TokenStore.open(folder).manifest)
        del sizes[MANIFEST]
    # A pack's description after its arrays, as everywhere: what makes a thing whole comes last.
    ordered = sorted(sizes, key=lambda name: (name.endswith(f"/{_PACK_HEADER}"), name.encode("utf-8", "replace")))
    return LocalParcel(folder=folder, sizes={n: sizes[n] for n in ordered}, hashes=hashes, manifest=content)


def _raise(error: OSError) -> None:
    raise error


def _name(path: Path) -> str:
    name = portable(path.as_posix())
    if not name.isprintable():
        raise DataError(f"{path}: a file name that is no printable UTF-8 cannot be an object's name: rename it")
    return check_name(name, str(path))


def _manifest_of(folder: Path) -> bytes | None:
    with os_errors("read", folder / MANIFEST):
        content = (folder / MANIFEST).read_bytes()
    return content if _is_store(content) else None


def _is_store(content: bytes) -> bool:
    try:
        values = json.loads(content)
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def file_hashes(manifest: Manifest) -> dict[str, str]:
    """The SHA-256 (hex) of every file that a store's manifest names."""
    found = {f"{TOKENIZER_FOLDER}/{name}": sha256 for name, sha256 in manifest.tokenizer.files.items()}
    for shard in manifest.shards:
        found[f"{SHARD_FOLDER}/{shard.name}.bin"] = shard.sha256
        found[f"{SHARD_FOLDER}/{shard.name}.idx"] = shard.idx_sha256
    return found


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """What an object must be: its bytes, and its SHA-256 (hex) and blocks, as far as they are known."""

    n_bytes: int
    sha256: str | None = None
    listed: Listed | None = None


@dataclass(frozen=True, kw_only=True)
class RemoteParcel:
    """A folder in a bucket that is there whole.

    Attributes:
        source: where it lies.
        files: what every file in it must be, a store's manifest left out.
        manifest: the bytes of the store's manifest; None for a folder of another kind.
        identity: another content has another one.
        problems: what is missing there or has another size.
    """

    source: S3Folder
    files: dict[str, RemoteFile]
    manifest: bytes | None
    identity: str
    problems: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.n_bytes for file in self.files.values())

    def store(self) -> Manifest:
        """The description of the store.

        Raises:
            DataError: it is none.
        """
        source = f"{self.source.url}/{MANIFEST}"
        if self.manifest is None:
            raise DataError(f"{self.source.url}: a folder of files, not a token store (no {MANIFEST} of one)")
        return Manifest.from_json(json.loads(self.manifest), source)


def of_bucket(source: S3Folder) -> RemoteParcel:
    """Look at a folder in a bucket; its manifest, its listing and the names in it are read.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        DataError: nothing whole is there: no upload has ended.
    """
    content = source.read(MANIFEST, _LARGEST_MARK)
    listing = source.read(LISTING, _LARGEST_MARK)
    there = source.objects()
    if content is not None and not _is_store(content) and listing is None:
        content = None
    listed = None if listing is None else decode_listing(listing, f"{source.url}/{LISTING}")
    if content is None and listed is None:
        state = f"{len(there)} objects, but no {MANIFEST} and no {LISTING}: an upload that has not ended, or something "
        raise DataError(f"{source.url}: there is {state + 'else' if there else 'nothing'}; check the address")
    if listed is not None and MANIFEST in listed and (content is None or _is_store(content)):
        marked = listed.pop(MANIFEST)
        if content is None or hashlib.sha256(content).hexdigest() != marked.sha256:
            raise DataError(
                f"{source.url}: its {MANIFEST} and {LISTING} do not fit: an upload has not ended; wait or repeat it"
            )
        files = {name: RemoteFile(n_bytes=f.n_bytes, sha256=f.sha256, listed=f) for name, f in listed.items()}
    elif listed is not None:
        content = None
        files = {name: RemoteFile(n_bytes=f.n_bytes, sha256=f.sha256, listed=f) for name, f in listed.items()}
    else:
        assert content is not None
        files = _files_of(Manifest.from_json(json.loads(content), f"{source.url}/{MANIFEST}"), there, source.url)
    identity = hashlib.sha256((content or b"") + b"\n" + (listing or b"")).hexdigest()
    return RemoteParcel(
        source=source, files=files, manifest=content, identity=identity, problems=_problems(files, there)
    )


def _files_of(manifest: Manifest, there: Mapping[str, int], url: str) -> dict[str, RemoteFile]:
    """The files of a store that has no listing: those that the manifest names, and the packs that are there."""
    item = 2 if manifest.dtype == "uint16" else 4
    sizes = {
        f"{TOKENIZER_FOLDER}/{name}": there.get(f"{TOKENIZER_FOLDER}/{name}", -1) for name in manifest.tokenizer.files
    }
    for shard in manifest.shards:
        sizes[f"{SHARD_FOLDER}/{shard.name}.bin"] = shard.tokens * item
        sizes[f"{SHARD_FOLDER}/{shard.name}.idx"] = index_size(shard.documents)
    hashes = file_hashes(manifest)
    files = {check_name(name, url): RemoteFile(n_bytes=size, sha256=hashes[name]) for name, size in sizes.items()}
    for name, size in there.items():
        if name.startswith(f"{PACK_FOLDER}/"):
            files[check_name(name, url)] = RemoteFile(n_bytes=size)
    return files


def _problems(files: Mapping[str, RemoteFile], there: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{name} has {there[name]} bytes, not {file.n_bytes}" if name in there else f"{name} is not there"
        for name, file in files.items()
        if there.get(name) != file.n_bytes
    )
