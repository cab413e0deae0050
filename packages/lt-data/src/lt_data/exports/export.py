"""Export of a token store in another format, atomically.

The folder is built beside its target, every file is synced, and the folder is renamed into place. Tokens of the store =
exported tokens + tokens dropped on request, which the report counts. Memory: one batch and the lengths of the
documents; cost: one pass over the tokens, and for `lt-export.json` one over the files.
"""

from pathlib import Path

from lt_data.errors import DataError
from lt_data.exports import hf, litespark, megatron, smp
from lt_data.exports.export_list import EXPORT_LIST, ExportList
from lt_data.exports.job import ExportJob
from lt_data.exports.options import ExportOptions, ExportReport
from lt_data.progress import Progress, no_progress
from lt_data.remote.file_list import sha256_of
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
        report, manifest = job.report, opened.manifest
        report.dropped_tokens = opened.n_tokens - report.tokens
        assert report.dropped_tokens == 0 or (report.dropped_tokens > 0 and options.last_row == "drop")
        if options.to in ("litespark", "megatron"):
            listed = ExportList(
                to=options.to,
                tokenizer=manifest.tokenizer.sha256,
                bos=manifest.bos,
                eos=manifest.eos,
                tokens=report.tokens,
                padding=report.padding,
                files={path.relative_to(folder).as_posix(): sha256_of(path) for path in _files_in(folder)},
            )
            write_file(folder / EXPORT_LIST, listed.encode())
        sizes = [path.stat().st_size for path in _files_in(folder)]
        report.files, report.bytes = len(sizes), sum(sizes)
    return report


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
