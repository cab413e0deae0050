"""A token store in the format of another program, complete or not at all.

What is asked for is checked first, then the room on the disk, then the folder is built beside its place, every file
hashed and synced, and moved there in one rename. Tokens in = tokens in the export + those left out on request, which
the report counts. Memory: one batch and the lengths of the documents; cost: one pass over the tokens.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.exports.files import Files
from lt_data.exports.job import Job, Written
from lt_data.exports.note import FILE_NAME, Note
from lt_data.exports.options import ExportOptions, ExportReport
from lt_data.exports.room import check_room
from lt_data.progress import Progress, silent
from lt_data.storage import new_folder, os_errors
from lt_data.store.token_store import TokenStore


def export(
    store: TokenStore | str | Path,
    *,
    out: str | Path,
    options: ExportOptions,
    progress: Progress = silent,
) -> ExportReport:
    """Write a store in another format.

    Args:
        store: the store, or its folder.
        out: the folder to make. It appears when all is done.
        options: the format, and how.
        progress: told of the tokens written.

    Returns:
        What the export holds.

    Raises:
        DataError: `out` in use, no room, a store without tokens, or the file system refuses.
    """
    opened = store if isinstance(store, TokenStore) else TokenStore.open(store)
    out = Path(out)
    _check_out(out)
    if not opened.n_tokens:
        raise DataError(f"store {opened.path} has no tokens: there is nothing to export")
    job = Job(store=opened, options=options, progress=progress)
    module: Any = import_module(f"lt_data.exports.{options.to}")
    at_least: Callable[[Job], int] = module.at_least
    write: Callable[[Job, Files], Written] = module.write
    check_room(out, at_least(job))
    pad_id = job.pad_id if options.seq_len is not None else None
    with new_folder(out) as building:
        files = Files(building)
        written = write(job, files)
        dropped = opened.n_tokens - written.tokens
        assert dropped >= 0
        assert dropped == 0 or options.last_row == "drop"
        if options.to != "smp":
            note = Note(
                to=options.to,
                store=opened.manifest.fingerprint,
                tokenizer=opened.manifest.tokenizer.sha256,
                bos=opened.manifest.bos,
                eos=opened.manifest.eos,
                seq_len=options.seq_len,
                pack=None if options.seq_len is None else options.pack,
                samples=written.samples,
                tokens=written.tokens,
                padding=written.padding,
                pad_id=pad_id if written.padding else None,
                dropped_tokens=dropped,
                files=tuple(files.listed),
            )
            files.add(FILE_NAME, note.encode())
    return ExportReport(
        to=options.to,
        files=len(files.listed),
        bytes=files.bytes,
        samples=written.samples,
        tokens=written.tokens,
        padding=written.padding,
        dropped_tokens=dropped,
        lost_labels=written.lost_labels,
    )


def _check_out(out: Path) -> None:
    """Raise `DataError` when something stands where the export is to be."""
    with os_errors("read", out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"out={out}: exists and is not an empty folder: choose another, or move it away")
