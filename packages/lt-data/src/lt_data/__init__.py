"""Text to token stores, packs and a deterministic stream of training rows.

The names below are imported when they are first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_data.buckets import Buckets
    from lt_data.errors import DataError
    from lt_data.exports.exporting import export
    from lt_data.exports.importing import ImportOptions, ImportReport, import_tokens
    from lt_data.exports.options import ExportOptions, ExportReport
    from lt_data.inspection import InspectedRow, Piece, inspect_batch, inspect_rows
    from lt_data.manifest import Amount, Manifest, Selection
    from lt_data.merging import merge
    from lt_data.mixture import Mixture
    from lt_data.ngram import NgramCounts
    from lt_data.packing import PackIndex, open_pack, pack
    from lt_data.permutation import KeyedPermutation
    from lt_data.phases import Phase
    from lt_data.prefetch import Prefetcher
    from lt_data.preparation import part_folder, prepare, prepare_documents
    from lt_data.progress import Progress
    from lt_data.remote.fetching import download
    from lt_data.remote.sending import upload
    from lt_data.report import write_report
    from lt_data.rows import IGNORE, RowReader, Rows, TokenRows
    from lt_data.run_files import StepReport, inspect_step
    from lt_data.sources.document import Document
    from lt_data.sources.reader import DocumentReader, read_documents
    from lt_data.steps import EpochSteps, steps_per_epoch
    from lt_data.store import TokenStore
    from lt_data.stream import Stream, StreamBatch, StreamState
    from lt_data.summary import Stats, stats
    from lt_data.tokenizer import Tokenizer, train_bpe

_MODULES = {
    "IGNORE": "rows",
    "Amount": "manifest",
    "Buckets": "buckets",
    "DataError": "errors",
    "Document": "sources.document",
    "DocumentReader": "sources.reader",
    "EpochSteps": "steps",
    "ExportOptions": "exports.options",
    "ExportReport": "exports.options",
    "ImportOptions": "exports.importing",
    "ImportReport": "exports.importing",
    "InspectedRow": "inspection",
    "KeyedPermutation": "permutation",
    "Manifest": "manifest",
    "Mixture": "mixture",
    "NgramCounts": "ngram",
    "PackIndex": "packing",
    "Phase": "phases",
    "Piece": "inspection",
    "Prefetcher": "prefetch",
    "Progress": "progress",
    "RowReader": "rows",
    "Rows": "rows",
    "Selection": "manifest",
    "Stats": "summary",
    "StepReport": "run_files",
    "Stream": "stream",
    "StreamBatch": "stream",
    "StreamState": "stream",
    "TokenRows": "rows",
    "TokenStore": "store",
    "Tokenizer": "tokenizer",
    "download": "remote.fetching",
    "export": "exports.exporting",
    "import_tokens": "exports.importing",
    "inspect_batch": "inspection",
    "inspect_rows": "inspection",
    "inspect_step": "run_files",
    "merge": "merging",
    "open_pack": "packing",
    "pack": "packing",
    "part_folder": "preparation",
    "prepare": "preparation",
    "prepare_documents": "preparation",
    "read_documents": "sources.reader",
    "stats": "summary",
    "steps_per_epoch": "steps",
    "train_bpe": "tokenizer",
    "upload": "remote.sending",
    "write_report": "report",
}

__all__ = [
    "IGNORE",
    "Amount",
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
