"""Export of a token store in another format, atomically.

The folder is built beside its target, every file is synced, and the folder is renamed into place. Tokens of the store =
exported tokens + tokens dropped on request, which the report counts. Memory: one batch and the lengths of the
documents; cost: one pass over the tokens, and for `lt-export.json` one over the files.
"""

from pathlib import Path

from lt_data.errors import DataError
from lt_data.exports import hf, litespark, megatron, smp
from lt_data.exports.export_list import EXPORT_LIST, ExportList, hash_files
from lt_data.exports.job import ExportJob
from lt_data.exports.options import ExportOptions, ExportReport
from lt_data.progress import Progress, no_progress
from lt_data.storage import atomic_folder, translate_os_errors, write_file
from lt_data.store.token_store import TokenStore

_WRITERS = {"hf": hf.write, "litespark": litespark.write, "megatron": megatron.write, "smp": smp.write}


def export(
    store: TokenStore | str | Path,
    *,
    out: str | Path,
    options: ExportOptions,
    progress: Progress = no_progress,
) -> ExportReport:
    """Export a store in another format.

    Args:
        store: the store, its folder, or its `s3://` address.
        out: the new folder, created when the export is complete.
        options: the format and its options.
        progress: called with the tokens written.

    Returns:
        The totals of the export.

    Raises:
        DataError: `out` in use, a store without tokens, or a file system error.
    """
    opened, out = store if isinstance(store, TokenStore) else TokenStore(store), Path(out)
    with translate_os_errors("read", out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"out = {out}: exists and is not an empty folder; choose another, or move it away")
    if not opened.n_tokens:
        raise DataError(f"store {opened.path}: has no tokens to export")
    with atomic_folder(out) as folder:
        job = ExportJob(store=opened, options=options, folder=folder, progress=progress)
        _WRITERS[options.to](job)
        dropped = opened.n_tokens - job.tokens
        assert dropped == 0 or (dropped > 0 and options.last_row == "drop")
        if options.to in ("litespark", "megatron"):
            manifest = opened.manifest
            listed = ExportList(
                to=options.to,
                store=manifest.fingerprint,
                tokenizer=manifest.tokenizer.sha256,
                bos=manifest.bos,
                eos=manifest.eos,
                tokens=job.tokens,
                padding=job.padding,
                files=hash_files(folder),
            )
            write_file(folder / EXPORT_LIST, listed.encode())
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return ExportReport(
        files=len(sizes),
        bytes=sum(sizes),
        samples=job.samples,
        tokens=job.tokens,
        padding=job.padding,
        dropped_tokens=dropped,
        dropped_labels=job.dropped_labels,
    )
