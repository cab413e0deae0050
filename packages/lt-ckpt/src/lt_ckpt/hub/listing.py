"""File list of a model repository, and the files of it that a conversion needs; pure.

Names are taken from the hub's list and from the weights' index only if they are plain file names. The list must give
each file's size and hash (SHA-256 of large files, git's hash of small ones), so that all that arrives can be checked.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt import strict_json
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, SINGLE_FILE, is_model_file

SHA1, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
MAX_FILE_BYTES = 50 * 10**9
"""Largest file that the hub sends over plain https; larger ones come by hf-xet alone."""
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".gguf")
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """File as the hub lists it.

    Attributes:
        name: Path in the repository.
        n_bytes: Size.
        digest: SHA-256 of the bytes (64 hex digits), or git's SHA-1 of them as a blob (40).
    """

    name: str
    n_bytes: int
    digest: str

    def hash_file(self, path: Path) -> str:
        """Return the hash of a local file, of the kind that the hub gives for this one."""
        is_sha256 = len(self.digest) == 64
        found = hashlib.sha256() if is_sha256 else hashlib.sha1(usedforsecurity=False)
        if not is_sha256:
            found.update(b"blob %d\0" % path.stat().st_size)
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
        return found.hexdigest()


def list_model_files(listing: dict[str, Any], folder: str, where: str) -> dict[str, HubFile]:
    """Return the files that may be needed, by their plain names.

    Args:
        listing: The hub's answer for a revision.
        folder: Folder in the repository, or empty.
        where: The address, for messages.

    Raises:
        CheckpointError: Not a model's folder, or a file of it without size or hash.
    """
    prefix = f"{folder}/" if folder else ""
    found: dict[str, HubFile] = {}
    others: set[str] = set()
    for entry in strict_json.get_field(listing, "siblings", list, f"{where}: the hub's list"):
        name = entry.get("rfilename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise CheckpointError(f"{where}: the hub's list has an entry without a name")
        plain = name.removeprefix(prefix)
        if not name.startswith(prefix) or not (is_model_file(plain) or _SHARD.fullmatch(plain)):
            others.add(name)
            continue
        if plain in found:
            raise CheckpointError(f"{where}: the hub's list names {name!r} twice")
        found[plain] = _read_entry(name, entry, where)
    if CONFIG not in found:
        raise CheckpointError(f"{where}: there is no {prefix}{CONFIG}: not a model's folder")
    if INDEX_FILE not in found and SINGLE_FILE not in found:
        old = sorted(name for name in others if name.startswith(prefix) and name.endswith(_OTHER_WEIGHTS))
        raise CheckpointError(
            f"{where}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
            + (f", only {old[0]!r} and the like; download that by hand and convert the file" if old else "")
        )
    return found


def _read_entry(name: str, entry: dict[str, Any], where: str) -> HubFile:
    n_bytes, digest, lfs = entry.get("size"), entry.get("blobId"), entry.get("lfs")
    kind = SHA1
    if lfs is not None:  # then the blob is git's pointer to the file
        digest, kind = lfs.get("sha256") if isinstance(lfs, dict) else None, SHA256
    if type(n_bytes) is not int or n_bytes < 0 or not isinstance(digest, str) or not kind.fullmatch(digest):
        raise CheckpointError(
            f"{where}: the hub's list has no size or no hash of {name!r}, so what arrives could not be checked; use a "
            "hub that gives them, or download the model by other means and give its folder"
        )
    if n_bytes > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{where}: {name!r} has {n_bytes} bytes; files over {MAX_FILE_BYTES} come by hf-xet alone: download the "
            "model with `hf download` and give its folder"
        )
    return HubFile(name=name, n_bytes=n_bytes, digest=digest)


def list_shards(index: dict[str, Any], listed: Mapping[str, HubFile], where: str) -> list[str]:
    """Return the files that an index names; each must be a plain name that the hub lists."""
    names: set[str] = set()
    for tensor, name in strict_json.get_field(index, "weight_map", dict, where).items():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckpointError(f"{where}: {tensor!r} lies in {name!r}, no safetensors file's name")
        if name not in listed:
            raise CheckpointError(f"{where}: {tensor!r} lies in {name!r}, which the hub does not list")
        names.add(name)
    return sorted(names)
