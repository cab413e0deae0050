"""Upload of a folder to a model repository of a Hugging Face hub, as one commit.

    1. every file is read, and compared with SHA256SUMS if the folder has it
    2. the repository's list says which files are there already; one that differs is replaced only on request
    3. huggingface_hub sends the others and commits them together, upon the commit that was listed
    4. the list of the new commit is compared with the hashes of 1

So the repository changes by one commit or not at all, and a second call sends only what the first has not brought
there. A repository that does not exist is made, private unless asked otherwise. What else is there stays.

Token, endpoint and hf-xet: as for downloads (lt_ckpt.hub.client). Cost: two reads of what is sent, one of the rest.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.finished_folder import list_finished_files
from lt_ckpt.folders import COMMIT
from lt_ckpt.hash_list import HASH_LIST, read_hash_list
from lt_ckpt.hub.client import Hub, insist, is_offline, translate_errors
from lt_ckpt.hub.listing import SHA1
from lt_ckpt.hub.model import Address


@dataclass(frozen=True, kw_only=True)
class HubUpload:
    """Result of an upload, or what one would do.

    Attributes:
        address: The repository, branch and folder.
        commit: The commit that has all files; empty if nothing was sent or asked for.
        makes_repository: Whether the repository did not exist.
        uploaded: Files that were sent, or would be.
        skipped: Files that are there already.
        n_bytes: Bytes of `uploaded`.
        seconds: Duration.
    """

    address: Address
    commit: str
    makes_repository: bool
    uploaded: tuple[str, ...]
    skipped: tuple[str, ...]
    n_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _LocalFile:
    """File of the folder: its size, SHA-256, and SHA-1 as git's blob."""

    n_bytes: int
    sha256: str
    blob: str

    def is_listed_as(self, entry: Any) -> bool:
        """Return whether an entry of the hub's list has this content."""
        lfs = entry.lfs
        return self.sha256 == lfs["sha256"] if lfs is not None else self.blob == entry.blob_id


def upload_to_hub(
    folder: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    public: bool = False,
    dry_run: bool = False,
    progress: files.ProgressCallback | None = None,
) -> HubUpload:
    """Upload a folder to the hub of HF_ENDPOINT.

    Args:
        folder: A model's folder, or another finished one.
        url: `hf://org/name[@branch][/folder]`.
        overwrite: Replace files of these names that differ.
        public: A repository that is made can be seen by everybody.
        dry_run: Change nothing: tell what would be sent.
        progress: Called with the bytes of the folder that were read and hashed.

    Raises:
        CheckpointError: A file of the folder is damaged, others are there, the hub refuses or cannot be reached, or it
            has other bytes afterwards.
    """
    start = time.monotonic()
    address = Address.parse(url)
    if SHA1.fullmatch(address.revision):
        raise CheckpointError(f"{url}: a commit cannot be changed; give a branch")
    if is_offline():
        raise CheckpointError("HF_HUB_OFFLINE is set: nothing is sent; unset it to upload")
    hub = Hub.from_environment()
    if hub.token is None:
        why = f" ({hub.withheld})" if hub.withheld else ""
        raise CheckpointError(f"{address}: to upload takes a token; set HF_TOKEN, or run `hf auth login`{why}")
    path = Path(folder)
    local = _hash_files(path, progress)
    prefix = f"{address.subfolder}/" if address.subfolder else ""
    api = HfApi(endpoint=hub.endpoint, token=hub.token, user_agent="lt-ckpt")
    parent, listed = _list_repository(api, hub, address)
    there = {name: listed[prefix + name] for name in local if prefix + name in listed}
    same = {name for name, entry in there.items() if local[name].is_listed_as(entry)}
    if (different := sorted(there.keys() - same)) and not overwrite:
        raise CheckpointError(
            f"{address}: has {prefix + different[0]!r} with other content ({len(different)} such files); choose "
            "another address, or replace them with --overwrite (the old ones stay in its history)"
        )
    missing = sorted(local.keys() - same)
    report = HubUpload(
        address=address,
        commit="",
        makes_repository=parent is None,
        uploaded=tuple(missing),
        skipped=tuple(sorted(same)),
        n_bytes=sum(local[name].n_bytes for name in missing),
        seconds=time.monotonic() - start,
    )
    if dry_run or not missing:
        return report
    if parent is None:
        _make_repository(api, hub, address, public=public)
        parent, _ = _list_repository(api, hub, address)

    def commit() -> str:
        # made for each try: the library uses an operation once
        operations = [CommitOperationAdd(prefix + name, str(path / name)) for name in missing]
        with translate_errors(hub, address.repo), _library_errors(address), _quiet_without_terminal(), _without_xet():
            made = api.create_commit(
                address.repo,
                operations,
                commit_message=f"Upload {len(missing)} files with lt-ckpt",
                revision=address.revision,
                parent_commit=parent,
            )
        return made.oid

    with translate_os_errors("uploading", path):
        oid = insist(f"{address}", commit, lambda: 0)
    _compare(api, hub, address, oid, {prefix + name: file for name, file in local.items()})
    return HubUpload(**{**vars(report), "commit": oid, "seconds": time.monotonic() - start})


