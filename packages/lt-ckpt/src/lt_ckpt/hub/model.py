"""`hf://org/name@revision/subfolder` as a source: a model of a Hugging Face hub, in a local folder.

The revision is resolved to a commit, and the folder is named after the commit, so what was downloaded is what its name
says, for ever, and no request is made for a commit that is there completely. Only what a conversion needs is fetched:
config.json, the safetensors that the index names, generation config and tokenizer. `.lt-hub.json` is written when all
files are there; it is what makes a folder complete. A lock per commit lets one process download while the others wait.

    <cache>/<org>--<name>/<commit>.lock
    <cache>/<org>--<name>/<commit>[/subfolder]/{config.json,model.safetensors,...,.lt-hub.json}

Only `client` needs huggingface_hub (`lt-ckpt[hub]`); a commit that is here is opened without it.

Cost: one request for the list, one for each file.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from lt_ckpt import files, strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, SINGLE_FILE, is_model_file, read_json
from lt_ckpt.hub.listing import SHA1, HubFile, list_model_files, list_shards
from lt_ckpt.summary import format_bytes

if TYPE_CHECKING:
    from lt_ckpt.hub.client import Hub

RECORD = ".lt-hub.json"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@((?:refs/(?:pr|convert)/)?[^/@]+))?(?:/(.+))?")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Model on a hub, as an hf:// address names it.

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
        """Read an address.

        A revision with a slash is written with %2F; `refs/pr/1` and `refs/convert/...` may be written as they are.

        Raises:
            CheckpointError: It has another form.
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
    """Local copy of a hub's model.

    Attributes:
        shelf: Folder of the repository in the cache.
        address: Address asked for.
        commit: Commit of its revision.
    """

    shelf: Path
    address: Address
    commit: str

    @property
    def path(self) -> Path:
        """The local folder."""
        return self.shelf / self.commit / self.address.subfolder

    @property
    def about(self) -> dict[str, Any]:
        """Origin, for a manifest."""
        return {"hub": self.address.repo, "asked": str(self.address), "revision": self.commit}


def cache_folder() -> Path:
    """Return the folder of models of hubs: `lt/hub` in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lt" / "hub"


def fetch_model(
    url: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: files.ProgressCallback | None = None,
) -> HubModel:
    """Download a model of the hub of HF_ENDPOINT; what is here already is not fetched again.

    Args:
        url: `hf://org/name[@revision][/folder]`.
        cache: Folder of models; without it `cache_folder()`.
        progress: Called with the bytes that are here and that there will be.

    Returns:
        The folder and the commit.

    Raises:
        CheckpointError: The hub refuses, cannot be reached or lists no such model, huggingface_hub is not installed, or
            the disk fails. What was fetched stays, and the next call goes on from there.
    """
    model, hub, listed = _resolve(url, cache)
    if hub is not None:
        with _locked(model):
            if not _is_complete(model):
                _fill(hub, model, listed, progress)
    return model


def fetch_config(url: str, *, cache: str | os.PathLike[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Download only the config.json of a model of a hub.

    Args:
        url: `hf://org/name[@revision][/folder]`.
        cache: As for `fetch_model`, which goes on from what is here then.

    Returns:
        The configuration, and what a manifest should say about the model (its commit is the "revision").

    Raises:
        CheckpointError: As for `fetch_model`.
    """
    model, hub, listed = _resolve(url, cache)
    if hub is not None:
        with _locked(model):
            if not (model.path / CONFIG).is_file():  # only a whole, checked file has this name
                _download(hub, model, listed[CONFIG], model.path / CONFIG, lambda _: None)
    return read_json(model.path / CONFIG), model.about


