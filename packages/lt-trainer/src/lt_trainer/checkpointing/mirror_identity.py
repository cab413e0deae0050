"""Checks that a mirror belongs to this run.

A run gets a name, 16 random hex digits, when it first has a mirror; the name is in the run directory (mirror.json) and
in the bucket. If both have one, the names must match. Where one has none (a new machine, a new mirror), the newest
checkpoint in the bucket must be of the same recipe, except for paths, parallelism and other options that do not change
the training.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt.folders import random_id
from lt_ckpt.s3.client import S3Folder
from lt_ckpt.s3.download import read_latest_manifest
from lt_ckpt.s3.owner import read_owner
from lt_trainer.config.recipe import to_dict
from lt_trainer.config.section import flatten
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import MirrorError, RecipeError
from lt_trainer.run_directory.run_dir import read_mirror_name

UNCHECKED = re.compile(
    r"(parallel|checkpoint|metrics|fault_tolerance|engine)\..*|run\.dir|model\.preset|batch\.micro_batch_size"
    r"|data\.(store|validation|prefetch|(mixture|validation_sets)\.[^.]+\.store)"
)
"""Fields that may differ on a new machine; store contents are compared when the data is opened."""


def recipe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two recipes (nested tables) that change the training."""
    remote, local = flatten(there), flatten(here)
    return [
        f"{name}: {remote[name]!r} there, {local[name]!r} here"
        for name in sorted(remote.keys() & local.keys())
        if remote[name] != local[name] and not UNCHECKED.fullmatch(name)
    ]


def resolve_mirror_name(root: S3Folder, recipe: Recipe) -> tuple[str, str]:
    """Check that this run may use the mirror; return the run's name, and what its newest checkpoint is.

    Args:
        root: Folder in the bucket.
        recipe: Recipe; its run directory may not exist yet.

    Raises:
        MirrorError: the mirror belongs to another run.
        RecipeError: the mirror has a checkpoint, but checkpoint.resume is false.
        ServiceError: S3 rejects requests or is unreachable.
    """
    name, owner, newest = read_mirror_name(Path(recipe.run.dir)), read_owner(root), read_latest_manifest(root)
    field, remedy = f"checkpoint.mirror_url = {root.url!r}", "set checkpoint.mirror_url to a folder of its own"
    if name and owner is not None and name != owner.run:
        raise MirrorError(f"{field}: belongs to another run (its name is {owner.run}, not {name}); {remedy}")
    if newest is None:
        return name or random_id(), "no checkpoint yet"
    address, manifest = newest
    if not recipe.checkpoint.resume:
        raise RecipeError(
            f"{root.url} already has checkpoints (newest: step {manifest.step})",
            values={"checkpoint.resume": False, "checkpoint.mirror_url": root.url},
            remedy="set checkpoint.mirror_url to a new folder for a new run, or remove checkpoint.resume",
        )
    if not (name and owner) and (differences := recipe_differences(manifest.recipe, to_dict(recipe))):
        raise MirrorError(
            f"{field}: has a run with another recipe ({'; '.join(differences)}); {remedy}, or restore these values: "
            "they can be changed once the run has been downloaded"
        )
    return name or (random_id() if owner is None else owner.run), f"newest checkpoint {address.rpartition('/')[2]}"
