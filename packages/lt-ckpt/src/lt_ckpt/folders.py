"""Folder names under a checkpoint root, their ownership, and the removal of ours.

    step-00001000                      a checkpoint
    step-00001000.aside-<id>           one moved aside for another of the same step
    .tmp-step-00001000-<id>            a save in progress, or what a killed one left; until it has its marker, empty
    .trash-<id>                        a folder of ours being removed

Every folder that a save makes contains `save.json`: the save's id, step, world size and the process that began it. Only
a folder with that marker, holding nothing but files that we write, is ever removed, and it is renamed to `.trash-`
first, so that a half-removed checkpoint never has a checkpoint's name.
"""

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lt_ckpt import files, strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.records import MANIFEST_FILE_PATTERNS, NXD_FOLDER, TOKENIZER_FOLDER

SAVE_MARKER = "save.json"
MANIFEST, COMMIT, TOKENIZER, HF = "manifest.json", "COMMIT", "tokenizer", "hf"
STEP_FOLDER = re.compile(r"step-(\d{8,12})(\.aside-[0-9a-f]{16})?")
TMP_FOLDER = re.compile(r"\.tmp-step-\d{8,12}-[0-9a-f]{16}")
TRASH_FOLDER = re.compile(r"\.trash-[0-9a-f]{16}")
FAILED_FILE = re.compile(r"failed-\d{5,9}")
REMOTE_SAVE_TIMEOUT_S = 3600
"""A save of another machine counts as abandoned once this process has seen it unchanged for this long."""

_last_seen: dict[Path, tuple[frozenset[tuple[str, int, int]], float]] = {}
"""Save of another machine → its files when last seen, and since when they are unchanged (monotonic seconds)."""


@dataclass(frozen=True, kw_only=True)
class SaveMarker:
    """Content of save.json: the save a folder belongs to, and the process that began it."""

    save_id: str
    step: int
    world_size: int
    machine_id: str
    process_identity: str

    def to_bytes(self) -> bytes:
        """Return the content of save.json."""
        return strict_json.dumps({"format": "lt-save", "version": 1, **vars(self)}, SAVE_MARKER)


def read_save_marker(folder: Path) -> SaveMarker:
    """Read a folder's save marker; raise a CheckpointError if there is none or it is not ours."""
    path = folder / SAVE_MARKER
    with translate_os_errors("reading", path):
        obj = strict_json.loads(files.read_bounded(path, 2**16), str(path))
    strict_json.check_format_version(obj, "lt-save", 1, str(path))
    return SaveMarker(
        save_id=strict_json.get_field(obj, "save_id", str, str(path)),
        step=strict_json.get_count(obj, "step", str(path)),
        world_size=strict_json.get_count(obj, "world_size", str(path)),
        machine_id=strict_json.get_field(obj, "machine_id", str, str(path)),
        process_identity=strict_json.get_field(obj, "process_identity", str, str(path)),
    )


def _has_save_marker(folder: Path) -> bool:
    """Return True if a folder has a readable save marker of ours."""
    try:
        read_save_marker(folder)
    except CheckpointError:
        return False
    return True


def random_id() -> str:
    """Return 16 random hex digits."""
    return secrets.token_hex(8)


def step_folder_name(step: int) -> str:
    """Return the folder name of a step: `step-00001000`."""
    return f"step-{step:08d}"


def machine_id() -> str:
    """Return an anonymous id of this machine (a hash of its host name)."""
    return xxhash.xxh3_64_hexdigest(socket.gethostname().encode())


