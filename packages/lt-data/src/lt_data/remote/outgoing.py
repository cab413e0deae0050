"""What a folder on this machine consists of that is to be sent (one in a bucket: lt_data.remote.parcel).

Cost: each file is looked at, and none but a store's manifest is read.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.packing.pack_header import PACK_FILE as PACK_HEADER
from lt_data.remote.contents import LISTING, check_name
from lt_data.remote.parcel import file_hashes, is_joined, is_store
from lt_data.storage import translate_os_errors
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.manifest import PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER, encode_manifest
from lt_data.store.token_store import TokenStore


@dataclass(frozen=True, kw_only=True)
class LocalParcel:
    """A folder on this machine that is to be sent.

    Attributes:
        folder: where it is.
        paths: the files that lie elsewhere, those of the parts of a joined store, which becomes a flat one.
        sizes: its files in the order in which they are sent, a store's manifest left out: name → bytes.
        hashes: the SHA-256 (hex) that the store's manifest tells of some of them.
        manifest: the bytes of the store's manifest; None for a folder of another kind.
    """

    folder: Path
    sizes: dict[str, int]
    hashes: dict[str, str]
    manifest: bytes | None
    paths: dict[str, Path] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where a file is."""
        return self.paths.get(name, self.folder / name)

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
    with translate_os_errors("look at", folder):
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
    sizes.pop(LISTING, None)  # of an earlier download: written again
    content = _manifest_of(folder) if MANIFEST in sizes else None
    hashes: dict[str, str] = {}
    paths: dict[str, Path] = {}
    if content is not None:
        store = TokenStore.open(folder)
        hashes = file_hashes(store.manifest)
        if store.is_joined:
            content = encode_manifest(store.manifest)
            paths = _paths_of(store)
            sizes = {}
            with translate_os_errors("look at", folder):
                sizes |= {name: path.stat().st_size for name, path in paths.items()}
        sizes.pop(MANIFEST, None)
    # A pack's description after its arrays, as everywhere: what makes a thing whole comes last.
    ordered = sorted(sizes, key=lambda name: (name.endswith(f"/{PACK_HEADER}"), name.encode("utf-8", "replace")))
    return LocalParcel(
        folder=folder, sizes={n: sizes[n] for n in ordered}, hashes=hashes, manifest=content, paths=paths
    )


def _paths_of(store: TokenStore) -> dict[str, Path]:
    """Return the files of a joined store, by their names in a flat store."""
    paths = {f"{TOKENIZER_FOLDER}/{name}": store.tokenizer_folder / name for name in store.manifest.tokenizer.files}
    for number, shard in enumerate(store.manifest.shards):
        for name in shard.hashes:
            paths[f"{SHARD_FOLDER}/{name}"] = store.shard_path(number, name.rpartition(".")[2])
    packs = store.pack_folder()
    for path in packs.glob("*/*"):
        paths[f"{PACK_FOLDER}/{_name(path.relative_to(packs))}"] = path
    return paths


def _raise(error: OSError) -> None:
    raise error


def _name(path: Path) -> str:
    name = to_portable_name(path.as_posix())
    if not name.isprintable():
        raise DataError(f"{path}: a file name that is no printable UTF-8 cannot be an object's name: rename it")
    return check_name(name, str(path))


def _manifest_of(folder: Path) -> bytes | None:
    with translate_os_errors("read", folder / MANIFEST):
        content = (folder / MANIFEST).read_bytes()
    return content if is_store(content) or is_joined(content) else None
