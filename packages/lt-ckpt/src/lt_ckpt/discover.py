"""Finding the checkpoint to go on from, and removing old ones.

A root is looked at newest step first. A folder counts only when it is *valid*: COMMIT matches the manifest, every file
has its size, and, with `verify`, every byte its hash. What does not count is reported with the reason and never stands
in the way of an older good one; nor does it count when old ones are removed, so that crashed saves cannot push out the
last good one. A root that cannot be read is an error, not an empty root: a run must not start over because of it.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, STEP_FOLDER, remove
from lt_ckpt.integrity import verify as verify_checkpoint


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A folder with a checkpoint's name that was passed over, and why."""

    path: Path
    reason: str


def list_steps(root: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Returns the folders with a checkpoint's name, newest step first; nothing in them is looked at.

    Of one step, the folder itself comes before those that were moved aside. A root that is not there is empty.
    """
    folder = Path(root)
    found: list[tuple[int, Path]] = []
    with storage("looking for checkpoints", folder):
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return []
        for entry in entries:
            match = STEP_FOLDER.fullmatch(entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), folder / entry.name))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def _examine(path: Path, *, verify: bool, progress: files.Progress | None = None) -> tuple[Checkpoint | None, str]:
    """Returns the checkpoint when it is valid, else None and the reason."""
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as exc:
        return None, str(exc)
    report = verify_checkpoint(path, progress=progress) if verify else None
    return (checkpoint, "") if report is None or report.loadable else (None, "; ".join(report.problems))


def latest_valid(
    root: str | os.PathLike[str], *, verify: bool = True, progress: files.Progress | None = None
) -> tuple[Checkpoint | None, list[Rejected]]:
    """Finds the newest valid checkpoint.

    Args:
        root: Folder of checkpoints; one that is not there is empty.
        verify: Check the hashes, not only COMMIT, manifest and sizes. Reads the checkpoint once.
        progress: Told the bytes verified, per checkpoint.

    Returns:
        The checkpoint, or None when there is none; and the newer folders that were passed over, with the reasons.

    Raises:
        CheckpointError: The root cannot be read.
    """
    rejected: list[Rejected] = []
    for _, path in list_steps(root):
        checkpoint, reason = _examine(path, verify=verify, progress=progress)
        if checkpoint is not None:
            return checkpoint, rejected
        rejected.append(Rejected(path=path, reason=reason))
    return None, rejected


def checkpoint_root(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of checkpoints that a path means: itself, or the `checkpoints` folder of a run."""
    folder = Path(path)
    run = not list_steps(folder) and (folder / "checkpoints").is_dir()
    return folder / "checkpoints" if run else folder


def resolve(path: str | os.PathLike[str]) -> tuple[Checkpoint, list[Rejected]]:
    """Opens a checkpoint, or the newest valid one of a folder of checkpoints or of a run (its `checkpoints` folder).

    Raises:
        CheckpointError: Neither is there, or no checkpoint is valid.
    """
    folder = Path(path)
    if (folder / COMMIT).exists() or STEP_FOLDER.fullmatch(folder.name):
        return Checkpoint.open(folder), []
    root = checkpoint_root(folder)
    found, rejected = latest_valid(root)
    if found is None:
        why = "; ".join(item.reason for item in rejected) or "no folder named step-... in it"
        raise CheckpointError(f"{root}: no valid checkpoint: {why}")
    return found, rejected


def prune(
    root: str | os.PathLike[str],
    *,
    last: int,
    every: int = 0,
    protect: Collection[str | os.PathLike[str]] = (),
    verify: bool = True,
) -> list[Path]:
    """Removes old checkpoints.

    Kept are the newest `last` valid ones, valid ones of steps that `every` divides (step 0 aside), and those in
    `protect`. Broken ones are never counted; they go once `last` valid newer ones are there. A folder without our mark
    or with anything in it that we did not write stays.

    Args:
        root: Folder of checkpoints.
        last: How many of the newest to keep, at least 1.
        every: Keep each step that is a multiple of this; 0: none.
        protect: Checkpoint folders that stay whatever happens.
        verify: Before anything goes, check hashes, newest first, until one passes: that one stays, whatever the numbers
            say, so that damaged newer ones cannot cost the run its newest good one. Without it, COMMIT, manifest and
            sizes must do.

    Returns:
        The folders that are gone.

    Raises:
        CheckpointError: `last` below 1, `every` below 0, or the system refuses.
    """
    if last < 1 or every < 0:
        raise CheckpointError(f"prune: last must be >= 1 and every >= 0, are {last} and {every}")
    spared = {Path(os.path.abspath(path)) for path in protect}
    standing: list[Path] = []
    doomed: list[Path] = []
    broken: list[Path] = []
    valid_steps: set[int] = set()
    for step, path in list_steps(root):
        if _examine(path, verify=False)[0] is None:
            if len(valid_steps) >= last:
                broken.append(path)
            continue
        first = step not in valid_steps  # not one that was moved aside for a valid one of the same step
        valid_steps.add(step)
        wanted = len(valid_steps) <= last or (every and step and step % every == 0)
        keep = (first and wanted) or Path(os.path.abspath(path)) in spared
        standing.append(path)
        if not keep:
            doomed.append(path)
    if verify and doomed:
        good = next((path for path in standing if verify_checkpoint(path).loadable), None)
        doomed = [path for path in doomed if path != good]
    broken = [path for path in broken if Path(os.path.abspath(path)) not in spared]
    return [path for path in (*doomed, *broken) if remove(path)]
