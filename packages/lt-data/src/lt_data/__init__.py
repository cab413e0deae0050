"""Token stores, packs and a deterministic stream of training rows from text.

The names below are imported on first use, so importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_data.analysis.inspection import inspect_batch, inspect_document, inspect_rows
    from lt_data.analysis.stats import stats
    from lt_data.analysis.verification import verify
    from lt_data.errors import DataError
    from lt_data.exports.export import export
    from lt_data.exports.options import ExportOptions
    from lt_data.packing.pack_index import PackIndex
    from lt_data.packing.packs import open_pack, pack
    from lt_data.preparation.append import append
    from lt_data.preparation.join import join
    from lt_data.preparation.prepare import prepare
    from lt_data.preparation.record_map import LeftOut
    from lt_data.preparation.split import split
    from lt_data.progress import Progress
    from lt_data.sources.document import Document
    from lt_data.sources.options import SourceOptions
    from lt_data.sources.reader import DocumentReader, read_documents
    from lt_data.store.manifest import DocumentTotals, Selection, StoreManifest
    from lt_data.store.token_store import TokenStore
    from lt_data.streaming.interleave import Phase
    from lt_data.streaming.mixture import Mixture
    from lt_data.streaming.prefetch import Prefetcher
    from lt_data.streaming.ramp import BatchRamp
    from lt_data.streaming.rows import IGNORE_INDEX, RowReader, Rows, TokenRows
    from lt_data.streaming.stream import Stream, StreamBatch, StreamState, sequence_fingerprint
    from lt_data.tokenizing.tokenizer import Tokenizer

_MODULES = {
    "IGNORE_INDEX": "streaming.rows",
    "DocumentTotals": "store.manifest",
    "BatchRamp": "streaming.ramp",
    "DataError": "errors",
    "Document": "sources.document",
    "DocumentReader": "sources.reader",
    "ExportOptions": "exports.options",
    "LeftOut": "preparation.record_map",
    "StoreManifest": "store.manifest",
    "Mixture": "streaming.mixture",
    "PackIndex": "packing.pack_index",
    "Phase": "streaming.interleave",
    "Prefetcher": "streaming.prefetch",
    "Progress": "progress",
    "RowReader": "streaming.rows",
    "Rows": "streaming.rows",
    "Selection": "store.manifest",
    "SourceOptions": "sources.options",
    "Stream": "streaming.stream",
    "StreamBatch": "streaming.stream",
    "StreamState": "streaming.stream",
    "TokenRows": "streaming.rows",
    "TokenStore": "store.token_store",
    "Tokenizer": "tokenizing.tokenizer",
    "append": "preparation.append",
    "export": "exports.export",
    "inspect_batch": "analysis.inspection",
    "inspect_document": "analysis.inspection",
    "inspect_rows": "analysis.inspection",
    "join": "preparation.join",
    "open_pack": "packing.packs",
    "pack": "packing.packs",
    "prepare": "preparation.prepare",
    "read_documents": "sources.reader",
    "sequence_fingerprint": "streaming.stream",
    "split": "preparation.split",
    "stats": "analysis.stats",
    "verify": "analysis.verification",
}

__all__ = [
    "IGNORE_INDEX",
    "BatchRamp",
    "DataError",
    "Document",
    "DocumentReader",
    "DocumentTotals",
    "ExportOptions",
    "LeftOut",
    "Mixture",
    "PackIndex",
    "Phase",
    "Prefetcher",
    "Progress",
    "RowReader",
    "Rows",
    "Selection",
    "SourceOptions",
    "StoreManifest",
    "Stream",
    "StreamBatch",
    "StreamState",
    "TokenRows",
    "TokenStore",
    "Tokenizer",
    "append",
    "export",
    "inspect_batch",
    "inspect_document",
    "inspect_rows",
    "join",
    "open_pack",
    "pack",
    "prepare",
    "read_documents",
    "sequence_fingerprint",
    "split",
    "stats",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
