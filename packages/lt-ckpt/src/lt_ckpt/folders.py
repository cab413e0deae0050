"""The names of the folders under a checkpoint root, who owns them, and how ours are removed.

    step-00001000                          a checkpoint
    step-00001000.aside-<token>            one that had to make room for another of the same step
    .tmp-step-00001000-<token>             a save under way, or what a killed one left
    .trash-<token>                         a folder of ours that is being removed

Every folder that a save makes carries `save.json`: the token, the step, the world and which process began it. Only
a folder with that mark, holding nothing but names that we write, is ever removed, and it is renamed to `.trash-` first,
so that a half-removed checkpoint never has a checkpoint's name.
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
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.records import LISTED, NXD_FOLDER

MARK = "save.json"
MANIFEST, COMMIT, TOKENIZER = "manifest.json", "COMMIT", "tokenizer"
STEP_FOLDER = re.compile(r"step-(\d{8,12})(\.aside-[0-9a-f]{16})?")
TMP_FOLDER = re.compile(r"\.tmp-step-\d{8,12}-[0-9a-f]{16}")
TRASH_FOLDER = re.compile(r"\.trash-[0-9a-f]{16}")
FAILED_FILE = re.compile(r"failed-\d{5,9}")
FOREIGN_OWNER_SECONDS = 3600
"""A save begun on another machine counts as left behind when this process has watched it for so long unchanged."""

_watched: dict[Path, tuple[frozenset[tuple[str, int, int]], float]] = {}
"""Saves of other machines: what this process last saw in them, and since when it has been so (monotonic seconds)."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of save.json: which save a folder belongs to, and which process began it."""

    token: str
    step: int
    world: int
    machine: str
    process: str

    def to_bytes(self) -> bytes:
        """Returns the content of save.json."""
        return strict_json.dumps({"format": "lt-save", "version": 1, **vars(self)}, MARK)


def read_mark(folder: Path) -> Mark:
    """Reads the mark of a folder; a `CheckpointError` when there is none or it is not ours."""
    path = folder / MARK
    with storage("reading", path):
        obj = strict_json.loads(files.read_small(path, 2**16), str(path))
    strict_json.check_version(obj, "lt-save", 1, str(path))
    return Mark(
        token=strict_json.field(obj, "token", str, str(path)),
        step=strict_json.count(obj, "step", str(path)),
        world=strict_json.count(obj, "world", str(path)),
        machine=strict_json.field(obj, "machine", str, str(path)),
        process=strict_json.field(obj, "process", str, str(path)),
    )


def _is_marked(folder: Path) -> bool:
    """Tells whether a folder carries a mark of ours that can be read."""
    try:
        read_mark(folder)
    except CheckpointError:
        return False
    return True


def new_token() -> str:
    """Returns 16 random hex digits."""
    return secrets.token_hex(8)


def step_name(step: int) -> str:
    """Returns the folder name of a step: `step-00001000`."""
    return f"step-{step:08d}"


def machine() -> str:
    """Returns a name of this machine that tells nothing about it."""
    return xxhash.xxh3_64_hexdigest(socket.gethostname().encode())


