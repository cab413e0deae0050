"""Export of a token store in another format, atomically.

The options are checked first, then the disk space; then the folder is built beside its target, every file is hashed and
synced, and the folder is renamed into place. Tokens of the store = exported tokens + tokens dropped on request, which
the report counts. Memory: one batch and the lengths of the documents; cost: one pass over the tokens.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.exports.disk_space import check_disk_space
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.export_manifest import EXPORT_MANIFEST_FILE, ExportManifest
from lt_data.exports.files import OutputFiles
from lt_data.exports.options import ExportOptions, ExportReport
from lt_data.progress import Progress, no_progress
from lt_data.storage import atomic_folder, translate_os_errors
from lt_data.store.token_store import TokenStore


def export(
    store: TokenStore | str | Path,
    *,
    out: str | Path,
    options: ExportOptions,
    progress: Progress = no_progress,
) -> ExportReport:
    """Export a store in another format.

    Args:
        store: the store, or its folder.
        out: the new folder, created when the export is complete.
        options: the format and its options.
        progress: called with the tokens written.

    Returns:
        The totals of the export.

    Raises:
        DataError: `out` in use, too little disk space, a store without tokens, or a file system error.
    """
    opened = store if isinstance(store, TokenStore) else TokenStore(store)
    out = Path(out)
    _check_output(out)
    if not opened.n_tokens:
        raise DataError(f"store {opened.path}: has no tokens to export")
    job = ExportJob(store=opened, options=options, progress=progress)
    module: Any = import_module(f"lt_data.exports.{options.to}")
    min_bytes: Callable[[ExportJob], int] = module.min_bytes
    write: Callable[[ExportJob, OutputFiles], WriteResult] = module.write
    check_disk_space(out, min_bytes(job))
    pad_id = job.pad_id if options.seq_len is not None else None
    with atomic_folder(out) as building:
        files = OutputFiles(building)
        written = write(job, files)
        dropped = opened.n_tokens - written.tokens
        assert dropped >= 0
        assert dropped == 0 or options.last_row == "drop"
        if options.to != "smp":
            manifest = ExportManifest(
                to=options.to,
                store=opened.manifest.fingerprint,
                tokenizer=opened.manifest.tokenizer.sha256,
                bos=opened.manifest.bos,
                eos=opened.manifest.eos,
                seq_len=options.seq_len,
                packing=None if options.seq_len is None else options.packing,
                samples=written.samples,
                tokens=written.tokens,
                padding=written.padding,
                pad_id=pad_id if written.padding else None,
                dropped_tokens=dropped,
                files=tuple(files.completed),
            )
            files.add(EXPORT_MANIFEST_FILE, manifest.encode())
    return ExportReport(
        to=options.to,
        files=len(files.completed),
        bytes=files.bytes,
        samples=written.samples,
        tokens=written.tokens,
        padding=written.padding,
        dropped_tokens=dropped,
        dropped_labels=written.dropped_labels,
    )


def _check_output(out: Path) -> None:
    """Raise DataError if `out` exists and is not an empty folder."""
    with translate_os_errors("read", out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"out = {out}: exists and is not an empty folder; choose another, or move it away")
