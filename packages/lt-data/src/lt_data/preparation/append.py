"""Append of documents to a token store, as a new generation (lt_data.store.generations).

The new documents are prepared, with the options of the store, into a store of their own in its folder, and a manifest
that names both replaces `manifest.json`. So the store opens as its newest generation before and after a kill at any
time, and the same command resumes. What was there is never changed: older generations stay readable. The sources of a
generation are recorded; appending the same ones again does nothing.

Cost: that of preparing the new documents; the manifest is read and written.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lt_data.errors import DataError
from lt_data.preparation.join import combine_stores
from lt_data.preparation.prepare import prepare
from lt_data.preparation.record_map import load_record_map
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.options import SourceOptions
from lt_data.sources.reader import DocumentReader
from lt_data.store.generations import generation_file, names_generation
from lt_data.store.manifest import MANIFEST_FILE, StoreManifest, write_manifest
from lt_data.store.token_store import TokenStore
from lt_data.tokenizing.engine import EngineRequest

APPENDED_FOLDER = "appended"


def append(
    store: str | Path,
    sources: Sequence[str | Path],
    *,
    engine: EngineRequest = "auto",
    workers: int = 1,
    options: SourceOptions | None = None,
    unit_bytes: int | None = None,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Append documents to a store as a new generation; the same call resumes an interrupted one.

        >>> _ = Path("more.txt").write_text("One more text.")
        >>> append("store", ["more.txt"]).documents
        60

    Tokenizer, BOS and EOS, selection, map and kept columns are those of the store.

    Args:
        store: folder of the store.
        sources: files, folders, fsspec URLs and datasets; this and the other options are those of `prepare`.
        engine: tokenizer engine.
        workers: worker processes.
        options: field of the text or ids, suffixes, bad input, hub datasets.
        unit_bytes: bytes of the sources in a unit; None: as for `prepare`.
        progress: called with the source bytes encoded.
        notify: called with notices for the user.

    Returns:
        The manifest of the new generation.

    Raises:
        DataError: as for `prepare`; the store drops duplicates, or its map has changed.
    """
    if str(store).startswith("s3://"):
        raise DataError(f"{store}: download it first (lt data download)")
    root = Path(store)
    if names_generation(root):
        raise DataError(f"{root}: a generation; append to the store, {root.parent}")
    opened = TokenStore(root)
    base = opened.manifest
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
    if reader.fingerprint in base.appended:
        notify(f"{root} has these sources already")
        return base
    number = len(base.appended) + 1
    target = root / APPENDED_FOLDER / f"{number:05d}"
    prepare(
        sources,
        tokenizer=opened.tokenizer(),
        out=target,
        options=options,
        bos=base.bos,
        eos=base.eos,
        engine=engine,
        special_tokens_as=base.special_tokens_as,
        selection=base.selection,
        record_map=base.map.function if base.map else None,
        map_args=base.map.arguments if base.map else None,
        keep=[f"{column.name}:{column.type}" for column in base.columns],
        shard_tokens=base.shard_tokens,
        unit_bytes=unit_bytes,
        workers=workers,
        progress=progress,
        notify=notify,
    )
    manifest = combine_stores(root, [opened, TokenStore(target)])
    manifest = replace(manifest, appended=(*base.appended, reader.fingerprint))
    if number == 1:
        write_manifest(base, generation_file(root, 0))
    write_manifest(manifest, generation_file(root, number))
    write_manifest(manifest, root / MANIFEST_FILE)
    return manifest
