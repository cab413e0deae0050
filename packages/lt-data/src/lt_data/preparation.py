"""Documents to a token store, in their order, by one or several processes, with the same bytes for any number of them.

The documents are read here, encoded in batches of about one megabyte (lt_data.encode) and appended to the shards in
order (lt_data.shards). Everything is checked before the first byte is written; the store is built beside its place and
moved there complete. Cost: the tokenizer's time and a few per cent; memory does not grow with the corpus.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from lt_data.encode import Encoder, encode_all
from lt_data.errors import DataError
from lt_data.manifest import EMPTY, FILE_NAME, Amount, Manifest, Sources, TokenizerInfo, read_manifest
from lt_data.progress import Progress, silent
from lt_data.shards import ShardWriter
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.storage import new_folder, os_errors, write_file
from lt_data.store import PACK_FOLDER, SHARD_FOLDER, TOKENIZER_FOLDER
from lt_data.tokenizer import Tokenizer

SHARD_TOKENS = 2**27


def prepare(
    sources: Sequence[str | Path],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    suffixes: Sequence[str] | None = None,
    text_field: str = "text",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Manifest:
    """Read text, encode it and write a token store.

    Args:
        sources: files, folders and fsspec URLs (see `lt_data.read_documents`).
        tokenizer: a tokenizer, or the folder of one.
        out: folder of the store. It appears when all is done.
        bos: begin each document with the tokenizer's BOS id.
        eos: end each document with the tokenizer's EOS id.
        workers: processes that encode. With 1 this process does it, with the threads of `tokenizers`; else each worker
            uses one thread. The store is the same.
        shard_tokens: about how many ids go into one shard; a longer document has a shard of its own.
        suffixes: which files of a folder are read.
        text_field: the field of a JSON line that holds the text.
        overwrite: replace `out` if it is a token store.
        progress: told of the source bytes encoded.

    Returns:
        The manifest of the new store.

    Raises:
        DataError: bad source, no document, tokenizer without the BOS or EOS asked for, `out` in use or unwritable.
    """
    reader = DocumentReader(sources, suffixes=suffixes, text_field=text_field)
    return prepare_documents(
        reader,
        tokenizer=tokenizer,
        out=out,
        bos=bos,
        eos=eos,
        workers=workers,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
        progress=progress,
    )


def prepare_documents(
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Manifest:
    """Encode documents that the caller made and write a token store; arguments and errors as for `prepare`."""
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    for name, value in (("workers", workers), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise DataError(f"{name}={value}: at least 1")
    encoder = Encoder(tokenizer, bos=bos, eos=eos)
    out = Path(out)
    replace = _check_out(out, overwrite=overwrite)
    reader = documents if isinstance(documents, DocumentReader) else None
    where = reader.description if reader else "the documents given"
    if reader is not None and not reader.n_files:
        raise DataError(f"no text in {where}: check the sources and the suffixes")

    text_bytes = 0
    empty = 0
    special: Counter[str] = Counter()
    with new_folder(out, replace=replace) as building:
        with os_errors("write", building):
            (building / SHARD_FOLDER).mkdir()
            (building / TOKENIZER_FOLDER).mkdir()
        with (
            ShardWriter(building / SHARD_FOLDER, shard_tokens, encoder.dtype) as writer,
            closing(encode_all(documents, encoder, workers)) as encoded_batches,
        ):
            for batch, encoded in encoded_batches:
                writer.append(encoded.tokens, encoded.lengths[encoded.lengths > 0])
                text_bytes += batch.text_bytes
                empty += encoded.empty
                special.update(encoded.special)
                if reader is None:
                    progress(text_bytes, 0, "bytes")
                else:
                    progress(batch.read_bytes, reader.total_bytes, "bytes")
            shards = writer.finish()
        if not shards:
            raise DataError(f"no text in {where} ({empty} empty documents): check the sources and the suffixes")
        for name, content in tokenizer.files.items():
            write_file(building / TOKENIZER_FOLDER / name, content)
        manifest = Manifest(
            tokenizer=TokenizerInfo(
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                files={name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()},
                name=tokenizer.name,
            ),
            bos=bos,
            eos=eos,
            dtype=encoder.dtype,
            shards=shards,
            text_bytes=text_bytes,
            read=Amount(
                documents=sum(shard.documents for shard in shards) + empty,
                text_bytes=text_bytes,
                tokens=sum(shard.tokens for shard in shards),
            ),
            left_out={EMPTY: Amount(documents=empty)} if empty else {},
            shard_tokens=shard_tokens,
            special_strings=dict(sorted(special.items())),
            sources=reader.sources() if reader else Sources(),
        )
        write_file(building / FILE_NAME, (json.dumps(manifest.to_json(), indent=2) + "\n").encode())
    return manifest


def _check_out(out: Path, *, overwrite: bool) -> bool:
    """Whether there is a store to replace at `out`; an error when what is there is not ours to touch."""
    with os_errors("read", out):
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        if not (out / FILE_NAME).is_file():
            raise DataError(f"out={out}: exists and is no token store: choose another folder")
    read_manifest(out)
    if not overwrite:
        raise DataError(f"out={out}: holds a token store already: choose another folder, or overwrite it (--overwrite)")
    known = {FILE_NAME, SHARD_FOLDER, TOKENIZER_FOLDER, PACK_FOLDER}
    with os_errors("read", out):
        foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
    if foreign:
        raise DataError(f"out={out}: holds {', '.join(foreign)} beside the store: move that away before overwriting")
    return True
