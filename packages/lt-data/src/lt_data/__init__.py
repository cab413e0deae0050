"""Text to token stores, packs and a deterministic stream of training rows.

The names below are imported when they are first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_data.errors import DataError
    from lt_data.exports.exporting import export
    from lt_data.exports.importing import ImportOptions, ImportReport, import_tokens
    from lt_data.exports.options import ExportOptions, ExportReport
    from lt_data.looking.checking import verify
    from lt_data.looking.inspection import InspectedRow, Piece, inspect_batch, inspect_rows
    from lt_data.looking.ngram import NgramCounts
    from lt_data.looking.run_files import StepReport, inspect_step
    from lt_data.looking.steps import EpochSteps, steps_per_epoch
    from lt_data.looking.summary import Stats, stats
    from lt_data.packing.packs import PackIndex, open_pack, pack
    from lt_data.preparing.merging import merge
    from lt_data.preparing.preparation import part_folder, prepare, prepare_documents
    from lt_data.progress import Progress
    from lt_data.remote.fetching import download
    from lt_data.remote.sending import upload
    from lt_data.showing.report import write_report
    from lt_data.sources.document import Document
    from lt_data.sources.reader import DocumentReader, read_documents
    from lt_data.store.manifest import Amount, Manifest, Selection
    from lt_data.store.token_store import TokenStore
    from lt_data.streaming.buckets import Buckets
    from lt_data.streaming.mixture import Mixture
    from lt_data.streaming.permutation import KeyedPermutation
    from lt_data.streaming.phases import Phase
    from lt_data.streaming.prefetch import Prefetcher
    from lt_data.streaming.ramp import BatchRamp
    from lt_data.streaming.rows import IGNORE, RowReader, Rows, TokenRows
    from lt_data.streaming.stream import Stream, StreamBatch, StreamState
    from lt_data.tokenizing.tokenizer import Tokenizer, train_bpe

_MODULES = {
    "IGNORE": "streaming.rows",
    "Amount": "store.manifest",
    "BatchRamp": "streaming.ramp",
    "Buckets": "streaming.buckets",
    "DataError": "errors",
    "Document": "sources.document",
    "DocumentReader": "sources.reader",
    "EpochSteps": "looking.steps",
    "ExportOptions": "exports.options",
    "ExportReport": "exports.options",
    "ImportOptions": "exports.importing",
    "ImportReport": "exports.importing",
    "InspectedRow": "looking.inspection",
    "KeyedPermutation": "streaming.permutation",
    "Manifest": "store.manifest",
    "Mixture": "streaming.mixture",
    "NgramCounts": "looking.ngram",
    "PackIndex": "packing.packs",
    "Phase": "streaming.phases",
    "Piece": "looking.inspection",
    "Prefetcher": "streaming.prefetch",
    "Progress": "progress",
    "RowReader": "streaming.rows",
    "Rows": "streaming.rows",
    "Selection": "store.manifest",
    "Stats": "looking.summary",
    "StepReport": "looking.run_files",
    "Stream": "streaming.stream",
    "StreamBatch": "streaming.stream",
    "StreamState": "streaming.stream",
    "TokenRows": "streaming.rows",
    "TokenStore": "store.token_store",
    "Tokenizer": "tokenizing.tokenizer",
    "download": "remote.fetching",
    "export": "exports.exporting",
    "import_tokens": "exports.importing",
    "inspect_batch": "looking.inspection",
    "inspect_rows": "looking.inspection",
    "inspect_step": "looking.run_files",
    "merge": "preparing.merging",
    "open_pack": "packing.packs",
    "pack": "packing.packs",
    "part_folder": "preparing.preparation",
    "prepare": "preparing.preparation",
    "prepare_documents": "preparing.preparation",
    "read_documents": "sources.reader",
    "stats": "looking.summary",
    "steps_per_epoch": "looking.steps",
    "train_bpe": "tokenizing.tokenizer",
    "upload": "remote.sending",
    "verify": "looking.checking",
    "write_report": "showing.report",
}

__all__ = [
    "IGNORE",
    "Amount",
    "BatchRamp",
    "Buckets",
    "DataError",
    "Document",
    "DocumentReader",
    "EpochSteps",
    "ExportOptions",
    "ExportReport",
    "ImportOptions",
    "ImportReport",
    "InspectedRow",
    "KeyedPermutation",
    "Manifest",
    "Mixture",
    "NgramCounts",
    "PackIndex",
    "Phase",
    "Piece",
    "Prefetcher",
    "Progress",
    "RowReader",
    "Rows",
    "Selection",
    "Stats",
    "StepReport",
    "Stream",
    "StreamBatch",
    "StreamState",
    "TokenRows",
    "TokenStore",
    "Tokenizer",
    "download",
    "export",
    "import_tokens",
    "inspect_batch",
    "inspect_rows",
    "inspect_step",
    "merge",
    "open_pack",
    "pack",
    "part_folder",
    "prepare",
    "prepare_documents",
    "read_documents",
    "stats",
    "steps_per_epoch",
    "train_bpe",
    "upload",
    "verify",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
