"""Whether what lies in a mirror is this run's.

A run has a name, 16 random hex digits, from the first time that it has a mirror: it stands in the run directory
(mirror.json) and in the bucket. Where both have one they decide. An empty machine has none: there the checkpoint in
the bucket must come from the same recipe, in all that decides what is trained; only where things lie and how the work
is divided may differ. A run directory with checkpoints, where only one side or none has a name (the mirror is new),
must have one of them in common with those that are in the bucket, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import files, list_steps
from lt_ckpt.errors import storage
from lt_ckpt.folders import COMMIT, new_token, step_name
from lt_ckpt.s3.fetching import newest_manifest, remote_steps
from lt_ckpt.s3.owner import look
from lt_ckpt.s3.parcel import MAX_COMMIT_BYTES
from lt_trainer.errors import MirrorError
from lt_trainer.fields import flatten
from lt_trainer.rundir import read_mirror_name

if TYPE_CHECKING:
    from lt_ckpt.s3.client import S3Folder

FREE = ("run.out", "data.store", "data.validation", "data.prefetch", "model.preset", "batch.micro_batch")
FREE_STORES = re.compile(r"data\.(mixture|validation_sets)\.[^.]+\.store")
FREE_SECTIONS = ("parallel", "checkpoint", "metrics", "guard", "engine")
"""What an empty machine may have otherwise; the store's content is compared when the data is opened."""


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What two recipes, as nested tables, do not share of what decides what is trained."""
    theirs, ours = flatten(there), flatten(here)
    return [
        f"{name}: {theirs[name]!r} there, {ours[name]!r} here"
        for name in sorted(theirs.keys() & ours.keys())
        if theirs[name] != ours[name]
        and name not in FREE
        and not FREE_STORES.fullmatch(name)
        and name.partition(".")[0] not in FREE_SECTIONS
    ]


def settle(root: S3Folder, out: Path, recipe: Mapping[str, Any]) -> str:
    """The name of the run in the run directory `out`, when the folder in the bucket may be its mirror.

    Args:
        root: The folder in the bucket.
        out: The run directory; it need not be there yet.
        recipe: The recipe as nested tables.

    Raises:
        MirrorError: It is another run's.
        ServiceError: The store refuses or cannot be reached.
    """
    mine, owner = read_mirror_name(out), look(root)
    theirs = "" if owner is None else owner.run
    remedy = "give checkpoint.mirror a folder of its own"
    if mine and theirs:
        if mine != theirs:
            raise MirrorError(
                f"checkpoint.mirror = {root.url!r}: belongs to another run (its name is {theirs}, that of {out} is "
                f"{mine}); {remedy}"
            )
        return mine
    newest = newest_manifest(root)
    if newest is None:
        return mine or new_token()  # nothing was saved there; who claimed it before is told by its own next look
    url, manifest = newest
    if list_steps(out / "checkpoints"):
        if not _in_common(root, out / "checkpoints"):
            raise MirrorError(
                f"checkpoint.mirror = {root.url!r}: holds checkpoints of another run than {out} (newest: {url}): none "
                f"of them is the same here; {remedy}"
            )
    elif differs := differences(manifest.recipe, recipe):
        raise MirrorError(
            f"checkpoint.mirror = {root.url!r}: holds a run with another recipe ({'; '.join(differs)}); {remedy}, or "
            "set these back: they can be changed when the run has come here once"
        )
    return theirs or mine or new_token()


def _in_common(root: S3Folder, checkpoints: Path) -> bool:
    """Whether a checkpoint there is the very same here."""
    there = dict(remote_steps(root))
    for step, path in list_steps(checkpoints):
        if step in there and path.name == step_name(step) and (path / COMMIT).is_file():
            with storage("reading", path):
                commit = files.read_small(path / COMMIT, MAX_COMMIT_BYTES)
            if there[step].read(COMMIT, MAX_COMMIT_BYTES) == commit:
                return True
    return False
