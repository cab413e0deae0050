"""Checks that a mirror belongs to this run.

A run gets a name, 16 random hex digits, when it first has a mirror; the name is in the run directory (mirror.json) and
in the bucket. If both have one, the names must match. A new machine has none: then the checkpoint in the bucket must be
from the same recipe, except for paths, parallelism and other options that do not change the training. If a run
directory with checkpoints or its mirror has no name (a new mirror), both must have a bitwise equal checkpoint in
common, if the bucket has any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import files, list_steps
from lt_ckpt.errors import translate_os_errors
from lt_ckpt.folders import COMMIT, random_id, step_folder_name
from lt_ckpt.s3.download import list_remote_steps, read_latest_manifest
from lt_ckpt.s3.folder_manifest import MAX_COMMIT_BYTES
from lt_ckpt.s3.owner import read_owner
from lt_trainer.config.fields import flatten
from lt_trainer.errors import MirrorError
from lt_trainer.run_directory.run_dir import read_mirror_name

if TYPE_CHECKING:
    from lt_ckpt.s3.client import S3Folder

UNCHECKED_FIELDS = (
    "run.dir",
    "data.store",
    "data.validation",
    "data.prefetch",
    "model.preset",
    "batch.micro_batch_size",
)
UNCHECKED_STORES = re.compile(r"data\.(mixture|validation_sets)\.[^.]+\.store")
UNCHECKED_SECTIONS = ("parallel", "checkpoint", "metrics", "fault_tolerance", "engine")
"""Sections that may differ on a new machine; store contents are compared when the data is opened."""


def recipe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two recipes (nested tables) that change the training."""
    remote, local = flatten(there), flatten(here)
    return [
        f"{name}: {remote[name]!r} there, {local[name]!r} here"
        for name in sorted(remote.keys() & local.keys())
        if remote[name] != local[name]
        and name not in UNCHECKED_FIELDS
        and not UNCHECKED_STORES.fullmatch(name)
        and name.partition(".")[0] not in UNCHECKED_SECTIONS
    ]


def resolve_mirror_name(root: S3Folder, out: Path, recipe: Mapping[str, Any]) -> str:
    """Return the name of the run in the run directory `out`, after checking the mirror.

    Args:
        root: Folder in the bucket.
        out: Run directory; may not exist yet.
        recipe: Recipe as nested tables.

    Raises:
        MirrorError: the mirror belongs to another run.
        ServiceError: S3 rejects requests or is unreachable.
    """
    name, owner = read_mirror_name(out), read_owner(root)
    remote_name = "" if owner is None else owner.run
    remedy = "set checkpoint.mirror_url to a folder of its own"
    if name and remote_name:
        if name != remote_name:
            raise MirrorError(
                f"checkpoint.mirror_url = {root.url!r}: belongs to another run (its name is {remote_name}, that of "
                f"{out} is {name}); {remedy}"
            )
        return name
    newest = read_latest_manifest(root)
    if newest is None:
        return name or random_id()  # an earlier owner of the empty mirror notices the change itself
    url, manifest = newest
    if list_steps(out / "checkpoints"):
        if not _has_common_checkpoint(root, out / "checkpoints"):
            raise MirrorError(
                f"checkpoint.mirror_url = {root.url!r}: has checkpoints of another run than {out} (newest: {url}), "
                f"none of which is equal to one here; {remedy}"
            )
    elif differences := recipe_differences(manifest.recipe, recipe):
        raise MirrorError(
            f"checkpoint.mirror_url = {root.url!r}: has a run with another recipe ({'; '.join(differences)}); "
            f"{remedy}, or restore these values: they can be changed once the run has been downloaded"
        )
    return remote_name or name or random_id()


def _has_common_checkpoint(root: S3Folder, checkpoints: Path) -> bool:
    """Return True if a checkpoint in the bucket is bitwise equal to one here."""
    remote_steps = dict(list_remote_steps(root))
    for step, path in list_steps(checkpoints):
        if step in remote_steps and path.name == step_folder_name(step) and (path / COMMIT).is_file():
            with translate_os_errors("reading", path):
                commit = files.read_bounded(path / COMMIT, MAX_COMMIT_BYTES)
            if remote_steps[step].read(COMMIT, MAX_COMMIT_BYTES) == commit:
                return True
    return False
