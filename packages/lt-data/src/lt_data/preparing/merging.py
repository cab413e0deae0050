"""The parts of a job, made on several machines, to one store: the store that one machine would have made.

Parts are runs of whole files in the order of their ranks, so their documents one after the other are those of the whole
job. `merge` writes them into new shards, which are therefore cut at the same documents: shards, indexes and tokenizer
are the same files, byte for byte, and so is the manifest but for `merged_from` and what `engine` says of the check
(each part checked the faster engine on its own text). Each shard is compared with its hash while it is read.

With duplicates dropped, each part has dropped its own; what a later part has in common with an earlier one is dropped
here, by the hashes that the parts carry, and all counts become those of the whole job. Memory: the same 16 to 32 bytes
per distinct document as in `prepare`, and 50 per document of one part; else that of one shard's index. Cost: every byte
is read, hashed, written and hashed once.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.preparing.building import SUFFIX, building
from lt_data.preparing.counts import Counts
from lt_data.preparing.duplicates import SeenHashes
from lt_data.preparing.preparation import Notice, check_out, part_folder, publish, unheard
from lt_data.preparing.store_writer import (
    DOCUMENTS,
    ENTRY,
    PART_FOLDER,
    SOURCES,
    SPECIAL,
    clear,
    read_sources,
    reason_by_tokens,
)
from lt_data.progress import Progress, silent
from lt_data.sources.reader import sources_of
from lt_data.storage import make_folder, os_errors
from lt_data.store.manifest import DUPLICATE, SHARD_FOLDER, TOKENIZER_FOLDER, Amount, Manifest, Shard, read_manifest
from lt_data.store.megatron import decode_index
from lt_data.store.shards import ShardWriter

_CHUNK_TOKENS = 1 << 22

_CHECKED = "checked_bytes"

_SAME = ("bos", "eos", "dtype", "specials", "selection", "shard_tokens")
"""What the parts of one job have in common, beside the tokenizer and the listing of the sources."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    path: Path
    manifest: Manifest


def merge(
    out: str | Path,
    *,
    overwrite: bool = False,
    fresh: bool = False,
    progress: Progress = silent,
    notice: Notice = unheard,
) -> Manifest:
    """Join the parts that `prepare(..., rank=i, world=n)` made beside `out` into the store `out`.

    The parts stay. Run again after it was cut off, it goes on after the last finished shard.

    Args:
        out: the store that the parts were made for; they stand in `part_folder(out, rank, world)`.
        overwrite: replace `out` if it is a token store.
        fresh: throw away what an earlier run left that was cut off.
        progress: told of the bytes read.
        notice: told what is worth knowing, in words.

    Returns:
        The manifest of the new store.

    Raises:
        DataError: a part is missing, damaged or of another job, there is no document, or `out` is in use or unwritable.
    """
    out = Path(out)
    parts = _find_parts(out)
    first = parts[0].manifest
    if not any(part.manifest.documents for part in parts):
        raise DataError(f"no text in any of the {len(parts)} parts beside {out}: check the sources and the suffixes")
    if not out.with_name(out.name + SUFFIX).exists():
        check_out(out, overwrite=overwrite)
    assert first.shard_tokens is not None
    job = {f"part {number}": part.manifest.fingerprint for number, part in enumerate(parts)}
    with building(out, job=job, resumable=True, fresh=fresh) as at_work:
        if at_work.published:
            notice(f"{out} had been finished already")
            return read_manifest(out)
        replace = check_out(out, overwrite=overwrite)
        folder = at_work.content / SHARD_FOLDER
        with os_errors("write", folder):
            make_folder(folder)
        finished = [Shard(**record["shard"]) for record in at_work.records]
        clear(at_work.content, [folder], finished, first.dtype)
        if finished:
            notice(f"goes on after {len(finished)} finished shards in {at_work.path}")

        def closed(shard: Shard, _: int) -> None:
            at_work.add({"shard": asdict(shard)}, [folder])

        counts = Counts()
        seen = SeenHashes()
        skip = sum(shard.documents for shard in finished)
        total = sum(part.manifest.tokens for part in parts) * np.dtype(first.dtype).itemsize
        done = 0
        with ShardWriter(folder, first.shard_tokens, first.dtype, closed=closed, finished=finished) as writer:
            for part in parts:
                wanted = _count(part, seen, counts)
                for tokens, lengths in _documents(part, wanted):
                    drop = min(skip, lengths.size)
                    skip -= drop
                    writer.append(tokens[int(lengths[:drop].sum()) :], lengths[drop:])
                    done += tokens.nbytes
                    progress(done, total, "bytes")
            shards = writer.finish()
        assert skip == 0
        listed = [file for part in parts for file in read_sources(part.path / PART_FOLDER / SOURCES)]
        manifest = Manifest(
            tokenizer=first.tokenizer,
            bos=first.bos,
            eos=first.eos,
            dtype=first.dtype,
            shards=shards,
            text_bytes=counts.text_bytes,
            read=counts.read,
            left_out=dict(sorted(counts.left_out.items())),
            skipped=dict(sorted(counts.skipped.items())),
            special_strings=dict(sorted(counts.special.items())),
            specials=first.specials,
            selection=first.selection,
            engine=_engine(parts),
            shard_tokens=first.shard_tokens,
            sources=sources_of(listed, skipped_links=first.sources.skipped_links),
            merged_from=len(parts),
        )
        publish(at_work, _tokenizer_files(parts[0]), manifest, replace=replace)
    return manifest


