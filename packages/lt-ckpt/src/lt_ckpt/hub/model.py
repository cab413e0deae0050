"""`hf://org/name@revision/subfolder` as a source: a model of a Hugging Face hub, brought into a local folder once.

The revision is resolved to a commit, and the folder is named after the commit, so what was downloaded is what its name
says, for ever, and no request is made for a commit that is there completely. Only what a conversion needs is fetched:
config.json, the safetensors that the index names, generation config and tokenizer; names are taken from the hub's
list and from the index only when they are plain file names. `.lt-hub.json` is written when all files are there; it is
what makes a folder complete. A lock per commit lets one process download while the others wait.

    <cache>/<org>--<name>/<commit>.lock
    <cache>/<org>--<name>/<commit>[/subfolder]/{config.json,model.safetensors,...,.lt-hub.json}

Cost: one request for the list, one for each file; each byte is written once and hashed on its way.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from lt_ckpt import files, strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, MAX_JSON_BYTES, SINGLE_FILE, TOKENIZER_NAMES, read_json
from lt_ckpt.hub.download import SHA1, SHA256, HubFile, download
from lt_ckpt.hub.http import Hub
from lt_ckpt.summary import format_bytes

RECORD = ".lt-hub.json"
SMALL = ("generation_config.json", *TOKENIZER_NAMES, "tokenizer.model")
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@((?:refs/(?:pr|convert)/)?[^/@]+))?(?:/(.+))?")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True, kw_only=True)
class Address:
    """What an hf:// address names.

    Attributes:
        repo: `org/name`.
        revision: A branch, a tag or a commit.
        subfolder: A folder in the repository, or empty.
    """

    repo: str
    revision: str = "main"
    subfolder: str = ""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Reads an address; a `CheckpointError` says what it must look like.

        A revision with a slash is written with %2F; `refs/pr/1` and `refs/convert/...` may be written as they are.
        """
        found = _ADDRESS.fullmatch(url)
        repo, revision, subfolder = found.groups(default="") if found else ("", "", "")
        revision = unquote(revision) or "main"
        plain = all(re.fullmatch(_NAME, part) for part in subfolder.split("/")) if subfolder else True
        odd = "--" in repo or ".." in repo or re.search(r"[\x00-\x20\x7f]", revision)
        if not repo or odd or not plain:
            raise CheckpointError(
                f"{url}: must be hf://org/name, hf://org/name@revision or hf://org/name@revision/folder"
            )
        return cls(repo=repo, revision=revision, subfolder=subfolder)

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}" + (f"/{self.subfolder}" if self.subfolder else "")


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of a hub that is here.

    Attributes:
        path: The local folder.
        address: What was asked for.
        commit: The commit that its revision was.
    """

    path: Path
    address: Address
    commit: str

    @property
    def about(self) -> dict[str, Any]:
        """What a manifest should say about it."""
        return {"hub": self.address.repo, "asked": str(self.address), "revision": self.commit}


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns where models of hubs are kept: `lt/hub` in XDG_CACHE_HOME or ~/.cache."""
    values = os.environ if environ is None else environ
    return Path(values.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lt" / "hub"


def fetch_model(
    url: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    hub: Hub | None = None,
    progress: files.ProgressCallback | None = None,
) -> HubModel:
    """Brings a model of a hub here; what is here already is not fetched again.

    Args:
        url: `hf://org/name[@revision][/folder]`.
        cache: Where models are kept; without it `cache_folder()`.
        hub: Whom to ask; without it the hub of HF_ENDPOINT, with the token of HF_TOKEN or of `hf auth login`.
        progress: Told the bytes that are here and that there will be.

    Returns:
        The folder and the commit.

    Raises:
        CheckpointError: The hub refuses, cannot be reached or lists no such model, or the disk fails. What was fetched
            stays, and the next call goes on from there.
    """
    address = Address.parse(url)
    shelf = Path(cache if cache is not None else cache_folder()) / address.repo.replace("/", "--")
    if SHA1.fullmatch(address.revision):
        found = _here(shelf, address, address.revision)
        if found is not None:
            return found
    hub = hub or Hub()
    commit, listed = _ask(hub, address, shelf)
    with translate_os_errors("making the cache", shelf):
        files.make_folders(shelf)
    with _locked(shelf / f"{commit}.lock"):
        found = _here(shelf, address, commit)
        if found is None:
            folder = shelf / commit / address.subfolder
            _fill(hub, address, commit, listed, folder, progress)
            found = HubModel(path=folder, address=address, commit=commit)
    return found


def fetch_config(
    url: str, *, cache: str | os.PathLike[str] | None = None, hub: Hub | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Brings only the config.json of a model of a hub here, for what needs its shape and not yet its weights.

    Args:
        url: `hf://org/name[@revision][/folder]`.
        cache: As for `fetch_model`, which goes on from what is here then.
        hub: As for `fetch_model`.

    Returns:
        The configuration, and what a manifest should say about the model (its commit is the "revision").

    Raises:
        CheckpointError: As for `fetch_model`.
    """
    address = Address.parse(url)
    shelf = Path(cache if cache is not None else cache_folder()) / address.repo.replace("/", "--")
    if SHA1.fullmatch(address.revision):
        found = _here(shelf, address, address.revision)
        if found is not None:
            return read_json(found.path / CONFIG), found.about
    hub = hub or Hub()
    commit, listed = _ask(hub, address, shelf)
    model = HubModel(path=shelf / commit / address.subfolder, address=address, commit=commit)
    with translate_os_errors("making the cache", shelf):
        files.make_folders(model.path)
    with _locked(shelf / f"{commit}.lock"):
        if not (model.path / CONFIG).is_file():  # only a whole, checked file has this name
            path = f"/{address.repo}/resolve/{commit}/{quote(listed[CONFIG].name)}"
            download(hub, path, address.repo, listed[CONFIG], model.path / CONFIG)
    return read_json(model.path / CONFIG), model.about


def _ask(hub: Hub, address: Address, shelf: Path) -> tuple[str, dict[str, HubFile]]:
    """Returns the commit that an address names, and the files of the hub's list that may be needed."""
    if hub.offline:
        kept = [name for name in _entries(shelf) if SHA1.fullmatch(name) and _here(shelf, address, name) is not None]
        raise CheckpointError(
            f"{address}: HF_HUB_OFFLINE is set, and the hub has to be asked for this; commits that are here and can be "
            f"given instead of {address.revision}: {', '.join(kept) or 'none'}"
        )
    path = f"/api/models/{address.repo}/revision/{quote(address.revision, safe='')}?blobs=true"
    listing = hub.insist(str(address), lambda: hub.json(path, address.repo))
    commit = listing.get("sha")
    if not isinstance(commit, str) or not SHA1.fullmatch(commit):
        raise CheckpointError(f"{address}: {hub.endpoint} names no commit; does HF_ENDPOINT lead to a hub?")
    if SHA1.fullmatch(address.revision) and commit != address.revision:
        raise CheckpointError(f"{address}: {hub.endpoint} answers for another commit, {commit}")
    return commit, _listed(listing, address)


def _entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _here(shelf: Path, address: Address, commit: str) -> HubModel | None:
    """Returns the model when all of it is here, by its record and the sizes of its files."""
    folder = shelf / commit / address.subfolder
    with translate_os_errors("reading", folder / RECORD):
        if not (folder / RECORD).exists():
            return None
        record = strict_json.loads(files.read_bounded(folder / RECORD, MAX_JSON_BYTES), str(folder / RECORD))
        strict_json.check_format_version(record, "lt-hub", 1, str(folder / RECORD))
        listed = strict_json.get_field(record, "files", dict, str(folder / RECORD))
        for name, n_bytes in listed.items():
            with suppress(FileNotFoundError):
                if os.stat(folder / name).st_size == n_bytes:
                    continue
            return None
    return HubModel(path=folder, address=address, commit=commit)


def _listed(listing: dict[str, Any], address: Address) -> dict[str, HubFile]:
    """Returns the files of the hub's list that lie in the folder asked for and may be needed, by their plain names."""
    where = f"{address}: the hub's list"
    prefix = f"{address.subfolder}/" if address.subfolder else ""
    found: dict[str, HubFile] = {}
    others: set[str] = set()
    for entry in strict_json.get_field(listing, "siblings", list, where):
        name = entry.get("rfilename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise CheckpointError(f"{where}: has an entry without a name")
        plain = name.removeprefix(prefix)
        if not name.startswith(prefix) or (plain not in (CONFIG, INDEX_FILE, *SMALL) and not _SHARD.fullmatch(plain)):
            others.add(name)
            continue
        if plain in found:
            raise CheckpointError(f"{where}: names {name!r} twice")
        n_bytes, blob, lfs = entry.get("size"), entry.get("blobId"), entry.get("lfs")
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
        found[plain] = HubFile(
            name=name,
            n_bytes=n_bytes if type(n_bytes) is int and n_bytes >= 0 else None,
            sha256=sha256 if isinstance(sha256, str) and SHA256.fullmatch(sha256) else None,
            blob=blob if isinstance(blob, str) and SHA1.fullmatch(blob) else None,
        )
    if CONFIG not in found:
        raise CheckpointError(f"{address}: there is no {prefix}{CONFIG}: not a model's folder")
    if INDEX_FILE not in found and SINGLE_FILE not in found:
        old = sorted(name for name in others if name.startswith(prefix) and name.endswith(_OTHER_WEIGHTS))
        raise CheckpointError(
            f"{address}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
            + (f", only {old[0]!r} and the like; download that by hand and convert the file" if old else "")
        )
    return found


def _shards(index: Path, listed: Mapping[str, HubFile], address: Address) -> list[str]:
    """Returns the files that an index names; each must be a plain name that the hub lists."""
    with translate_os_errors("reading", index):
        obj = strict_json.loads(files.read_bounded(index, MAX_JSON_BYTES), f"{address}: {INDEX_FILE}")
    names = set()
    for tensor, name in strict_json.get_field(obj, "weight_map", dict, f"{address}: {INDEX_FILE}").items():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckpointError(f"{address}: {INDEX_FILE}: {tensor!r} lies in {name!r}, no safetensors file's name")
        if name not in listed:
            raise CheckpointError(f"{address}: {INDEX_FILE}: {tensor!r} lies in {name!r}, which the hub does not list")
        names.add(name)
    return sorted(names)


def _fill(
    hub: Hub,
    address: Address,
    commit: str,
    listed: Mapping[str, HubFile],
    folder: Path,
    progress: files.ProgressCallback | None,
) -> None:
    """Downloads all files of a model, and writes the record last."""
    with translate_os_errors("making the cache", folder):
        files.make_folders(folder)
        for left in (RECORD, f"{RECORD}.tmp"):  # of a download that was cut off, or of files that are gone since
            (folder / left).unlink(missing_ok=True)
    done = total = 0

    def told(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, max(total, done), "bytes")

    def get(name: str) -> int:
        file, target = listed[name], folder / name
        with translate_os_errors("looking for", target):
            if target.is_file() and (file.n_bytes is None or target.stat().st_size == file.n_bytes):
                told(target.stat().st_size)  # only a whole, checked file has this name
                return target.stat().st_size
            target.unlink(missing_ok=True)
        path = f"/{address.repo}/resolve/{commit}/{quote(file.name)}"
        return download(hub, path, address.repo, file, target, told)

    small = [name for name in (CONFIG, INDEX_FILE, *SMALL) if name in listed]
    sizes = {name: get(name) for name in small}
    weights = _shards(folder / INDEX_FILE, listed, address) if INDEX_FILE in listed else [SINGLE_FILE]
    total = done + sum(listed[name].n_bytes or 0 for name in weights)
    _need_room(address, folder, weights, listed)
    for name in weights:
        sizes[name] = get(name)
    record = {"format": "lt-hub", "version": 1, "repo": address.repo, "commit": commit, "files": sizes}
    with translate_os_errors("finishing the download", folder):
        files.write_file(folder / RECORD, strict_json.dumps(record, RECORD))


def _need_room(address: Address, folder: Path, names: list[str], listed: Mapping[str, HubFile]) -> None:
    """Says at once, and not after hours, that a model does not fit."""
    with translate_os_errors("looking at the free space", folder):
        here = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.startswith(tuple(names)))
        free = shutil.disk_usage(folder).free
    need = sum(listed[name].n_bytes or 0 for name in names) - here
    if need > free:
        raise CheckpointError(
            f"{address}: {format_bytes(need)} have to be fetched and {format_bytes(free)} are free at {folder}; free "
            "some space or give another cache folder (XDG_CACHE_HOME)"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock, and holds it; it ends with the process."""
    with translate_os_errors("locking the cache", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with translate_os_errors("locking the cache", path):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
