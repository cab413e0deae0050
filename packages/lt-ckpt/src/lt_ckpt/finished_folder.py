"""Files of a finished folder, a checkpoint or another, as an upload takes them.

Cost: one listing.
"""

import os
from pathlib import Path

from lt_ckpt.confined_files import resolve_confined
from lt_ckpt.discovery import list_steps
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.file_names import check_name
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER
from lt_ckpt.hash_list import read_hash_list


def verify_hash_list(folder: Path) -> None:
    """Compare the files of a folder with its SHA256SUMS, if it has one; raise a CheckpointError if one differs."""
    if listed := read_hash_list(folder):
        for name in listed.hashes:
            listed.check_file(name)


def list_finished_files(folder: Path) -> list[str]:
    """Return the files of a folder by relative name; those that commit a checkpoint are left out.

    Raises:
        CheckpointError: It is an unfinished checkpoint, a folder of checkpoints, has no files, or one that is
            none or a link out of the folder.
    """

    def raise_error(exc: OSError) -> None:
        raise exc

    if not (folder / COMMIT).exists():
        if (folder / MANIFEST).exists() or STEP_FOLDER.fullmatch(folder.name):
            raise CheckpointError(f"{folder}: not a checkpoint: no COMMIT in it, so the save was never finished")
        if list_steps(folder):
            raise CheckpointError(f"{folder}: is a folder of checkpoints: choose one of them")
    found: list[str] = []
    with translate_os_errors("opening", folder):
        for parent, folders, names in os.walk(folder, onerror=raise_error):
            for name in (*folders, *names):
                path = Path(parent) / name
                relative = path.relative_to(folder).as_posix()
                if relative == COMMIT:
                    continue
                check_name(relative, folder)
                if (name in folders and path.is_symlink()) or not (path.is_dir() or path.is_file()):
                    raise CheckpointError(f"{path}: neither a file nor a folder: remove it, or choose another folder")
                if name in names:
                    resolve_confined(folder, relative)
                    found.append(relative)
        if not found:
            raise CheckpointError(f"{folder}: contains no file")
        return sorted(found)