def _find_parts(out: Path) -> list[_Part]:
    """All parts in the order of their ranks, which fit together."""
    pattern = re.compile(re.escape(out.name) + r"\.part-(\d{5})-of-(\d{5})")
    with os_errors("read", out.parent):
        names = sorted(path.name for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    found = [match for name in names if (match := pattern.fullmatch(name))]
    worlds = sorted({int(match[2]) for match in found})
    if not worlds:
        raise DataError(f"no part of {out} is there (such as {part_folder(out, 0, 2)}): prepare them with --rank")
    if len(worlds) > 1:
        raise DataError(
            f"parts of {out} from jobs of {' and '.join(map(str, worlds))} parts: move those away that are old"
        )
    world = worlds[0]
    there = {int(match[1]) for match in found}
    if missing := [rank for rank in range(world) if rank not in there]:
        unfinished = [rank for rank in missing if Path(f"{part_folder(out, rank, world)}{SUFFIX}").exists()]
        said = f" ({', '.join(map(str, unfinished))} begun and not finished)" if unfinished else ""
        raise DataError(
            f"{len(missing)} of {world} parts of {out} are missing: {', '.join(map(str, missing[:20]))}{said}; "
            "prepare them with --rank, or bring them here"
        )
    parts = [
        _Part(path=path, manifest=read_manifest(path)) for path in (part_folder(out, r, world) for r in range(world))
    ]
    for rank, part in enumerate(parts):
        _check_part(part, parts[0], rank, world)
    return parts


def _check_part(part: _Part, first: _Part, rank: int, world: int) -> None:
    here = part.manifest.part
    if here is None or first.manifest.part is None or (here.rank, here.world) != (rank, world):
        raise DataError(f"{part.path}: not part {rank} of {world} by its manifest: give it back its name")
    pairs = [
        ("tokenizer", first.manifest.tokenizer.sha256, part.manifest.tokenizer.sha256),
        ("listing of the sources", first.manifest.part.listing, here.listing),
        *((name, getattr(first.manifest, name), getattr(part.manifest, name)) for name in _SAME),
    ]
    if other := [f"{name} ({one} and {two})" for name, one, two in pairs if one != two]:
        raise DataError(f"{part.path} is of another job than {first.path}: {'; '.join(other)}. Prepare it again")
    for name, sha256 in here.files.items():
        path = part.path / PART_FOLDER / name
        with os_errors("read", path), path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            raise DataError(f"{path}: its SHA-256 is not the one in the manifest: copy the part again")


def _count(part: _Part, seen: SeenHashes, counts: Counts) -> np.ndarray | None:
    """Add the counts of a part; tells which of its documents are new (bool [documents]), or None: all of them."""
    manifest = part.manifest
    assert manifest.read is not None
    counts.read += manifest.read
    counts.text_bytes += manifest.text_bytes
    counts.skipped.update(manifest.skipped)
    counts.special.update(manifest.special_strings)
    for reason, amount in manifest.left_out.items():
        counts.left_out[reason] = counts.left_out.get(reason, Amount()) + amount
    if not manifest.selection.drop_duplicates:
        return None
    path = part.path / PART_FOLDER / DOCUMENTS
    with os_errors("read", path):
        entries = np.fromfile(path, ENTRY)
    new = seen.add(entries["hash"])
    tokens = entries["tokens"].astype(np.int64)
    text_bytes = entries["text_bytes"].astype(np.int64)
    stored = np.ones(entries.size, bool)
    for reason, among in reason_by_tokens(tokens, manifest.selection):
        stored &= ~among
        _take_back(counts, reason, among & ~new, text_bytes, tokens)
    if int(stored.sum()) != manifest.documents or int(tokens[stored].sum()) != manifest.tokens:
        raise DataError(f"{path}: does not fit the manifest; prepare this part again")
    repeated = stored & ~new
    _take_back(counts, None, repeated, text_bytes, tokens)
    _take_back_special(counts, part.path / PART_FOLDER / SPECIAL, repeated)
    return new[stored]


def _take_back(
    counts: Counts, reason: str | None, which: np.ndarray, text_bytes: np.ndarray, tokens: np.ndarray
) -> None:
    """Make duplicates of documents that were left out for another reason, or (None) that were in the store.

    In one run they would not have been encoded, so their ids are not counted as read any more.
    """
    if not which.any():
        return
    amount = Amount(
        documents=int(which.sum()), text_bytes=int(text_bytes[which].sum()), tokens=int(tokens[which].sum())
    )
    if reason is None:
        counts.text_bytes -= amount.text_bytes
    else:
        left = counts.left_out[reason]
        rest = Amount(
            documents=left.documents - amount.documents,
            text_bytes=left.text_bytes - amount.text_bytes,
            tokens=left.tokens - amount.tokens,
        )
        if rest == Amount():
            del counts.left_out[reason]
        else:
            counts.left_out[reason] = rest
    counts.read += Amount(tokens=-amount.tokens)
    counts.leave_out(DUPLICATE, documents=amount.documents, text_bytes=amount.text_bytes)


def _take_back_special(counts: Counts, path: Path, repeated: np.ndarray) -> None:
    with os_errors("read", path):
        lines = path.read_bytes().splitlines()
    for line in lines:
        values = json.loads(line)
        if repeated[values["document"]]:
            counts.special -= Counter(values["special"])


def _documents(part: _Part, wanted: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The documents of a part that are wanted: ids one after the other, and ids of each (int64), some at a time."""
    dtype = np.dtype(part.manifest.dtype).newbyteorder("<")
    before = 0
    for shard in part.manifest.shards:
        path = part.path / SHARD_FOLDER / f"{shard.name}.bin"
        with os_errors("read", path):
            index = path.with_suffix(".idx").read_bytes()
            ids = np.asarray(np.memmap(path, dtype, mode="r"))
        lengths = decode_index(index, str(path.with_suffix(".idx")))[0].astype(np.int64)
        if ids.size != shard.tokens or lengths.size != shard.documents or int(lengths.sum()) != shard.tokens:
            raise DataError(f"{path}: not of the size in the manifest: copy the part again or prepare it again")
        digest = hashlib.sha256()
        ends = np.cumsum(lengths)
        first, begin = 0, 0
        while first < lengths.size:
            last = max(first + 1, int(np.searchsorted(ends, begin + _CHUNK_TOKENS, side="right")))
            end = int(ends[last - 1])
            chunk, sizes = ids[begin:end], lengths[first:last]
            digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
            if wanted is not None:
                keep = wanted[before + first : before + last]
                if not keep.all():
                    chunk, sizes = chunk[np.repeat(keep, sizes)], sizes[keep]
            yield chunk, sizes
            first, begin = last, end
        if digest.hexdigest() != shard.sha256 or hashlib.sha256(index).hexdigest() != shard.idx_sha256:
            raise DataError(
                f"{path}: its SHA-256 is not the one in the manifest: copy the part again or prepare it again"
            )
        before += shard.documents


def _tokenizer_files(part: _Part) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, sha256 in part.manifest.tokenizer.files.items():
        path = part.path / TOKENIZER_FOLDER / name
        with os_errors("read", path):
            files[name] = path.read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != sha256:
            raise DataError(f"{path}: its SHA-256 is not the one in the manifest: copy the part again")
    return files


def _engine(parts: Sequence[_Part]) -> dict[str, Any]:
    """What encoded: the parts' own words where they agree, with the text of all their checks; else what each says."""
    engines = [dict(part.manifest.engine) for part in parts if part.manifest.engine]
    checked = sum(engine.get(_CHECKED, 0) for engine in engines)
    distinct: list[dict[str, Any]] = []
    for engine in engines:
        if all(engine | {_CHECKED: 0} != other | {_CHECKED: 0} for other in distinct):
            distinct.append(engine)
    return distinct[0] | {_CHECKED: checked} if len(distinct) == 1 else {"parts": distinct}
