"""Upload of a folder to a model repository of a hub by huggingface_hub; what is there already is not sent again.

A folder with SHA256SUMS is verified first. A file that the repository has with other content is replaced only on
request. The library commits upon the commit that was compared (many large files: in several commits), and afterwards
the list of the last commit is compared with the folder. A repository that does not exist is made, private unless asked
otherwise; what else is there stays.

Cost: a read of what is sent, one of what is compared.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.finished_folder import list_finished_files, verify_hash_list
from lt_ckpt.folders import COMMIT
from lt_ckpt.hub.address import LOGIN, Address, asking, import_library
from lt_ckpt.hub.model import hash_as


@dataclass(frozen=True, kw_only=True)
class HubUpload:
    """Result of an upload.

    Attributes:
        address: The repository, branch and folder.
        commit: The commit that has all files; empty if nothing was sent.
        uploaded: Files that were sent.
        skipped: Files that are there already.
        n_bytes: Bytes of `uploaded`.
    """

    address: Address
    commit: str
    uploaded: tuple[str, ...]
    skipped: tuple[str, ...]
    n_bytes: int


def upload_to_hub(
    folder: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    public: bool = False,
) -> HubUpload:
    """Upload a folder to the hub of HF_ENDPOINT.

    Args:
        folder: A model's folder, or another finished one; a link out of it is refused.
        url: `hf://org/name[@branch][/folder]`.
        overwrite: Replace files of these names that differ.
        public: A repository that is made can be seen by everybody.

    Raises:
        CheckpointError: A file of the folder is damaged, others are there, the hub refuses or cannot be reached, or it
            has other bytes afterwards.
    """
    address, path = Address.parse(url), Path(folder)
    prefix = f"{address.subfolder}/" if address.subfolder else ""
    names = [*list_finished_files(path), *([COMMIT] if (path / COMMIT).exists() else [])]
    verify_hash_list(path)
    hub = import_library(address)
    if hub.get_token() is None:
        raise CheckpointError(f"{address}: there is no token: {LOGIN}")
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="lt-ckpt")

    def compare(revision: str) -> tuple[list[str], list[str]]:
        """Return the files that the repository lacks, and those that differ there."""
        tree = list(api.list_repo_tree(address.repo, recursive=True, revision=revision))
        listed = {e.path: e.lfs.sha256 if e.lfs else e.blob_id for e in tree if hasattr(e, "blob_id")}
        there = {name: listed[prefix + name] for name in names if prefix + name in listed}
        with translate_os_errors("reading", path):
            differing = [name for name, its in there.items() if hash_as(path / name, its) != its]
        return [name for name in names if name not in there], differing

    with asking(address):
        api.create_repo(address.repo, private=not public, exist_ok=True)
        parent = api.model_info(address.repo, revision=address.revision).sha
        missing, differing = compare(parent)
        if differing and not overwrite:
            raise CheckpointError(
                f"{address}: has {prefix + differing[0]!r} with other content ({len(differing)} such files); choose "
                "another address, or replace them with --overwrite (the old ones stay in its history)"
            )
        wanted, commit = sorted([*missing, *differing]), ""
        if wanted:
            made = api.upload_folder(
                repo_id=address.repo,
                folder_path=path,
                path_in_repo=address.subfolder,
                allow_patterns=wanted,
                revision=address.revision,
                parent_commit=parent,
                commit_message=f"Upload {len(wanted)} files with lt-ckpt",
            )
            commit = made.oid
            if wrong := [name for names_there in compare(commit) for name in names_there]:
                raise CheckpointError(f"{address}: {wrong[0]!r} is not there as it is in the folder: upload it again")
    skipped = tuple(name for name in names if name not in wanted)
    n_bytes = sum((path / name).stat().st_size for name in wanted)
    return HubUpload(address=address, commit=commit, uploaded=tuple(wanted), skipped=skipped, n_bytes=n_bytes)
