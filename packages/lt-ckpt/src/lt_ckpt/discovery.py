"""Discovery of the checkpoint to resume from, and removal of old ones.

A root is searched newest step first. A folder counts only if it is *valid*: COMMIT matches the manifest, every file has
its size, and, with `verify`, every byte its hash. Invalid folders are reported with the reason and never hide an older
valid one; they do not count for retention either, so that crashed saves cannot push out the last valid checkpoint. An
unreadable root is an error, not an empty root: a run must not start over because of it.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, STEP_FOLDER, remove_checkpoint
from lt_ckpt.integrity import verify as verify_checkpoint


@dataclass(frozen=True, kw_only=True)
class RejectedCheckpoint:
    """Folder with a checkpoint's name that was rejected, and the reason."""

    path: Path
    reason: str


def list_steps(root: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the folders with a checkpoint's name, newest step first, without opening them.

    Of one step, the folder itself comes before those that were moved aside. A missing root is empty.
    """
    folder = Path(root)
    found: list[tuple[int, Path]] = []
    with translate_os_errors("looking for checkpoints", folder):
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return []
        for entry in entries:
            match = STEP_FOLDER.fullmatch(entry.name)
            if match and Path(entry.path).is_dir():
                found.append((int(match[1]), folder / entry.name))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def _open_if_valid(
    path: Path, *, verify: bool, progress: files.ProgressCallback | None = None
) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint if it is valid, else None and the reason."""
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as exc:
        return None, str(exc)
    if verify:
        report = verify_checkpoint(path, progress=progress)
        if not report.is_loadable:
            return None, "; ".join(report.problems)
        checkpoint.is_verified = True
    return checkpoint, ""


def find_latest_valid(
    root: str | os.PathLike[str],
    *,
    verify: bool = True,
    skip: Collection[Path] = (),
    progress: files.ProgressCallback | None = None,
) -> tuple[Checkpoint | None, list[RejectedCheckpoint]]:
    """Find the newest valid checkpoint.

    Args:
        root: Folder of checkpoints; a missing one is empty.
        verify: Check the hashes, not only COMMIT, manifest and sizes. Reads the checkpoint once.
        skip: Folders that are passed over without a look, because a reader found damage in them.
        progress: Called with the bytes verified, per checkpoint.

    Returns:
        The checkpoint, or None if there is none; and the newer folders that were rejected, with the reasons.

    Raises:
        CheckpointError: The root cannot be read.
    """
    rejected: list[RejectedCheckpoint] = []
    for path in (path for _, path in list_steps(root) if path not in skip):
        checkpoint, reason = _open_if_valid(path, verify=verify, progress=progress)
        if checkpoint is not None:
            return checkpoint, rejected
        rejected.append(RejectedCheckpoint(path=path, reason=reason))
    return None, rejected


def checkpoint_root(path: str | os.PathLike[str]) -> Path:
    """Return the folder of checkpoints of a path: itself, or the `checkpoints` folder of a run."""
    folder = Path(path)
    run = not list_steps(folder) and (folder / "checkpoints").is_dir()
    return folder / "checkpoints" if run else folder


def resolve_checkpoint(
    path: str | os.PathLike[str], *, verify: bool = True, progress: files.ProgressCallback | None = None
) -> tuple[Checkpoint, list[RejectedCheckpoint]]:
    """Open a checkpoint, or the newest valid one of a folder of checkpoints or of a run.

    Args:
        path: A checkpoint, which is opened without a look at its hashes; a folder of checkpoints; or a run.
        verify: As of `find_latest_valid`.
        progress: Called with the bytes verified, per checkpoint.

    Raises:
        CheckpointError: There is none, or none is valid.
    """
    folder = Path(path)
    if (folder / COMMIT).exists() or STEP_FOLDER.fullmatch(folder.name):
        return Checkpoint.open(folder), []
    root = checkpoint_root(folder)
    found, rejected = find_latest_valid(root, verify=verify, progress=progress)
    if found is None:
        reasons = "; ".join(item.reason for item in rejected) or "no folder named step-... in it"
        raise CheckpointError(f"{root}: no valid checkpoint: {reasons}")
    return found, rejected


def describe_fallbacks(checkpoint: Checkpoint, rejected: Collection[RejectedCheckpoint]) -> tuple[str, ...]:
    """Return a sentence for each newer checkpoint in whose place an older one is taken."""
    return tuple(f"taking {checkpoint.path} instead of {item.path}: {item.reason}" for item in rejected)


def prune_checkpoints(
    root: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int = 0,
    protect: Collection[str | os.PathLike[str]] = (),
    verify: bool = True,
    progress: files.ProgressCallback | None = None,
) -> list[Path]:
    """Remove old checkpoints.

    Kept are the newest `keep_last` valid ones, valid ones of steps that `keep_every` divides (except step 0), and those
    in `protect`. Invalid ones are never counted; they are removed once `keep_last` newer valid ones exist. A folder
    without our save marker, or with any file that we did not write, stays.

    Args:
        root: Folder of checkpoints.
        keep_last: How many of the newest to keep, at least 1.
        keep_every: Keep each step that is a multiple of this; 0: none.
        protect: Checkpoint folders that always stay.
        verify: Before anything is removed, check hashes, newest first, until one passes: that one always stays, so that
            damaged newer ones cannot cost the run its newest valid one. Otherwise COMMIT, manifest and sizes are
            checked.
        progress: Called with the bytes verified, per checkpoint.

    Returns:
        The removed folders.

    Raises:
        CheckpointError: The system refuses.
    """
    assert keep_last >= 1, "nothing would be kept"
    protected = {Path(os.path.abspath(path)) for path in protect}
    candidates: list[Path] = []
    removable: list[Path] = []
    invalid: list[Path] = []
    valid_steps: set[int] = set()
    for step, path in list_steps(root):
        if _open_if_valid(path, verify=False)[0] is None:
            if len(valid_steps) >= keep_last:
                invalid.append(path)
            continue
        first = step not in valid_steps  # not one that was moved aside for a valid one of the same step
        valid_steps.add(step)
        wanted = len(valid_steps) <= keep_last or (keep_every and step and step % keep_every == 0)
        keep = (first and wanted) or Path(os.path.abspath(path)) in protected
        candidates.append(path)
        if not keep:
            removable.append(path)
    if verify and removable:
        verified = (path for path in candidates if verify_checkpoint(path, progress=progress).is_loadable)
        intact = next(verified, None)
        removable = [path for path in removable if path != intact]
    invalid = [path for path in invalid if Path(os.path.abspath(path)) not in protected]
    return [path for path in (*removable, *invalid) if remove_checkpoint(path)]
