"""Checkpoints that are committed, verified, resharded and exported.

Saving (no collectives; see `lt_ckpt.save` for the protocol): `begin`, `write_part`, `commit`; its rehearsal before the
first step: `lt_ckpt.trial`. Reading: `Checkpoint`, `latest_valid`. Care: `verify`, `prune`. Other formats:
`open_source`, `convert_to`, `compare`; Hugging Face: `export_hf`, `HFFolder`. In S3: `upload`, `download`, `Mirror`.
Importing this package loads nothing heavy; each name loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_ckpt.background import BackgroundSaver as BackgroundSaver
    from lt_ckpt.checkpoint import Checkpoint as Checkpoint
    from lt_ckpt.checkpoint import Want as Want
    from lt_ckpt.checkpoint import differences as differences
    from lt_ckpt.comparison import Comparison as Comparison
    from lt_ckpt.comparison import compare as compare
    from lt_ckpt.comparison import unequal_copies as unequal_copies
    from lt_ckpt.discover import Rejected as Rejected
    from lt_ckpt.discover import latest_valid as latest_valid
    from lt_ckpt.discover import list_steps as list_steps
    from lt_ckpt.discover import prune as prune
    from lt_ckpt.discover import resolve as resolve
    from lt_ckpt.errors import AlreadySavedError as AlreadySavedError
    from lt_ckpt.errors import CheckpointError as CheckpointError
    from lt_ckpt.expectation import expected as expected
    from lt_ckpt.formats import Wish as Wish
    from lt_ckpt.formats import config_of as config_of
    from lt_ckpt.formats import convert_to as convert_to
    from lt_ckpt.formats import detect as detect
    from lt_ckpt.formats import open_source as open_source
    from lt_ckpt.hf.export import export_hf as export_hf
    from lt_ckpt.hf.folder import HFFolder as HFFolder
    from lt_ckpt.hub.model import fetch_model as fetch_model
    from lt_ckpt.integrity import Report as Report
    from lt_ckpt.integrity import verify as verify
    from lt_ckpt.manifest import Manifest as Manifest
    from lt_ckpt.manifest import Meta as Meta
    from lt_ckpt.nxd.options import NxdOptions as NxdOptions
    from lt_ckpt.nxd.resplitting import resplit as resplit
    from lt_ckpt.s3.fetching import download as download
    from lt_ckpt.s3.fetching import download_latest as download_latest
    from lt_ckpt.s3.mirror import Mirror as Mirror
    from lt_ckpt.s3.sending import upload as upload
    from lt_ckpt.save import begin as begin
    from lt_ckpt.save import commit as commit
    from lt_ckpt.save import discard as discard
    from lt_ckpt.save import write_part as write_part
    from lt_ckpt.shards import Shard as Shard
    from lt_ckpt.source import Source as Source
    from lt_ckpt.summary import Summary as Summary
    from lt_ckpt.summary import summarize as summarize
    from lt_ckpt.tensorfile import TensorSpec as TensorSpec
    from lt_ckpt.trial import TrialReport as TrialReport
    from lt_ckpt.trial import begin_trial as begin_trial
    from lt_ckpt.trial import finish_trial as finish_trial
    from lt_ckpt.trial import write_trial as write_trial

_OWNERS = {
    "AlreadySavedError": "errors",
    "BackgroundSaver": "background",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "Comparison": "comparison",
    "HFFolder": "hf.folder",
    "Manifest": "manifest",
    "Meta": "manifest",
    "Mirror": "s3.mirror",
    "NxdOptions": "nxd.options",
    "Rejected": "discover",
    "Report": "integrity",
    "Shard": "shards",
    "Source": "source",
    "Summary": "summary",
    "TensorSpec": "tensorfile",
    "TrialReport": "trial",
    "Want": "checkpoint",
    "Wish": "formats",
    "begin": "save",
    "begin_trial": "trial",
    "commit": "save",
    "compare": "comparison",
    "config_of": "formats",
    "convert_to": "formats",
    "detect": "formats",
    "differences": "checkpoint",
    "discard": "save",
    "download": "s3.fetching",
    "download_latest": "s3.fetching",
    "expected": "expectation",
    "export_hf": "hf.export",
    "fetch_model": "hub.model",
    "finish_trial": "trial",
    "latest_valid": "discover",
    "list_steps": "discover",
    "open_source": "formats",
    "prune": "discover",
    "resolve": "discover",
    "resplit": "nxd.resplitting",
    "summarize": "summary",
    "unequal_copies": "comparison",
    "upload": "s3.sending",
    "verify": "integrity",
    "write_part": "save",
    "write_trial": "trial",
}
"""Public name → module. No module may have a public function's name, or it would hide the function once imported."""

__all__ = [
    "AlreadySavedError",
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "HFFolder",
    "Manifest",
    "Meta",
    "Mirror",
    "NxdOptions",
    "Rejected",
    "Report",
    "Shard",
    "Source",
    "Summary",
    "TensorSpec",
    "TrialReport",
    "Want",
    "Wish",
    "begin",
    "begin_trial",
    "commit",
    "compare",
    "config_of",
    "convert_to",
    "detect",
    "differences",
    "discard",
    "download",
    "download_latest",
    "expected",
    "export_hf",
    "fetch_model",
    "finish_trial",
    "latest_valid",
    "list_steps",
    "open_source",
    "prune",
    "resolve",
    "resplit",
    "summarize",
    "unequal_copies",
    "upload",
    "verify",
    "write_part",
    "write_trial",
]


def __getattr__(name: str) -> object:
    if name not in _OWNERS:
        raise AttributeError(f"module 'lt_ckpt' has no attribute {name!r}")
    value = getattr(import_module(f"lt_ckpt.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