def _hash_files(folder: Path, progress: files.ProgressCallback | None) -> dict[str, _LocalFile]:
    names = list_finished_files(folder)
    if (folder / COMMIT).exists():
        names.append(COMMIT)
    known = read_hash_list(folder)
    found: dict[str, _LocalFile] = {}
    with translate_os_errors("reading", folder):
        sizes = {name: (folder / name).stat().st_size for name in names}
        total, done = sum(sizes.values()), 0
        for name in names:
            sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % sizes[name], usedforsecurity=False)
            with open(files.open_for_reading(folder / name), "rb", buffering=0) as file:
                while block := file.read(files.BLOCK_BYTES):
                    sha256.update(block)
                    blob.update(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, total, "bytes")
            found[name] = _LocalFile(n_bytes=sizes[name], sha256=sha256.hexdigest(), blob=blob.hexdigest())
            if known is not None and known.hashes.get(name, found[name].sha256) != found[name].sha256:
                raise CheckpointError(
                    f"{folder / name}: SHA-256 differs from {HASH_LIST} in its folder; it is damaged: make it again, "
                    "or correct the list"
                )
    if known is not None and (absent := sorted(known.hashes.keys() - found.keys())):
        raise CheckpointError(f"{folder / absent[0]}: is missing, {HASH_LIST} lists it; make the folder again")
    return found


def _list_repository(api: HfApi, hub: Hub, address: Address) -> tuple[str | None, dict[str, Any]]:
    """Return the branch's commit and its files by path; None if there is no such repository."""

    def ask() -> tuple[str | None, dict[str, Any]]:
        with translate_errors(hub, address.repo):
            try:
                info = api.model_info(address.repo, revision=address.revision, files_metadata=True)
            except errors.RevisionNotFoundError:
                raise CheckpointError(f"{address}: the repository has no such branch; make it there first") from None
            except errors.GatedRepoError:
                raise
            except errors.RepositoryNotFoundError as exc:
                if exc.response.status_code == 401 and "Invalid credentials" in exc.response.headers.get(
                    "X-Error-Message", ""
                ):
                    raise
                return None, {}
        return info.sha, {entry.rfilename: entry for entry in info.siblings or ()}

    return insist(f"{address}", ask, lambda: 0)


def _make_repository(api: HfApi, hub: Hub, address: Address, *, public: bool) -> None:
    if address.revision != "main":
        raise CheckpointError(f"{address}: the repository does not exist; make it with the branch main first")

    def make() -> None:
        with translate_errors(hub, address.repo):
            api.create_repo(address.repo, private=not public, exist_ok=True)

    insist(f"{address}", make, lambda: 0)


def _compare(api: HfApi, hub: Hub, address: Address, commit: str, expected: dict[str, _LocalFile]) -> None:
    """Compare the files of a commit with those of the folder."""
    at_commit = Address(repo=address.repo, revision=commit, subfolder=address.subfolder)
    _, listed = _list_repository(api, hub, at_commit)
    wrong = sorted(name for name, file in expected.items() if name not in listed or not file.is_listed_as(listed[name]))
    if wrong:
        raise CheckpointError(
            f"{at_commit}: {wrong[0]!r} is not there as it is in the folder ({len(wrong)} such files): it was changed "
            "meanwhile, or the repository's .gitignore leaves it out; upload again once that is settled"
        )


@contextmanager
def _library_errors(address: Address) -> Iterator[None]:
    """Unwrap the error of a transfer; a refusal of what is sent becomes a `CheckpointError`."""
    try:
        yield
    except RuntimeError as exc:  # of a thread that sends a file
        if exc.__cause__ is None:
            raise
        raise exc.__cause__ from None
    except ValueError as exc:  # such as front matter of a README.md that is none
        raise CheckpointError(f"{address}: the hub does not take these files: {exc}") from exc


@contextmanager
def _quiet_without_terminal() -> Iterator[None]:
    """Show the library's progress bars only on a terminal."""
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _without_xet() -> Iterator[None]:
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