def process(pid: int) -> str:
    """Returns a name of a process that no later process has: pid, start time and boot; empty when it is gone.

    Where the system has no /proc, the pid alone must do.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass  # it lives, under another user
        return f"{pid}"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()  # the command before it may hold spaces; fields[0] is field 3 of proc(5)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text(encoding="ascii") if boot_id.exists() else ""
    gone = fields[0] in "ZX"  # dead, but its parent has not looked yet
    return "" if gone else f"{pid}-{fields[19]}-{xxhash.xxh3_64_hexdigest(boot.encode())}"


def _left_behind(folder: Path) -> bool:
    """Tells whether the process that began the save in a marked folder is gone.

    Of a process on another machine only its files can be seen. How old they are is never asked: the clocks of the
    machine that wrote them, of the file server and of this machine may each be wrong by years. What counts is that
    nothing changes while this process looks on, by a clock that only goes forwards.
    """
    mark = read_mark(folder)
    if mark.machine == machine():
        pid = mark.process.partition("-")[0]
        return not pid.isdecimal() or process(int(pid)) != mark.process
    stats = [(name, entry.stat(follow_symlinks=False)) for name, entry in files_below(folder)]
    seen = frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    before, since = _watched.get(folder, (None, 0.0))
    if seen != before:
        since = time.monotonic()
        _watched[folder] = (seen, since)
    return time.monotonic() - since >= FOREIGN_OWNER_SECONDS


def sweep(root: Path) -> list[Path]:
    """Removes what killed saves and removals of ours left in a root.

    Args:
        root: Folder of checkpoints.

    Returns:
        The folders that are gone.
    """
    gone: list[Path] = []
    for name in sorted(os.listdir(root)):
        folder = root / name
        # A folder can vanish under us when its owner finishes; one without our mark is nobody's business; and one that
        # cannot be read or removed must not stop a save.
        with suppress(CheckpointError, OSError):
            trash = TRASH_FOLDER.fullmatch(name) is not None
            if trash and not os.listdir(folder):  # its mark went last, and then the removal was cut off
                os.rmdir(folder)
                gone.append(folder)
            elif (trash or (TMP_FOLDER.fullmatch(name) and _left_behind(folder))) and remove(folder):
                gone.append(folder)
                _watched.pop(folder, None)
    return gone


def _is_our_folder(name: str) -> bool:
    """Tells whether a checkpoint can have a folder of that name, relative to it."""
    return name == TOKENIZER or NXD_FOLDER.fullmatch(name) is not None


def files_below(folder: Path, inside: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yields what lies in a folder and in those below it that a checkpoint can have: name relative to it, entry."""
    for entry in list(os.scandir(folder / inside if inside else folder)):
        name = f"{inside}/{entry.name}" if inside else entry.name
        if entry.is_dir(follow_symlinks=False) and _is_our_folder(name):
            yield from files_below(folder, name)
        else:
            yield name, entry


def _known_entries(folder: Path) -> list[str] | None:
    """Returns the files in a folder, relative to it, the mark last; None when any is not of a name that we write."""
    found: list[str] = []
    for name, entry in files_below(folder):
        if not entry.is_file(follow_symlinks=False):
            return None
        plain = name.removesuffix(".tmp")
        if plain not in (MANIFEST, COMMIT) and not any(pattern.fullmatch(plain) for pattern in (*LISTED, FAILED_FILE)):
            return None
        found.append(name)
    return sorted(found, key=lambda name: (name == MARK, name))


def _our_folders(folder: Path, inside: str = "") -> list[str]:
    """Returns the folders of a checkpoint, relative to it, each after those in it."""
    found: list[str] = []
    for entry in list(os.scandir(folder / inside if inside else folder)):
        name = f"{inside}/{entry.name}" if inside else entry.name
        if entry.is_dir(follow_symlinks=False) and _is_our_folder(name):
            found += [*_our_folders(folder, name), name]
    return found


def remove(folder: Path) -> bool:
    """Removes a folder of ours.

    Returns:
        False, and nothing is touched, when the folder lacks our mark or holds anything that we did not write.

    Raises:
        CheckpointError: The system refuses.
    """
    with storage("removing", folder):
        if folder.is_symlink() or not _is_marked(folder):
            return False
        known = _known_entries(folder)
        if known is None:
            return False
        if not TRASH_FOLDER.fullmatch(folder.name):
            trash = folder.with_name(f".trash-{new_token()}")
            files.rename(folder, trash)
            files.fsync_folder(folder.parent)
            folder = trash
        for name in known:
            if name != MARK:
                os.unlink(folder / name)
        for name in _our_folders(folder):
            os.rmdir(folder / name)
        os.unlink(folder / MARK)
        os.rmdir(folder)
        files.fsync_folder(folder.parent)
    return True
