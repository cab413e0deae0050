"""Model of a hub as a local folder, in the cache of Hugging Face's own tools, where each file is verified.

The library fetches the small files, then the weights: those that the index names, model.safetensors, or else
pytorch_model.bin. A file of the cache is a link to a blob, which is named after the hub's hash of it: SHA-256 of a
large file, git's SHA-1 of a small one. Whenever a model is opened its files are hashed and compared with that, offline
too, so that neither a broken line nor a broken disk goes unseen.

Cost: one read of the files, by several threads.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hf.folder import CHAT_TEMPLATES, CONFIG, GENERATION_CONFIG, TOKENIZER_NAMES, read_json, read_weight_map
from lt_ckpt.hub.address import Address, asking, import_library
from lt_ckpt.parallel import iter_in_threads

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
_SMALL_FILES = (CONFIG, GENERATION_CONFIG, *TOKENIZER_NAMES, f"{CHAT_TEMPLATES}/*.jinja", *_INDEXES)


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """Local copy of a hub's model: its folder, the address asked for, and the commit of its revision."""

    path: Path
    address: Address
    commit: str

    @property
    def about(self) -> dict[str, Any]:
        """Origin, for a manifest."""
        return {"hub": self.address.repo, "asked": str(self.address), "revision": self.commit}


def fetch_model(
    url: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    verify: bool = True,
    progress: files.ProgressCallback | None = None,
) -> HubModel:
    """Download a model of the hub of HF_ENDPOINT; what is in the cache already is not fetched again.

    Args:
        url: `hf://org/name[@revision][/folder]`.
        cache: Cache folder; without it that of Hugging Face's tools (HF_HUB_CACHE).
        verify: Hash the files.
        progress: Called with the bytes that are verified so far and in all.

    Raises:
        CheckpointError: The hub refuses, cannot be reached or has no such model, huggingface_hub is not installed, the
            disk fails, or a file is not the one that the hub has.
    """
    address = Address.parse(url)
    model = _fetch(address, _SMALL_FILES, cache)
    if not (model.path / CONFIG).is_file():
        raise CheckpointError(f"{address}: there is no {CONFIG}: not a model's folder")
    for name, index in zip(_WEIGHTS, _INDEXES, strict=True):
        wanted = [name]
        if is_indexed := (model.path / index).is_file():
            wanted = sorted({str(file) for file in read_weight_map(model.path / index).values()})
        # The single file also where there is an index: a repository with both is refused when it is opened.
        _fetch(replace(address, revision=model.commit), [*wanted, name], cache)
        missing = [shard for shard in wanted if not (model.path / shard).is_file()]
        if not missing:
            if verify:
                _verify(model, [*_SMALL_FILES, *wanted], progress)
            return model
        if is_indexed:
            raise CheckpointError(f"{address}: {index} names {missing[0]!r}, which the repository does not have")
    raise CheckpointError(f"{address}: neither {' nor '.join(_WEIGHTS)} is there, nor an index of one")


def fetch_config(url: str, *, cache: str | os.PathLike[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Download only the config.json of a model of a hub.

    Returns:
        The configuration, and what a manifest should say about the model (its commit is the "revision").

    Raises:
        CheckpointError: As for `fetch_model`.
    """
    model = _fetch(Address.parse(url), (CONFIG,), cache)
    _verify(model, (CONFIG,), None)
    return read_json(model.path / CONFIG), model.about


def _fetch(address: Address, names: Sequence[str], cache: str | os.PathLike[str] | None) -> HubModel:
    """Download files whose names match."""
    prefix = f"{address.subfolder}/" if address.subfolder else ""
    with asking(address):
        path = import_library(address).snapshot_download(
            address.repo,
            revision=address.revision,
            cache_dir=cache,
            allow_patterns=[prefix + name for name in names],
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            library_name="lt-ckpt",
        )
    return HubModel(path=Path(path) / address.subfolder, address=address, commit=Path(path).name)


def _verify(model: HubModel, names: Sequence[str], progress: files.ProgressCallback | None) -> None:
    paths = sorted({path for name in names for path in model.path.glob(name)})
    with translate_os_errors("verifying", model.path):
        links = [os.path.basename(os.readlink(path)) if path.is_symlink() else "" for path in paths]
        sizes, done = [path.stat().st_size for path in paths], 0
        hashes = iter_in_threads(hash_as, zip(paths, links, strict=True))
        for path, link, size, found in zip(paths, links, sizes, hashes, strict=True):
            if found != link:
                raise CheckpointError(
                    f"{path}: is not what the hub has: its hash is {found}, not {link or 'known'}; remove the file and "
                    "what it links to, and try again; the cache (HF_HUB_CACHE) must be on a disk that has links"
                )
            done += size
            if progress is not None:
                progress(done, sum(sizes), "bytes")


def hash_as(path: Path, listed: str) -> str:
    """Return the hash of a file, of the kind that the hub lists for it: SHA-256, or git's SHA-1 of a blob."""
    with open(path, "rb") as file:
        if len(listed) != 40:
            return hashlib.file_digest(file, "sha256").hexdigest()
        data = file.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
