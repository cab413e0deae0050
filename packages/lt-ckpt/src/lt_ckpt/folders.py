"""Folder names under a checkpoint root, and the removal of folders that saves made.

    step-00001000                      a checkpoint
    step-00001000.aside-<id>           one moved aside for another of the same step
    .tmp-step-00001000-<id>            a save in progress, or what a killed one left
    .trash-<id>                        a folder being removed

Every folder of a save contains `save.json`: the save's id, step, world size and the process that began it. Only a
folder with that marker and without files of others is removed. It is renamed to `.trash-` first, so that a half-removed
checkpoint never has a checkpoint's name; the next save finishes a removal that was cut off. A save is abandoned if its
process, on this machine, is gone, or if none of its files has changed for `ABANDONED_AFTER_S`.
"""

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from lt_ckpt import files, json_objects
from lt_ckpt.errors import CheckpointError, translate_os_errors

SAVE_MARKER = "save.json"
MANIFEST, COMMIT, TOKENIZER, HF = "manifest.json", "COMMIT", "tokenizer", "hf"
STEP_FOLDER = re.compile(r"step-(\d{8,12})(\.aside-[0-9a-f]{16})?")
TMP_FOLDER = re.compile(r"\.tmp-step-\d{8,12}-[0-9a-f]{16}")
TRASH_FOLDER = re.compile(r"\.trash-[0-9a-f]{16}")
CHECKPOINT_FILE = re.compile(
    r"COMMIT|(manifest|save|part-\d{5,9})\.json|failed-\d{5,9}|[a-z][a-z0-9_]{0,63}-\d{5,9}\.safetensors|"
    r"tokenizer/(additional_chat_templates/)?[^/]+|hf/(generation_)?config\.json|(scheduler|user_content)\.pt|"
    r"(model|optim)/dp_rank_\d+_tp_rank_\d+_pp_rank_\d+\.pt(\.info\.pt|\.tensors/tensor_\d+\.pt)?|checkpoint|done"
)
"""Names of all files that saves write. A folder with any other is not removed."""

ABANDONED_AFTER_S = 3600
"""The clocks of the machines and of their file server must agree better than this."""


def random_id() -> str:
    """Return 16 random hex digits."""
    return secrets.token_hex(8)


def _host_id() -> str:
    """Return an anonymous id of this machine."""
    return xxhash.xxh3_64_hexdigest(socket.gethostname().encode())


def step_folder_name(step: int) -> str:
    """Return the folder name of a step: `step-00001000`."""
    return f"step-{step:08d}"


@dataclass(frozen=True, kw_only=True)
class SaveMarker:
    """Content of save.json: the save a folder belongs to, and the process that began it."""

    save_id: str = field(default_factory=random_id)
    step: int
    world_size: int
    host: str = field(default_factory=_host_id)
    pid: int = field(default_factory=os.getpid)

    def to_bytes(self) -> bytes:
        """Return the content of save.json."""
        return json_objects.dumps(self, SAVE_MARKER)


def read_save_marker(folder: Path) -> SaveMarker:
    """Read a folder's save marker; raise a CheckpointError if there is none or it is not ours."""
    path = folder / SAVE_MARKER
    with translate_os_errors("reading", path):
        raw = files.read_bounded(path, 2**16)
    with json_objects.translate_format_errors(str(path)):
        return SaveMarker(**json_objects.loads(raw, str(path)))


def iter_files(folder: Path) -> Iterator[str]:
    """Yield the names of all files below a folder, relative to it, with "/"."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name).relative_to(folder).as_posix()


def _is_abandoned(folder: Path) -> bool:
    """Return True if nobody writes the save in a temporary folder any more."""
    with suppress(CheckpointError):  # killed before it had its marker, or about to write it
        marker = read_save_marker(folder)
        if marker.host == _host_id():
            try:
                os.kill(marker.pid, 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                pass  # alive, of another user
    changes = [os.stat(path).st_mtime for path in (folder, *(folder / name for name in iter_files(folder)))]
    return time.time() - max(changes) >= ABANDONED_AFTER_S


def remove_abandoned_saves(root: Path) -> list[Path]:
    """Remove what killed saves and removals of ours left in a root.

    Args:
        root: Folder of checkpoints.

    Returns:
        The removed folders.
    """
    removed: list[Path] = []
    for name in sorted(os.listdir(root)):
        folder = root / name
        # A folder can vanish when its owner finishes, and one that cannot be removed must not stop a save.
        with suppress(CheckpointError, OSError):
            if TRASH_FOLDER.fullmatch(name):
                shutil.rmtree(folder)
            elif not TMP_FOLDER.fullmatch(name) or not _is_abandoned(folder) or not remove_checkpoint(folder):
                continue
            removed.append(folder)
    return removed


def remove_checkpoint(folder: Path) -> bool:
    """Remove a folder that a save made.

    Returns:
        False, with nothing touched, if it has no save marker or a file that no save wrote. A save that was killed
        before it had its marker is removed.

    Raises:
        CheckpointError: The system refuses.
    """
    with translate_os_errors("removing", folder):
        names = [files.finished_name(name) for name in iter_files(folder)]
        is_ours = TMP_FOLDER.fullmatch(folder.name) if set(names) <= {SAVE_MARKER} else SAVE_MARKER in names
        if folder.is_symlink() or not is_ours or not all(map(CHECKPOINT_FILE.fullmatch, names)):
            return False
        trash = folder.with_name(f".trash-{random_id()}")
        files.rename(folder, trash)
        files.fsync_folder(folder.parent)
        shutil.rmtree(trash)
        files.fsync_folder(folder.parent)
    return True
