"""Committed, verified, resharded and exported checkpoints.

Saving (without collectives, protocol in `lt_ckpt.save`): `begin_save`, `write_rank_files`, `commit_save`. Reading:
`Checkpoint`, `find_latest_valid`. Other formats: `open_source`, `convert_checkpoint`. The rest is imported from its
module, for example `lt_ckpt.s3.transfer`.

These names are imported on first use, so importing the package is cheap.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_ckpt.checkpoint import Checkpoint, ReadItem
    from lt_ckpt.discovery import find_latest_valid, list_steps, prune_checkpoints
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
    from lt_ckpt.integrity import verify
    from lt_ckpt.manifest import CheckpointMetadata
    from lt_ckpt.records import OptimizerRecord
    from lt_ckpt.save import begin_save, commit_save, write_rank_files
    from lt_ckpt.shards import Shard
    from lt_ckpt.source import Source
    from lt_ckpt.tensorfile import TensorSpec

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

__all__ = ["Checkpoint", "CheckpointError", "CheckpointMetadata", "ConvertOptions", "OptimizerRecord", "ReadItem"]
__all__ += ["Shard", "Source", "TensorSpec", "begin_save", "commit_save", "convert_checkpoint", "find_latest_valid"]
__all__ += ["list_steps", "open_source", "prune_checkpoints", "verify", "write_rank_files"]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = value = pkgutil.resolve_name(f"{__name__}.{module}:{name}")
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
