"""Checkpoints that are committed, verified, resharded and exported.

Saving (no collectives; see `lt_ckpt.save` for the protocol): `begin`, `write_part`, `commit`; its rehearsal before the
first step: `lt_ckpt.trial`. Reading: `Checkpoint`, `latest_valid`. Care: `verify`, `prune`. Hugging Face: `export_hf`,
`HFFolder`. Importing this package loads nothing heavy; each name loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_ckpt.background import BackgroundSaver as BackgroundSaver
    from lt_ckpt.checkpoint import Checkpoint as Checkpoint
    from lt_ckpt.checkpoint import Want as Want
    from lt_ckpt.checkpoint import differences as differences
    from lt_ckpt.discover import Rejected as Rejected
    from lt_ckpt.discover import latest_valid as latest_valid
    from lt_ckpt.discover import list_steps as list_steps
    from lt_ckpt.discover import prune as prune
    from lt_ckpt.discover import resolve as resolve
    from lt_ckpt.errors import AlreadySavedError as AlreadySavedError
    from lt_ckpt.errors import CheckpointError as CheckpointError
    from lt_ckpt.expectation import expected as expected
    from lt_ckpt.export import export_hf as export_hf
    from lt_ckpt.hf_folder import HFFolder as HFFolder
    from lt_ckpt.integrity import Report as Report
    from lt_ckpt.integrity import verify as verify
    from lt_ckpt.manifest import Manifest as Manifest
    from lt_ckpt.manifest import Meta as Meta
    from lt_ckpt.save import begin as begin
    from lt_ckpt.save import commit as commit
    from lt_ckpt.save import discard as discard
    from lt_ckpt.save import write_part as write_part
    from lt_ckpt.shards import Shard as Shard
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
    "HFFolder": "hf_folder",
    "Manifest": "manifest",
    "Meta": "manifest",
    "Rejected": "discover",
    "Report": "integrity",
    "Shard": "shards",
    "Summary": "summary",
    "TensorSpec": "tensorfile",
    "TrialReport": "trial",
    "Want": "checkpoint",
    "begin": "save",
    "begin_trial": "trial",
    "commit": "save",
    "differences": "checkpoint",
    "discard": "save",
    "expected": "expectation",
    "export_hf": "export",
    "finish_trial": "trial",
    "latest_valid": "discover",
    "list_steps": "discover",
    "prune": "discover",
    "resolve": "discover",
    "summarize": "summary",
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
    "HFFolder",
    "Manifest",
    "Meta",
    "Rejected",
    "Report",
    "Shard",
    "Summary",
    "TensorSpec",
    "TrialReport",
    "Want",
    "begin",
    "begin_trial",
    "commit",
    "differences",
    "discard",
    "expected",
    "export_hf",
    "finish_trial",
    "latest_valid",
    "list_steps",
    "prune",
    "resolve",
    "summarize",
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
