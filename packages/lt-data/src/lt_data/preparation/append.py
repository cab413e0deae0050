"""Append of documents to a token store, as a new generation (lt_data.store.joined).

The new documents are prepared, with the options of the store, into the folder of the new generation, and its joined
manifest is published with them by one rename. So the store opens as its newest generation before and after a kill at
any time, and the same command resumes. What was there is never changed: older generations stay readable. The sources
of a generation are recorded; appending the same ones again does nothing.

Cost: that of preparing the new documents, and of joining all parts: their manifests are read and a joined manifest, and
of 1024 shards or more an index, is written.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lt_data.errors import DataError
from lt_data.preparation.record_map import load_record_map
from lt_data.preparation.unit_writer import UnitOptions
from lt_data.preparation.units import run_one_unit
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.options import SourceOptions
from lt_data.sources.reader import DocumentReader
from lt_data.storage import fsync_folder, make_folder_synced, translate_os_errors, write_file
from lt_data.store.combined_manifest import LoadedPart
from lt_data.store.joined import (
    GENERATION_FILE,
    GENERATION_FOLDER,
    LoadedStore,
    join_parts,
    list_generations,
    load_store,
    new_part,
    read_joined,
)
from lt_data.store.joined_index import INDEX_FILE
from lt_data.store.manifest import StoreManifest
from lt_data.store.token_store import TokenStore
from lt_data.tokenizing.engine import EngineRequest


def append(
    store: str | Path,
    sources: Sequence[str | Path],
    *,
    engine: EngineRequest = "auto",
    options: SourceOptions | None = None,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Append documents to a store as a new generation; the same call resumes an interrupted one.

    Tokenizer, BOS and EOS, selection, map and kept columns are those of the store.

    Args:
        store: folder of the store.
        sources: files, folders, fsspec URLs and datasets; this and the other options are those of `prepare`.
        engine: tokenizer engine.
        options: field of the text or ids, suffixes, bad input, hub datasets.
        progress: called with the source bytes encoded.
        notify: called with notices for the user.

    Returns:
        The manifest of a flat store with the shards of the new generation.

    Raises:
        DataError: as for `prepare`; the store drops duplicates, or its map has changed.
    """
    if str(store).startswith("s3://"):
        raise DataError(f"{store}: download it first (lt data download)")
    root = Path(store)
    opened, loaded = TokenStore(root), load_store(root)
    if loaded.joined is not None and loaded.joined.parent == root and loaded.joined.name == GENERATION_FILE:
        raise DataError(f"{root}: a generation; append to the store, {Path(os.path.abspath(root)).parent.parent}")
    base = loaded.parts[0].manifest
    if base.selection.drop_duplicates:
        raise DataError(
            f"{root}: made with drop_duplicates, but it does not keep the hashes of its documents; prepare all sources "
            "again (lt data prepare --drop-duplicates)"
        )
    reader = DocumentReader(
        sources,
        replace(options or SourceOptions(), keep_fields=True if base.map else [column.name for column in base.columns]),
    )
    record_map = load_record_map(base.map.function, base.map.arguments, reader.options) if base.map else None
    if record_map is not None and record_map.info != base.map:
        raise DataError(
            f"map = {record_map.info.function!r}: its code is not that of {root}; prepare all sources again"
        )
    if (found := _find_appended(root, reader.fingerprint)) is not None:
        notify(f"{root} has these sources already ({GENERATION_FOLDER}/{found.name})")
        return load_store(found).manifest
    generations = list_generations(root)
    if not generations:
        _name_first(root, loaded)
    target = root / GENERATION_FOLDER / f"{max(len(generations), 1):05d}"

    def add_generation(folder: Path, manifest: StoreManifest) -> None:
        parts = [*loaded.parts, new_part(root, target, manifest)]
        for name, content in _encode_generation(parts, reader.fingerprint).items():
            write_file(folder / name, content)

    unit_options = UnitOptions(
        tokenizer=opened.tokenizer(),
        bos=base.bos,
        eos=base.eos,
        engine=engine,
        special_tokens_as=base.special_tokens_as,
        shard_tokens=base.shard_tokens,
        selection=base.selection,
        columns=base.columns,
        record_map=base.map.function if base.map else None,
        map_args=base.map.arguments if base.map else None,
        source_options=reader.options,
    )
    plan = {"listing of the sources": reader.fingerprint, **unit_options.describe()}
    run_one_unit(target, unit_options, reader, plan, progress, add_files=add_generation)
    for notice in reader.notices():
        notify(notice)
    return load_store(target).manifest


def _encode_generation(parts: Sequence[LoadedPart], appended: str = "") -> dict[str, bytes]:
    """Return the files of a generation by name: the index of a large one, and last its joined manifest."""
    joined, _, index = join_parts(parts, appended=appended)
    files = {} if index is None else {INDEX_FILE: index}
    return {**files, GENERATION_FILE: joined.encode()}


def _find_appended(root: Path, listing: str) -> Path | None:
    for generation in list_generations(root):
        if read_joined(generation / GENERATION_FILE).appended == listing:
            return generation
    return None


def _name_first(root: Path, loaded: LoadedStore) -> None:
    folder = root / GENERATION_FOLDER / "00000"
    with translate_os_errors("write", folder):
        make_folder_synced(folder)
        for name, content in _encode_generation(loaded.parts).items():
            building = folder / f"{name}.tmp"
            building.unlink(missing_ok=True)  # of a killed call
            write_file(building, content)
            building.rename(folder / name)
            fsync_folder(folder)
