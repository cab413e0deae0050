"""Committed, verified, resharded and exported checkpoints.

Saving (without collectives, protocol in `lt_ckpt.save`): `begin_save`, `write_rank_files`, `commit_save`. Reading:
`Checkpoint`, `find_latest_valid`. Other formats: `open_source`, `convert_checkpoint`. The rest is imported from its
module, for example `lt_ckpt.s3.transfer`.

These names are imported on first use, so importing the package is cheap.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_ckpt.checkpoint import Checkpoint as Checkpoint
    from lt_ckpt.checkpoint import ReadItem as ReadItem
    from lt_ckpt.discovery import find_latest_valid as find_latest_valid
    from lt_ckpt.discovery import list_steps as list_steps
    from lt_ckpt.discovery import prune_checkpoints as prune_checkpoints
    from lt_ckpt.errors import CheckpointError as CheckpointError
    from lt_ckpt.formats import ConvertOptions as ConvertOptions
    from lt_ckpt.formats import convert_checkpoint as convert_checkpoint
    from lt_ckpt.formats import open_source as open_source
    from lt_ckpt.integrity import verify as verify
    from lt_ckpt.manifest import CheckpointMetadata as CheckpointMetadata
    from lt_ckpt.records import OptimizerRecord as OptimizerRecord
    from lt_ckpt.save import begin_save as begin_save
    from lt_ckpt.save import commit_save as commit_save
    from lt_ckpt.save import write_rank_files as write_rank_files
    from lt_ckpt.shards import Shard as Shard
    from lt_ckpt.source import Source as Source
    from lt_ckpt.tensorfile import TensorSpec as TensorSpec

_MODULES = {
    "checkpoint": ("Checkpoint", "ReadItem"),
    "discovery": ("find_latest_valid", "list_steps", "prune_checkpoints"),
    "errors": ("CheckpointError",),
    "formats": ("ConvertOptions", "convert_checkpoint", "open_source"),
    "integrity": ("verify",),
    "manifest": ("CheckpointMetadata",),
    "records": ("OptimizerRecord",),
    "save": ("begin_save", "commit_save", "write_rank_files"),
    "shards": ("Shard",),
    "source": ("Source",),
    "tensorfile": ("TensorSpec",),
}
"""Module → names."""


def __getattr__(name: str) -> object:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = pkgutil.resolve_name(f"{__name__}.{module}:{name}")
    globals()[name] = value
    return value
