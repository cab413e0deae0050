"""Preparation of a token store from sources or from documents in memory.

Sources are divided into units of about `unit_bytes` (lt_data.preparation.units), each of which one process writes
(lt_data.preparation.unit_writer); documents in memory are one unit. Cost: the tokenizer's time plus a few percent.
Memory per worker: batches of the tokenizer; 100 bytes per distinct document of a unit if duplicates are dropped.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from lt_data.errors import DataError
from lt_data.preparation.processes import run_in_processes
from lt_data.preparation.ray_workers import run_on_ray
from lt_data.preparation.record_map import load_record_map
from lt_data.preparation.unit_writer import UnitOptions
from lt_data.preparation.units import UnitJob, run_one_unit, run_units
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.document import Document
from lt_data.sources.options import SKIP_REMEDY, SourceOptions
from lt_data.sources.reader import DocumentReader
from lt_data.sources.record import BadRecord, extract_value
from lt_data.store.document_columns import parse_columns
from lt_data.store.document_sources import MAX_SOURCE_FILES
from lt_data.store.manifest import Selection, StoreManifest
from lt_data.tokenizing.engine import EngineRequest
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

DEFAULT_SHARD_TOKENS = 2**27
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 2**23, 2**30
UNITS = 32
"""Units of a corpus between 32 times those sizes: workers for an ordinary machine, at little cost per unit."""


def prepare(
    sources: Iterable[str | Path | Document | Mapping[str, Any]],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    options: SourceOptions | None = None,
    bos: bool = True,
    eos: bool = True,
    engine: EngineRequest = "auto",
    special_tokens_as: SpecialTokensAs = "text",
    selection: Selection | None = None,
    record_map: str | None = None,
    map_args: Mapping[str, Any] | None = None,
    keep: Sequence[str] = (),
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    unit_bytes: int | None = None,
    workers: int = 1,
    ray: str = "",
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Encode text and write a token store.

        >>> _ = Path("corpus.txt").write_text("A text.")
        >>> prepare(["corpus.txt"], tokenizer=tokenizer, out="of-files").documents
        1
        >>> prepare(({"text": text} for text in ["One.", "Two."]), tokenizer=tokenizer, out="of-texts").documents
        2

    The same call resumes an interrupted job of sources: finished units stay. Any number of processes and machines may
    make it at once, on one folder; the store is the same.

    Args:
        sources: a list of files, folders, fsspec URLs and datasets; or the documents themselves: records (dicts),
            `Document` objects, or an iterator over texts.
        tokenizer: a tokenizer, its folder, or a model of the hub (`Tokenizer.load`).
        out: folder of the store.
        options: field of the text or ids, suffixes, bad input, hub datasets.
        bos: begin each document with the tokenizer's BOS id.
        eos: end each document with the tokenizer's EOS id.
        engine: tokenizer engine: "hf" (tokenizers), "gigatoken", or "auto", which uses gigatoken if its ids are equal
            for the beginning of the text.
        special_tokens_as: encode special token strings in a text as "text" or as the special "ids".
        selection: document filter: length limits, duplicates.
        record_map: function `module:function` that is called with each record (a dict) before the selection and returns
            a record, None or `LeftOut`. It must depend on nothing but the record and its arguments.
        map_args: further arguments of that function, by name: JSON values, which the manifest records.
        keep: fields or columns of each record, after the map, to keep beside the document: "url" as text, or "n:int",
            "score:float", "safe:bool".
        shard_tokens: target number of ids of a shard; a longer document has its own shard.
        unit_bytes: bytes of the sources that one process prepares at a time, about: files, or ranges of large ones
            (lt_data.sources.pieces). It determines the files of the store, so it does not depend on `workers`; None: a
            32nd of the sources, at least 8 MiB and at most 1 GiB.
        workers: processes that take units.
        ray: address of a Ray cluster (`auto`, or `local` for a new one), on which the workers run.
        progress: called with the source bytes encoded, or with the finished units if there are several.
        notify: called with notices for the user.

    Returns:
        The manifest of the store.

    Raises:
        DataError: bad source, no document, tokenizer without the requested BOS or EOS, or `out` unwritable, or in use
            by something else than the same job.
    """
    for name, value in (("workers", workers), ("shard_tokens", shard_tokens), ("unit_bytes", unit_bytes)):
        if value is not None and value < 1:
            raise DataError(f"{name} = {value}: at least 1")
    columns = parse_columns(keep)
    fields = True if record_map is not None else [column.name for column in columns]
    source_options = replace(options or SourceOptions(), keep_fields=fields)
    unit_options = UnitOptions(
        tokenizer=tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer),
        bos=bos,
        eos=eos,
        engine=engine,
        special_tokens_as=special_tokens_as,
        shard_tokens=shard_tokens,
        selection=selection or Selection(),
        columns=columns,
        record_map=record_map,
        map_args=map_args,
        source_options=source_options,
    )
    unit_options.make_encoder()  # errors before the sources are listed
    _notify_of_split(unit_options.tokenizer, notify)
    load_record_map(record_map, map_args, source_options)
    out = Path(out)
    documents, paths = _divide_input(sources)
    if documents is not None:
        skipped = Counter[str]()
        read = _read_memory(documents, source_options, skipped)
        manifest = run_one_unit(out, unit_options, read, None, progress, skipped)
        _notify_of_columns(manifest, notify)
        return manifest
    reader = DocumentReader(paths, source_options)
    if not reader.n_files:
        raise DataError(f"no text in {reader.description}: check the sources and the suffixes")
    if unit_bytes is None:
        unit_bytes = min(max(reader.total_bytes // UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    divided = reader.divided(unit_bytes)
    if (n_files := divided.n_files) > MAX_SOURCE_FILES:
        raise DataError(
            f"sources: {n_files} files; a store has at most {MAX_SOURCE_FILES}: join small files into JSON lines"
        )
    job = UnitJob(out=out, options=unit_options, reader=divided, units=tuple(divided.group(unit_bytes)))
    if workers > len(job.units):
        n_units = f"{len(job.units)} unit{'s' if len(job.units) > 1 else ''}"
        notify(f"workers = {workers}: the sources are {n_units}, one process each; --unit-bytes divides them further")
        workers = len(job.units)
    if len(job.units) == 1:
        manifest = run_one_unit(out, unit_options, divided, job.plan, progress)
    elif ray:
        manifest = run_units(job, partial(run_on_ray, workers=workers, address=ray), progress=progress)
    else:
        manifest = run_units(job, partial(run_in_processes, workers=workers), progress=progress)
    _notify_of_columns(manifest, notify)
    _notify_of_missing_checksums(manifest, notify)
    for notice in divided.notices():
        notify(notice)
    return manifest


def _notify_of_split(tokenizer: Tokenizer, notify: NoticeCallback) -> None:
    """Warn before the work that `transformers` reads other ids for one type of models."""
    if not tokenizer.has_split("qwen2"):
        notify(
            f"tokenizer {tokenizer.name}: transformers reads these ids with every type of model but qwen2, whose class "
            "divides text by its own rule; train a model of another type, or use a tokenizer with that rule "
            "(lt data train-tokenizer --split-rule qwen2)"
        )


def _notify_of_columns(manifest: StoreManifest, notify: NoticeCallback) -> None:
    for column in manifest.columns:
        if column.nulls == manifest.documents:
            notify(f"keep: no document has a field {column.name!r}; check the name")


def _notify_of_missing_checksums(manifest: StoreManifest, notify: NoticeCallback) -> None:
    for compression, n_files in sorted(manifest.sources.unchecked.items()):
        notify(
            f"{n_files} files compressed with {compression} have no checksum: damage that still decompresses is not "
            "found; compress them with one (zstd does by default)"
        )


def _divide_input(given: Iterable[Any]) -> tuple[Iterable[Any] | None, list[str | Path]]:
    """Return documents in memory, or else the sources: a list of strings, or paths."""
    if isinstance(given, str | Path):
        raise DataError(f"sources = {str(given)[:80]!r}: a single path or text; give a list of paths or {_IN_MEMORY}")
    items = iter(given)
    first = next(items, None)
    if first is None:
        return [], []
    if isinstance(first, Path) or (isinstance(first, str) and isinstance(given, list | tuple)):
        return None, [first, *items]
    if isinstance(first, str) and os.path.exists(first):
        raise DataError(f"sources: {first[:80]!r} is a path; give a list of paths, or {_IN_MEMORY}")
    return chain([first], items), []


_IN_MEMORY = 'texts as {"text": text} each'


def _read_memory(items: Iterable[Any], options: SourceOptions, skipped: Counter[str]) -> Iterator[Document]:
    """Yield the documents that were given in memory."""
    for number, item in enumerate(items, start=1):
        source = f"document {number}"
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            yield Document(text=item, source=source)
        elif isinstance(item, Mapping):
            record = dict(cast("Mapping[str, Any]", item))
            value, _ = extract_value(record, options)
            if not isinstance(value, BadRecord):
                is_text = isinstance(value, str)
                yield Document(
                    text=value if is_text else None, ids=None if is_text else value, source=source, fields=record
                )
            elif options.on_bad == "error":
                raise DataError(f"{source}: {value.message}{SKIP_REMEDY}")
            else:
                skipped[value.reason] += 1
        else:
            raise DataError(f"{source}: a {type(item).__name__}; give a text, a dict or a lt_data.Document")
