"""Import of ids that Litespark's or Megatron's preparation wrote, as a token store.

Documents of Megatron keep their boundaries. Litespark's files have none, so `boundaries` gives the rule, and padding
that is known (by our list of an export) or given (`pad_id`) is left out and counted. No format records its tokenizer,
so it must be given, and each id is checked against it. Saved datasets and JSON lines of ids are sources of `prepare`
(`tokens_field`).
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.exports import litespark, megatron
from lt_data.exports.export_list import EXPORT_LIST, ExportList, read_export_list
from lt_data.exports.options import ImportOptions, ImportReport
from lt_data.preparation.prepare import DEFAULT_SHARD_TOKENS, prepare
from lt_data.progress import Progress, no_progress
from lt_data.sources.document import Document
from lt_data.tokenizing.tokenizer import Tokenizer


def import_tokens(
    path: str | Path,
    *,
    options: ImportOptions,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: Progress = no_progress,
) -> ImportReport:
    """Import ids that another program prepared into a token store.

    Args:
        path: the folder or file, see the module of each format.
        options: the format and its options.
        tokenizer: the tokenizer that made the ids, or its folder, model of the hub, or URL (`Tokenizer.load`).
        out: folder of the store, created when the import is complete.
        shard_tokens: target number of ids of a shard.
        progress: called with the tokens read.

    Returns:
        The manifest of the store, and the amount of padding.

    Raises:
        DataError: nothing of that format at `path`, a broken file, ids outside the vocabulary, another tokenizer than
            in the list of our export, `out` in use, or a file system error.
    """
    path, left_out = Path(path), Counter[str]()
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    listed = read_export_list(path) or (read_export_list(path.parent) if path.name in litespark.SPLITS else None)
    if listed is not None and listed.to != options.format:
        raise DataError(f"{path}: {EXPORT_LIST} says that this is {listed.to}, not {options.format}")
    if listed is not None and listed.tokenizer != tokenizer.sha256:
        raise DataError(
            f"{path}: made with another tokenizer than {tokenizer.name} (SHA-256 {listed.tokenizer[:16]}, not "
            f"{tokenizer.sha256[:16]}); give the one that made it"
        )
    if options.format == "megatron":
        samples = megatron.read(path)
    else:
        marker = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}.get(options.boundaries or "", -1)
        if marker is None:
            raise DataError(f"boundaries = {options.boundaries!r}: tokenizer {tokenizer.name} has no such token")
        samples = litespark.read_documents(
            path,
            options,
            marker=marker,
            eos_id=tokenizer.eos_id,
            n_tokens=None if listed is None else listed.tokens,
            left_out=left_out,
        )
    own = listed if options.boundaries not in ("rows", "files") else None
    bos, eos = options.bos, options.eos
    manifest = prepare(
        _read(samples, path, listed, left_out),
        tokenizer=tokenizer,
        out=out,
        bos=own is not None and own.bos if bos is None else bos,
        eos=own is not None and own.eos if eos is None else eos,
        shard_tokens=shard_tokens,
        progress=progress,
    )
    return ImportReport(manifest=manifest, padding=left_out["padding"])


def _read(
    samples: Iterator[tuple[np.ndarray, str]], path: Path, listed: ExportList | None, left_out: Counter[str]
) -> Iterator[Document]:
    """Yield the documents; what came in all is compared with the list of the export at the end."""
    tokens = 0
    for ids, location in samples:
        tokens += ids.size
        yield Document(ids=ids, source=location)
    if listed is not None and (tokens, left_out["padding"]) != (listed.tokens, listed.padding):
        raise DataError(
            f"{path}: {tokens} tokens and {left_out['padding']} of padding, {EXPORT_LIST} says {listed.tokens} and "
            f"{listed.padding}; export again"
        )
