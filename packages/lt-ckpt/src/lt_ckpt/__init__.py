"""Committed, verified, resharded and exported checkpoints.

Saving (without collectives, protocol in `lt_ckpt.save`): `begin_save`, `write_rank_files`, `commit_save`.
Reading: `Checkpoint`, `find_latest_valid`. Maintenance: `verify`, `prune_checkpoints`. Other formats: `open_source`,
`convert_checkpoint`, `compare`; Hugging Face: `export_hf`, `HFFolder`. S3: `upload`, `download`, `Mirror`. Importing
the package loads nothing heavy; each name loads its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_ckpt.async_save import AsyncRankSaver as AsyncRankSaver
    from lt_ckpt.checkpoint import Checkpoint as Checkpoint
    from lt_ckpt.checkpoint import ReadItem as ReadItem
    from lt_ckpt.checkpoint import spec_differences as spec_differences
    from lt_ckpt.comparison import TensorComparison as TensorComparison
    from lt_ckpt.comparison import compare as compare
    from lt_ckpt.comparison import find_replica_mismatches as find_replica_mismatches
    from lt_ckpt.discovery import RejectedCheckpoint as RejectedCheckpoint
    from lt_ckpt.discovery import find_latest_valid as find_latest_valid
    from lt_ckpt.discovery import list_steps as list_steps
    from lt_ckpt.discovery import prune_checkpoints as prune_checkpoints
    from lt_ckpt.discovery import resolve_checkpoint as resolve_checkpoint
    from lt_ckpt.errors import AlreadySavedError as AlreadySavedError
    from lt_ckpt.errors import CheckpointError as CheckpointError
    from lt_ckpt.formats import ConvertOptions as ConvertOptions
    from lt_ckpt.formats import convert_checkpoint as convert_checkpoint
    from lt_ckpt.formats import detect_format as detect_format
    from lt_ckpt.formats import load_model_config as load_model_config
    from lt_ckpt.formats import open_source as open_source
    from lt_ckpt.hf.export import export_hf as export_hf
    from lt_ckpt.hf.folder import HFFolder as HFFolder
    from lt_ckpt.hub.model import fetch_model as fetch_model
    from lt_ckpt.hub.upload import upload_to_hub as upload_to_hub
    from lt_ckpt.integrity import VerificationReport as VerificationReport
    from lt_ckpt.integrity import verify as verify
    from lt_ckpt.manifest import CheckpointManifest as CheckpointManifest
    from lt_ckpt.manifest import CheckpointMetadata as CheckpointMetadata
    from lt_ckpt.nxd.options import NxdOptions as NxdOptions
    from lt_ckpt.nxd.zero1_reshard import reshard_optimizer as reshard_optimizer
    from lt_ckpt.records import OptimizerRecord as OptimizerRecord
    from lt_ckpt.s3.mirror import Mirror as Mirror
    from lt_ckpt.s3.transfer import download as download
    from lt_ckpt.s3.transfer import download_latest as download_latest
    from lt_ckpt.s3.transfer import upload as upload
    from lt_ckpt.save import begin_save as begin_save
    from lt_ckpt.save import commit_save as commit_save
    from lt_ckpt.save import discard_save as discard_save
    from lt_ckpt.save import write_rank_files as write_rank_files
    from lt_ckpt.shards import Shard as Shard
    from lt_ckpt.source import Source as Source
    from lt_ckpt.state_specs import expected_state_specs as expected_state_specs
    from lt_ckpt.summary import CheckpointSummary as CheckpointSummary
    from lt_ckpt.summary import summarize_checkpoint as summarize_checkpoint
    from lt_ckpt.tensorfile import TensorSpec as TensorSpec

_EXPORTS = {
    "AlreadySavedError": "errors",
    "AsyncRankSaver": "async_save",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "TensorComparison": "comparison",
    "HFFolder": "hf.folder",
    "CheckpointManifest": "manifest",
    "CheckpointMetadata": "manifest",
    "Mirror": "s3.mirror",
    "NxdOptions": "nxd.options",
    "OptimizerRecord": "records",
    "RejectedCheckpoint": "discovery",
    "VerificationReport": "integrity",
    "Shard": "shards",
    "Source": "source",
    "CheckpointSummary": "summary",
    "TensorSpec": "tensorfile",
    "ReadItem": "checkpoint",
    "ConvertOptions": "formats",
    "begin_save": "save",
    "commit_save": "save",
    "compare": "comparison",
    "load_model_config": "formats",
    "convert_checkpoint": "formats",
    "detect_format": "formats",
    "spec_differences": "checkpoint",
    "discard_save": "save",
    "download": "s3.transfer",
    "download_latest": "s3.transfer",
    "expected_state_specs": "state_specs",
    "export_hf": "hf.export",
    "fetch_model": "hub.model",
    "upload_to_hub": "hub.upload",
    "find_latest_valid": "discovery",
    "list_steps": "discovery",
    "open_source": "formats",
    "prune_checkpoints": "discovery",
    "resolve_checkpoint": "discovery",
    "reshard_optimizer": "nxd.zero1_reshard",
    "summarize_checkpoint": "summary",
    "find_replica_mismatches": "comparison",
    "upload": "s3.transfer",
    "verify": "integrity",
    "write_rank_files": "save",
}
"""Public name → module. No module may have a public function's name, or it would hide the function once imported."""

__all__ = [
    "AlreadySavedError",
    "AsyncRankSaver",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManifest",
    "CheckpointMetadata",
    "CheckpointSummary",
    "ConvertOptions",
    "HFFolder",
    "Mirror",
    "NxdOptions",
    "OptimizerRecord",
    "ReadItem",
    "RejectedCheckpoint",
    "Shard",
    "Source",
    "TensorComparison",
    "TensorSpec",
    "VerificationReport",
    "begin_save",
    "commit_save",
    "compare",
    "convert_checkpoint",
    "detect_format",
    "discard_save",
    "download",
    "download_latest",
    "expected_state_specs",
    "export_hf",
    "fetch_model",
    "find_latest_valid",
    "find_replica_mismatches",
    "list_steps",
    "load_model_config",
    "open_source",
    "prune_checkpoints",
    "reshard_optimizer",
    "resolve_checkpoint",
    "spec_differences",
    "summarize_checkpoint",
    "upload",
    "upload_to_hub",
    "verify",
    "write_rank_files",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lt_ckpt' has no attribute {name!r}")
    value = getattr(import_module(f"lt_ckpt.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
