"""Preparation of a token store from sources: in one piece, as one of several parts, or in units.

Several machines can share a job without communication: each prepares one part, and `merge` joins the parts
(lt_data.preparation.merge); or they take one unit after the other (lt_data.preparation.units). Encoding and writing
are those of lt_data.preparation.prepare_documents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.preparation.prepare_documents import (
    DEFAULT_SHARD_TOKENS,
    describe_job,
    parse_kept_columns,
    part_folder,
    prepare_documents,
)
from lt_data.preparation.processes import build_with_processes
from lt_data.preparation.ray_workers import build_on_ray
from lt_data.preparation.record_map import load_record_map
from lt_data.preparation.tasks import BuildTasks
from lt_data.preparation.units import UnitJob, run_units
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.options import SourceOptions
from lt_data.sources.reader import DocumentReader
from lt_data.store.document_columns import parse_columns
from lt_data.store.manifest import (
    Selection,
    StoreManifest,
)
from lt_data.tokenizing.encoder import Encoder
from lt_data.tokenizing.engine_selection import EngineRequest
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer


def prepare(
    sources: Sequence[str | Path],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    engine: EngineRequest = "auto",
    special_tokens_as: SpecialTokensAs = "text",
    workers: int = 1,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    selection: Selection | None = None,
    record_map: str | None = None,
    map_args: Mapping[str, Any] | None = None,
    keep: Sequence[str] = (),
    options: SourceOptions | None = None,
    part_index: int = 0,
    num_parts: int = 1,
    unit_bytes: int | None = None,
    ray: str = "",
    overwrite: bool = False,
    no_resume: bool = False,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Read text, encode it and write a token store.

    An interrupted job is kept in `<out>.building`; the same call resumes it after the last finished shard. Sources,
    tokenizer and options must be the same.

    Args:
        sources: files, folders, fsspec URLs and datasets (see `lt_data.read_documents`, also for the next options).
        tokenizer: a tokenizer, or its folder.
        out: folder of the store, created when the job is complete.
        bos: begin each document with the tokenizer's BOS id.
        eos: end each document with the tokenizer's EOS id.
        engine: tokenizer engine: "hf" (tokenizers), "gigatoken", or "auto", which uses gigatoken if its ids are equal
            for the beginning of the text.
        special_tokens_as: encode special token strings in a text as "text" or as the special "ids".
        workers: worker processes. With 1 this process encodes, with the threads of `tokenizers`; otherwise each worker
            uses one thread. The store is the same.
        shard_tokens: target number of ids of a shard; a longer document has its own shard.
        selection: document filter: length limits, duplicates.
        record_map: function `module:function` that is called with each record (a dict) before the selection and returns
            a record, None or `LeftOut`. It must depend on nothing but the record and its arguments.
        map_args: further arguments of that function, by name: JSON values, which the manifest records.
        keep: fields or columns of each record, after the map, to keep beside the document: "url" as text, or "n:int",
            "score:float", "safe:bool".
        options: field of the text or ids, suffixes, bad input, hub datasets.
        part_index: part of the job to prepare, from 0. It is written to `part_folder(out, part_index, num_parts)`.
        num_parts: number of parts, which several machines can prepare and `lt_data.merge` joins.
        unit_bytes: prepare units of about so many bytes of the sources, files or ranges of large ones
            (lt_data.sources.file_ranges), and join them where they lie, in `out`; `workers` processes take one after
            the other, as do those of other machines that make the same call on the same folder. Any number of them
            makes the same store. Duplicates in different units are listed, not rewritten
            (lt_data.preparation.drop_list).
        ray: with unit_bytes: address of a Ray cluster (`auto`, or `local` for a new one), on which the workers run.
        overwrite: replace `out` if it is a token store.
        no_resume: discard an interrupted job.
        progress: called with the source bytes encoded; with unit_bytes, with the finished units.
        notify: called with notices for the user.

    Returns:
        The manifest of the new store.

    Raises:
        DataError: bad source, no document, tokenizer without the requested BOS or EOS, `out` in use or unwritable, or
            an interrupted job that was a different one.
    """
    if ray and unit_bytes is None:
        raise DataError(f"ray = {ray!r}: has no effect without unit_bytes; give it, or leave ray out")
    if unit_bytes is not None and (overwrite or no_resume or num_parts != 1 or part_index):
        raise DataError(
            f"unit_bytes = {unit_bytes}: has no effect together with part_index, num_parts, overwrite or no_resume; "
            "leave them out"
        )
    reader = DocumentReader(
        sources,
        replace(
            options or SourceOptions(),
            keep_fields=True if record_map is not None else [column.name for column in parse_columns(keep)],
        ),
    )
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)  # once for all units
    if unit_bytes is not None:
        if unit_bytes < 1 or workers < 1:
            raise DataError(f"unit_bytes = {unit_bytes}, workers = {workers}: at least 1 each")
        reader = reader.divided(unit_bytes)
    encode = partial(
        prepare_documents,
        reader,
        tokenizer=tokenizer,
        bos=bos,
        eos=eos,
        engine=engine,
        special_tokens_as=special_tokens_as,
        shard_tokens=shard_tokens,
        selection=selection,
        record_map=record_map,
        map_args=map_args,
        keep=keep,
    )
    if unit_bytes is None:
        return encode(
            out=out,
            workers=workers,
            part_index=part_index,
            num_parts=num_parts,
            overwrite=overwrite,
            no_resume=no_resume,
            progress=progress,
            notify=notify,
        )
    selection = selection or Selection()
    settings = describe_job(
        Encoder(tokenizer, bos=bos, eos=eos, engine=engine, special_tokens_as=special_tokens_as),
        selection,
        load_record_map(record_map, map_args, reader),
        parse_kept_columns(keep, reader),
        shard_tokens,
        reader,
        None,
    )
    build_tasks = (
        partial(build_on_ray, workers=workers, address=ray) if ray else partial(build_with_processes, workers=workers)
    )
    drop_duplicates = selection.drop_duplicates
    manifest = _prepare_units(
        encode, reader, settings, Path(out), unit_bytes, build_tasks, progress, drop_duplicates=drop_duplicates
    )
    for notice in reader.notices():
        notify(notice)
    return manifest


def _prepare_units(
    encode: Callable[..., StoreManifest],
    reader: DocumentReader,
    settings: Mapping[str, Any],
    out: Path,
    unit_bytes: int,
    build_tasks: BuildTasks,
    progress: Progress,
    *,
    drop_duplicates: bool,
) -> StoreManifest:
    if not reader.n_files:
        raise DataError(f"no text in {reader.description}: check the sources and the suffixes")
    n_units = min(max(1, -(-reader.total_bytes // unit_bytes)), reader.n_files)
    job = UnitJob(
        out=out,
        n_units=n_units,
        units=tuple(unit for unit in range(n_units) if reader.part(unit, n_units).n_files),
        prepare=partial(_prepare_unit, encode),
        drop_duplicates=drop_duplicates,
    )
    return run_units(job, {"unit_bytes": unit_bytes, **settings}, build_tasks, progress=progress)


def _prepare_unit(encode: Callable[..., StoreManifest], unit: int, n_units: int, out: Path) -> Path:
    encode(out=out, part_index=unit, num_parts=n_units, lock=False)  # only this process knows the path
    return part_folder(out, unit, n_units) if n_units > 1 else out
