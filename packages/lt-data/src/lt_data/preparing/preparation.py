"""Documents to a token store, in their order, by one or several processes, with the same bytes for any number of them.

The documents are read here, chosen (lt_data.preparing.intake), encoded in batches of about one megabyte
(lt_data.tokenizing.encode) and appended to the shards in order (lt_data.preparing.store_writer). Everything is
checked before the first byte is written; the store is built beside its place and moved there complete
(lt_data.preparing.building). A job that was cut off goes on after its last finished shard when the same command is
run again, and the result is the same, byte for byte. Cost: the tokenizer's time and a few per cent; memory does not
grow with the corpus, unless duplicates are dropped (16 to 32 bytes for each distinct document).

Several machines share a job without talking to each other: each prepares the part of its rank, and `merge` joins them
(lt_data.preparing.merging).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.preparing.building import SUFFIX, Building, building
from lt_data.preparing.intake import Intake
from lt_data.preparing.store_writer import PART_FOLDER, StoreWriter
from lt_data.progress import Progress, silent
from lt_data.sources.document import Document
from lt_data.sources.options import OnBad
from lt_data.sources.reader import DocumentReader, sources_of
from lt_data.storage import make_folder, os_errors, write_file
from lt_data.store.manifest import (
    FILE_NAME,
    PACK_FOLDER,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    Manifest,
    Part,
    Selection,
    Shard,
    Sources,
    TokenizerInfo,
    read_manifest,
)
from lt_data.tokenizing.encode import encode_all
from lt_data.tokenizing.encoder import Encoder
from lt_data.tokenizing.engines import Asked, EngineChoice
from lt_data.tokenizing.tokenizer import Specials, Tokenizer

SHARD_TOKENS = 2**27
Notice = Callable[[str], None]


def unheard(message: str) -> None:
    """The notices of someone who does not want any."""


def prepare(
    sources: Sequence[str | Path],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    engine: Asked = "auto",
    specials: Specials = "text",
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    selection: Selection | None = None,
    suffixes: Sequence[str] | None = None,
    text_field: str = "text",
    tokens_field: str | None = None,
    on_bad: OnBad = "error",
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    rank: int = 0,
    world: int = 1,
    overwrite: bool = False,
    fresh: bool = False,
    progress: Progress = silent,
    notice: Notice = unheard,
) -> Manifest:
    """Read text, encode it and write a token store.

    Run again after it was cut off, in whatever way, it goes on after the last finished shard: what is finished lies in
    `<out>.building`. It goes on only with the same sources, tokenizer and options.

    Args:
        sources: files, folders, fsspec URLs and datasets (see `lt_data.read_documents`, also for the next options).
        tokenizer: a tokenizer, or the folder of one.
        out: folder of the store. It appears when all is done.
        bos: begin each document with the tokenizer's BOS id.
        eos: end each document with the tokenizer's EOS id.
        engine: what makes the ids: "hf" (tokenizers), "gigatoken", or "auto", which takes the faster one if that has
            shown the same ids for the beginning of the text.
        specials: whether a special token's string in a text stays text, or becomes the special id ("ids").
        workers: processes that encode. With 1 this process does it, with the threads of `tokenizers`; else each worker
            uses one thread. The store is the same.
        shard_tokens: about how many ids go into one shard; a longer document has a shard of its own.
        selection: which documents are taken: limits of length, no duplicates.
        suffixes: which files of a folder are read.
        text_field: the field or column that holds the text.
        tokens_field: the field or column that holds ready-made ids.
        on_bad: "error" stops at what cannot be used, "skip" leaves it out and counts it.
        config: configuration of a dataset of the hub.
        split: split of a dataset.
        revision: commit, branch or tag of a dataset of the hub.
        streaming: read a dataset of the hub without keeping it on the disk.
        rank: which part of the job this is, from 0. It is written to `part_folder(out, rank, world)`.
        world: parts of the job; each may be made on another machine, and `lt_data.merge` joins them.
        overwrite: replace `out` if it is a token store.
        fresh: throw away what an earlier run left that was cut off.
        progress: told of the source bytes encoded.
        notice: told what is worth knowing, in words.

    Returns:
        The manifest of the new store.

    Raises:
        DataError: bad source, no document, tokenizer without the BOS or EOS asked for, `out` in use or unwritable, or
            a job that was cut off and was another one.
    """
    reader = DocumentReader(
        sources,
        suffixes=suffixes,
        text_field=text_field,
        tokens_field=tokens_field,
        on_bad=on_bad,
        config=config,
        split=split,
        revision=revision,
        streaming=streaming,
    )
    return prepare_documents(
        reader,
        tokenizer=tokenizer,
        out=out,
        bos=bos,
        eos=eos,
        engine=engine,
        specials=specials,
        workers=workers,
        shard_tokens=shard_tokens,
        selection=selection,
        rank=rank,
        world=world,
        overwrite=overwrite,
        fresh=fresh,
        progress=progress,
        notice=notice,
    )


def prepare_documents(
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    bos: bool = True,
    eos: bool = True,
    engine: Asked = "auto",
    specials: Specials = "text",
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    selection: Selection | None = None,
    rank: int = 0,
    world: int = 1,
    overwrite: bool = False,
    fresh: bool = False,
    progress: Progress = silent,
    notice: Notice = unheard,
) -> Manifest:
    """Encode documents that the caller made and write a token store; arguments and errors as for `prepare`.

    A job over a `DocumentReader` goes on after it was cut off. Over other documents it begins again, since nobody can
    tell whether they are the same, and it has no parts.
    """
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    for name, value in (("workers", workers), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise DataError(f"{name}={value}: at least 1")
    selection = selection or Selection()
    encoder = Encoder(tokenizer, bos=bos, eos=eos, engine=engine, specials=specials)
    reader = documents if isinstance(documents, DocumentReader) else None
    out = Path(out)
    part: Part | None = None
    if world > 1 or rank:
        if reader is None:
            raise DataError(f"rank={rank}, world={world}: only a DocumentReader (or prepare) has parts")
        whole, reader = reader, reader.part(rank, world)
        part = Part(rank=rank, world=world, listing=whole.fingerprint)
        out = part_folder(out, rank, world)
    where = reader.description if reader else "the documents given"
    if reader is not None and not reader.n_files and not part:
        raise DataError(f"no text in {where}: check the sources and the suffixes")
    if not out.with_name(out.name + SUFFIX).exists():
        check_out(out, overwrite=overwrite)  # before anything is made

    job = _description(encoder, selection, shard_tokens, reader, part)
    with building(out, job=job, resumable=reader is not None, fresh=fresh) as at_work:
        if at_work.published:
            notice(f"{out} had been finished already")
            return read_manifest(out)
        replaces = check_out(out, overwrite=overwrite)
        with StoreWriter(
            at_work,
            shard_tokens=shard_tokens,
            dtype=encoder.dtype,
            selection=selection,
            special_strings=tokenizer.special_strings,
            keep_sides=part is not None,
        ) as writer:
            if at_work.records:
                notice(f"goes on after {len(at_work.records)} finished shards in {at_work.path}")
                encoder.choice = EngineChoice.from_json(writer.note["engine"])
            shards = _encode_all(documents, reader, encoder, writer, selection, workers, progress)
            listed = writer.listed()
            part = replace(part, files=writer.side_hashes()) if part else None
        counts = writer.counts
        if not shards and not part:
            why = ", ".join(f"{amount.documents} {reason}" for reason, amount in sorted(counts.left_out.items()))
            left_out = f" ({why})" if why else ""
            raise DataError(f"no text in {where}{left_out}: check the sources and the suffixes")
        manifest = Manifest(
            tokenizer=tokenizer_info(tokenizer),
            bos=bos,
            eos=eos,
            dtype=encoder.dtype,
            shards=shards,
            text_bytes=counts.text_bytes,
            read=counts.read,
            left_out=dict(sorted(counts.left_out.items())),
            skipped=dict(sorted(counts.skipped.items())),
            special_strings=dict(sorted(counts.special.items())),
            specials=specials,
            selection=selection,
            engine=encoder.choice.to_json() if encoder.choice else {},
            shard_tokens=shard_tokens,
            sources=sources_of(listed, skipped_links=reader.sources().skipped_links) if reader else Sources(),
            part=part,
        )
        publish(at_work, tokenizer.files, manifest, replace=replaces)
    for reason, example in sorted(reader.examples.items()) if reader else ():
        notice(f"skipped as {reason}: for example {example}")
    return manifest


def _encode_all(
    documents: Iterable[Document],
    reader: DocumentReader | None,
    encoder: Encoder,
    writer: StoreWriter,
    selection: Selection,
    workers: int,
    progress: Progress,
) -> tuple[Shard, ...]:
    """Everything from the writer's point on."""
    before = writer.counts.read.documents
    start = documents if reader is None else reader.documents_from(*writer.point)
    intake = Intake(start, selection, reader=reader, seen=writer.seen())
    read_bytes = (lambda: reader.read_bytes) if reader else (lambda: 0)
    with closing(encode_all(intake, encoder, workers, read_bytes=read_bytes)) as batches:
        for batch, encoded in batches:
            writer.note = {"engine": encoder.settle([]).to_json()}
            writer.write(
                encoded.tokens,
                encoded.lengths,
                texts=batch.texts,
                text_bytes=batch.text_bytes,
                special=encoded.special,
                point=(batch.file, batch.record),
                intake=intake,
                sources=reader.finished if reader else (),
            )
            if reader:
                progress(batch.read_bytes, reader.total_bytes, "bytes")
            else:
                progress(writer.counts.text_bytes, 0, "bytes")
    shards = writer.finish(intake, reader.finished if reader else ())
    assert before + intake.n_read == writer.counts.read.documents
    return shards


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """What a manifest says of a tokenizer."""
    return TokenizerInfo(
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        files={name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()},
        name=tokenizer.name,
    )