def _resolve(url: str, cache: str | os.PathLike[str] | None) -> "tuple[HubModel, Hub | None, Mapping[str, HubFile]]":
    """Return the model that an address names, and the hub and the files of its list unless all are here."""
    address = Address.parse(url)
    shelf = Path(cache if cache is not None else cache_folder()) / address.repo.replace("/", "--")

    def place(commit: str) -> HubModel:
        return HubModel(shelf=shelf, address=address, commit=commit)

    if SHA1.fullmatch(address.revision) and _is_complete(place(address.revision)):
        return place(address.revision), None, {}
    try:
        from lt_ckpt.hub.client import Hub, is_offline
    except ModuleNotFoundError as exc:
        if exc.name != "huggingface_hub":
            raise
        raise CheckpointError(f"{address}: huggingface_hub is not installed: pip install 'lt-ckpt[hub]'") from None
    if is_offline():
        entries = sorted(os.listdir(shelf)) if shelf.is_dir() else []
        kept = [name for name in entries if SHA1.fullmatch(name) and _is_complete(place(name))]
        raise CheckpointError(
            f"{address}: HF_HUB_OFFLINE is set, and the hub has to be asked for this; commits that are here and can be "
            f"given instead of {address.revision}: {', '.join(kept) or 'none'}"
        )
    hub = Hub.from_environment()
    path = f"/api/models/{address.repo}/revision/{quote(address.revision, safe='')}?blobs=true"
    listing = hub.read_json(path, address.repo)
    commit = listing.get("sha")
    if not isinstance(commit, str) or not SHA1.fullmatch(commit):
        raise CheckpointError(f"{address}: {hub.endpoint} names no commit; does HF_ENDPOINT lead to a hub?")
    if SHA1.fullmatch(address.revision) and commit != address.revision:
        raise CheckpointError(f"{address}: {hub.endpoint} answers for another commit, {commit}")
    return place(commit), hub, list_model_files(listing, address.subfolder, str(address))


def _download(hub: "Hub", model: HubModel, file: HubFile, target: Path, on_bytes: Callable[[int], None]) -> None:
    path = f"/{model.address.repo}/resolve/{model.commit}/{quote(file.name)}"
    with translate_os_errors("downloading", target):
        files.make_folders(target.parent)
    hub.download(path, model.address.repo, file, target, on_bytes)


def _is_complete(model: HubModel) -> bool:
    """Return whether all of a model is here, by its record and the sizes of its files."""
    path = model.path / RECORD
    with translate_os_errors("reading", path):
        if not path.exists():
            return False
        record = read_json(path)
        strict_json.check_format_version(record, "lt-hub", 1, str(path))
        for name, n_bytes in strict_json.get_field(record, "files", dict, str(path)).items():
            file = model.path / name
            if not file.is_file() or file.stat().st_size != n_bytes:
                return False
    return True


def _fill(hub: "Hub", model: HubModel, listed: Mapping[str, HubFile], progress: files.ProgressCallback | None) -> None:
    """Download all files of a model, and write the record last."""
    folder = model.path
    with translate_os_errors("clearing", folder):
        files.remove_temp_files(folder / RECORD)
        (folder / RECORD).unlink(missing_ok=True)  # of a download that was cut off, or of files that are gone since
    done = total = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, max(total, done), "bytes")

    def get(name: str) -> None:
        file, target = listed[name], folder / name
        with translate_os_errors("looking for", target):
            if target.is_file() and target.stat().st_size == file.n_bytes:
                count(file.n_bytes)  # only a whole, checked file has this name
                return
            target.unlink(missing_ok=True)
        _download(hub, model, file, target, count)

    names = [name for name in listed if is_model_file(name)]
    for name in names:
        get(name)
    weights = [SINGLE_FILE]
    if INDEX_FILE in listed:
        weights = list_shards(read_json(folder / INDEX_FILE), listed, f"{model.address}: {INDEX_FILE}")
    total = done + sum(listed[name].n_bytes for name in weights)
    _need_room(model, weights, listed)
    for name in weights:
        get(name)
    sizes = {name: listed[name].n_bytes for name in (*names, *weights)}
    record = {"format": "lt-hub", "version": 1, "repo": model.address.repo, "commit": model.commit, "files": sizes}
    with translate_os_errors("finishing the download", folder):
        files.write_file(folder / RECORD, strict_json.dumps(record, RECORD))


def _need_room(model: HubModel, names: list[str], listed: Mapping[str, HubFile]) -> None:
    """Refuse at once, and not after hours, a model that does not fit."""
    with translate_os_errors("looking at the free space", model.path):
        here = sum(entry.stat().st_size for entry in os.scandir(model.path) if entry.name.startswith(tuple(names)))
        free = shutil.disk_usage(model.path).free
    need = sum(listed[name].n_bytes for name in names) - here
    if need > free:
        raise CheckpointError(
            f"{model.address}: {format_bytes(need)} have to be fetched and {format_bytes(free)} are free at "
            f"{model.path}; free some space or give another cache folder (XDG_CACHE_HOME)"
        )


@contextmanager
def _locked(model: HubModel) -> Iterator[None]:
    """Make the folder of a model and hold the lock of its commit, which ends with the process."""
    path = model.shelf / f"{model.commit}.lock"
    with translate_os_errors("locking the cache", path):
        files.make_folders(model.path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        with translate_os_errors("locking the cache", path):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