def process_identity(pid: int) -> str:
    """Return an identity that no later process has (pid, start time, boot); empty if the process is gone.

    Without /proc it is the pid alone.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass  # alive, under another user
        return f"{pid}"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()  # the command before it may hold spaces; fields[0] is field 3 of proc(5)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text(encoding="ascii") if boot_id.exists() else ""
    gone = fields[0] in "ZX"  # dead, but not yet reaped
    return "" if gone else f"{pid}-{fields[19]}-{xxhash.xxh3_64_hexdigest(boot.encode())}"


def _is_abandoned(folder: Path) -> bool:
    """Return True if the process that began the save in a marked folder is gone.

    Of a process on another machine only the files are visible. Their age is never used: the clocks of the writing
    machine, of the file server and of this machine may each be wrong by years. The criterion is that nothing changes
    while this process watches, by a monotonic clock.
    """
    marker = read_save_marker(folder)
    if marker.machine_id == machine_id():
        pid = marker.process_identity.partition("-")[0]
        return not pid.isdecimal() or process_identity(int(pid)) != marker.process_identity
    stats = [(name, entry.stat(follow_symlinks=False)) for name, entry in iter_files(folder)]
    seen = frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    before, since = _last_seen.get(folder, (None, 0.0))
    if seen != before:
        since = time.monotonic()
        _last_seen[folder] = (seen, since)
    return time.monotonic() - since >= REMOTE_SAVE_TIMEOUT_S


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
        # A folder can vanish when its owner finishes; one without our marker is not ours; and one that cannot be read
        # or removed must not stop a save.
        with suppress(CheckpointError, OSError):
            trash = TRASH_FOLDER.fullmatch(name) is not None
            if trash and not os.listdir(folder):  # the marker is removed last; the removal was interrupted after it
                os.rmdir(folder)
                removed.append(folder)
            elif (TMP_FOLDER.fullmatch(name) and remove_unmarked(folder)) or (
                (trash or (TMP_FOLDER.fullmatch(name) and _is_abandoned(folder))) and remove_checkpoint(folder)
            ):
                removed.append(folder)
                _last_seen.pop(folder, None)
    return removed


def remove_unmarked(folder: Path) -> bool:
    """Remove a save's folder that holds nothing yet but an unfinished marker.

    A living process may be about to write the marker there. Both steps here fail, with nothing lost, once it is
    written, and `begin_save` takes another folder when its own is gone.

    Returns:
        False if the folder holds anything else.
    """
    names = sorted(os.listdir(folder))
    if folder.is_symlink() or any(name == SAVE_MARKER or files.finished_name(name) != SAVE_MARKER for name in names):
        return False
    for name in names:
        os.unlink(folder / name)
    os.rmdir(folder)
    files.fsync_folder(folder.parent)
    return True


def _is_checkpoint_subfolder(name: str) -> bool:
    """Return True if a checkpoint can have a subfolder of that relative name."""
    return name == HF or any(pattern.fullmatch(name) for pattern in (TOKENIZER_FOLDER, NXD_FOLDER))


def iter_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relative name and entry of all files in a folder and its checkpoint subfolders."""
    for entry in list(os.scandir(folder / prefix if prefix else folder)):
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False) and _is_checkpoint_subfolder(name):
            yield from iter_files(folder, name)
        else:
            yield name, entry


def _list_known_files(folder: Path) -> list[str] | None:
    """Return a folder's files by relative name, the marker last; None if any is not one that we write."""
    found: list[str] = []
    for name, entry in iter_files(folder):
        if not entry.is_file(follow_symlinks=False):
            return None
        plain = files.finished_name(name)
        if plain not in (MANIFEST, COMMIT) and not any(
            pattern.fullmatch(plain) for pattern in (*MANIFEST_FILE_PATTERNS, FAILED_FILE)
        ):
            return None
        found.append(name)
    return sorted(found, key=lambda name: (name == SAVE_MARKER, name))


def _list_subfolders(folder: Path, prefix: str = "") -> list[str]:
    """Return a checkpoint's subfolders by relative name, each after those in it."""
    found: list[str] = []
    for entry in list(os.scandir(folder / prefix if prefix else folder)):
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False) and _is_checkpoint_subfolder(name):
            found += [*_list_subfolders(folder, name), name]
    return found


def remove_checkpoint(folder: Path) -> bool:
    """Remove a folder of ours.

    Returns:
        False, with nothing touched, if the folder lacks our marker or holds any file that we did not write.

    Raises:
        CheckpointError: The system refuses.
    """
    with translate_os_errors("removing", folder):
        if folder.is_symlink() or not _has_save_marker(folder):
            return False
        known = _list_known_files(folder)
        if known is None:
            return False
        if not TRASH_FOLDER.fullmatch(folder.name):
            trash = folder.with_name(f".trash-{random_id()}")
            files.rename(folder, trash)
            files.fsync_folder(folder.parent)
            folder = trash
        for name in known:
            if name != SAVE_MARKER:
                os.unlink(folder / name)
        for name in _list_subfolders(folder):
            os.rmdir(folder / name)
        os.unlink(folder / SAVE_MARKER)
        os.rmdir(folder)
        files.fsync_folder(folder.parent)
    return True
