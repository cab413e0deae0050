"""Small files of a model on a Hugging Face hub, in memory.

The revision is resolved to a commit first. Each file must have the size and the hash of the hub's list (SHA-256 of
large files, git's hash of small ones). With HF_HUB_OFFLINE set, the files are taken from Hugging Face's own cache.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lt_data import storage
from lt_data.errors import DataError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(rf"(?P<repo>{_NAME}(/{_NAME})?)(@(?P<revision>[^@\s]+))?")
_SHORT = re.compile(rf"{_NAME}/{_NAME}(@[^@\s/]+)?")


def is_short_address(text: str) -> bool:
    """Return whether a text has the form `org/name` or `org/name@revision`."""
    return _SHORT.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """Model repository at one revision.

    Attributes:
        name: `org/name`, or the bare name of an old repository.
        revision: branch, tag or commit.
    """

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, address: str) -> "HubRepository":
        """Read `org/name[@revision]`, with or without `hf://` before it.

        Raises:
            DataError: it has another form.
        """
        found = _ADDRESS.fullmatch(address.removeprefix("hf://"))
        if found is None or "--" in found["repo"] or ".." in found["repo"]:
            raise DataError(
                f"{address}: not the name of a model on a hub; write hf://org/name or hf://org/name@revision"
            )
        return cls(name=found["repo"], revision=found["revision"] or "main")

    def __str__(self) -> str:
        return f"hf://{self.name}@{self.revision}"

    def fetch(self, names: Iterable[str], *, max_bytes: int) -> tuple[str, dict[str, bytes]]:
        """Return the commit and, of the files named, those that are there.

        Args:
            names: files at the top of the repository.
            max_bytes: size from which a file is refused.

        Raises:
            DataError: no such model or revision, no access, no network, or another content than the hub lists.
        """
        from lt_data.hub_client import HubClient, is_offline  # imported here: slow, and most tokenizers are local

        if is_offline():
            return self._read_cache(names, max_bytes)
        hub = HubClient.from_environment()
        info = hub.read_info(f"/api/models/{self.name}/revision/{quote(self.revision, safe='')}?blobs=true", str(self))
        listed = _list_files(info, f"{self}: the answer of {hub.endpoint}")
        files: dict[str, bytes] = {}
        for name in names:
            if name in listed:
                what = f"hf://{self.name}@{info['sha']}: {name}"
                path = f"/{self.name}/resolve/{info['sha']}/{quote(name)}"
                files[name] = hub.read(path, what, max_bytes=max_bytes)
                _check(files[name], listed[name], what)
        return info["sha"], files

    def _read_cache(self, names: Iterable[str], max_bytes: int) -> tuple[str, dict[str, bytes]]:
        from huggingface_hub import constants, try_to_load_from_cache

        found: dict[str, Path] = {}
        for name in names:
            path = try_to_load_from_cache(self.name, name, revision=self.revision)
            if isinstance(path, str):
                found[name] = Path(path)
        if not found:
            raise DataError(
                f"{self}: not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, or load the model once "
                "while there is a network"
            )
        (commit,) = {path.parent.name for path in found.values()}
        with storage.translate_os_errors("read", next(iter(found.values())).parent):
            return commit, {name: storage.read_file(path, max_bytes=max_bytes) for name, path in found.items()}


def _list_files(info: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    siblings = info.get("siblings")
    listed: dict[str, dict[str, Any]] = {}
    for entry in siblings if isinstance(siblings, list) else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("rfilename"), str):
            raise DataError(f'{where}: has no list of files in "siblings"; check HF_ENDPOINT')
        listed[entry["rfilename"]] = entry
    return listed


def _check(content: bytes, listed: dict[str, Any], what: str) -> None:
    """Compare a file with the hash of the hub's list; a list without one is refused."""
    lfs = listed.get("lfs")
    if lfs is None:
        wanted = listed.get("blobId")
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    else:
        wanted = lfs.get("sha256") if isinstance(lfs, dict) else None
        found = hashlib.sha256(content).hexdigest()
    if not isinstance(wanted, str) or len(wanted) != len(found):
        raise DataError(f"{what}: the hub lists no hash of it, so it cannot be checked; give a folder that holds it")
    if found != wanted:
        raise DataError(f"{what}: what arrived ({len(content)} bytes) is not what the hub lists; try again")
