"""Token stores, packs and a deterministic stream of training rows from text.

The names below are imported on first use, so importing the package is cheap; `StreamLoader` is in `lt_data.torch`.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_data.analysis.verification import verify
    from lt_data.errors import DataError
    from lt_data.packing.pack_index import PackIndex
    from lt_data.packing.packs import open_pack, pack
    from lt_data.preparation.append import append
    from lt_data.preparation.join import join
    from lt_data.preparation.prepare import prepare
    from lt_data.preparation.record_map import LeftOut
    from lt_data.preparation.split import split
    from lt_data.sources.document import Document
    from lt_data.sources.options import SourceOptions
    from lt_data.store.manifest import StoreManifest
    from lt_data.store.token_store import TokenStore
    from lt_data.streaming.interleave import Phase
    from lt_data.streaming.mixture import Mixture
    from lt_data.streaming.rows import RowReader, Rows, TokenRows
    from lt_data.streaming.stream import Stream, StreamBatch
    from lt_data.tokenizing.tokenizer import Tokenizer

__all__ = [
    "DataError",
    "Document",
    "LeftOut",
    "Mixture",
    "PackIndex",
    "Phase",
    "RowReader",
    "Rows",
    "SourceOptions",
    "StoreManifest",
    "Stream",
    "StreamBatch",
    "TokenRows",
    "TokenStore",
    "Tokenizer",
    "append",
    "join",
    "open_pack",
    "pack",
    "prepare",
    "split",
    "verify",
]
_MODULES = {
    "DataError": "errors",
    "Document": "sources.document",
    "LeftOut": "preparation.record_map",
    "Mixture": "streaming.mixture",
    "PackIndex": "packing.pack_index",
    "Phase": "streaming.interleave",
    "RowReader": "streaming.rows",
    "Rows": "streaming.rows",
    "SourceOptions": "sources.options",
    "StoreManifest": "store.manifest",
    "Stream": "streaming.stream",
    "StreamBatch": "streaming.stream",
    "TokenRows": "streaming.rows",
    "TokenStore": "store.token_store",
    "Tokenizer": "tokenizing.tokenizer",
    "append": "preparation.append",
    "join": "preparation.join",
    "open_pack": "packing.packs",
    "pack": "packing.packs",
    "prepare": "preparation.prepare",
    "split": "preparation.split",
    "verify": "analysis.verification",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = pkgutil.resolve_name(f"{__name__}.{_MODULES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