def publish(at_work: Building, tokenizer_files: Mapping[str, bytes], manifest: Manifest, *, replace: bool) -> None:
    """Add tokenizer and manifest to finished shards, and put the store in its place."""
    assert manifest.adds_up, "documents or tokens were lost"
    with os_errors("write", at_work.content):
        make_folder(at_work.content / TOKENIZER_FOLDER)
    for name, content in tokenizer_files.items():
        write_file(at_work.content / TOKENIZER_FOLDER / name, content)
    write_file(at_work.content / FILE_NAME, (json.dumps(manifest.to_json(), indent=2) + "\n").encode())
    at_work.publish(manifest.fingerprint, replace=replace)


def part_folder(out: str | Path, rank: int, world: int) -> Path:
    """Where the part of a rank is written: beside the store that the parts will be merged into."""
    out = Path(out)
    return out.with_name(f"{out.name}.part-{rank:05d}-of-{world:05d}")


def check_out(out: Path, *, overwrite: bool) -> bool:
    """Whether there is a store to replace at `out`; an error when what is there is not ours to touch."""
    with os_errors("read", out):
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        if not (out / FILE_NAME).is_file():
            raise DataError(f"out={out}: exists and is no token store: choose another folder")
    read_manifest(out)
    if not overwrite:
        raise DataError(f"out={out}: holds a token store already: choose another folder, or overwrite it (--overwrite)")
    known = {FILE_NAME, SHARD_FOLDER, TOKENIZER_FOLDER, PACK_FOLDER, PART_FOLDER}
    with os_errors("read", out):
        foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
    if foreign:
        raise DataError(f"out={out}: holds {', '.join(foreign)} beside the store: move that away before overwriting")
    return True


def _description(
    encoder: Encoder, selection: Selection, shard_tokens: int, reader: DocumentReader | None, part: Part | None
) -> dict[str, Any]:
    """What must not change between the runs of one job."""
    return {
        "sources": reader.description if reader else "made by the caller",
        "bytes of the sources": reader.total_bytes if reader else 0,
        "listing of the sources": reader.fingerprint if reader else "",
        "tokenizer": encoder.tokenizer.sha256,
        "bos": encoder.bos,
        "eos": encoder.eos,
        "engine": encoder.asked,
        "specials": encoder.specials,
        "shard_tokens": shard_tokens,
        "part": f"{part.rank} of {part.world}" if part else "the whole",
        **asdict(selection),
        **{f"{package} (version)": _version(package) for package in ("tokenizers", "gigatoken")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
