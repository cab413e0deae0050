"""Encoded batches to the folder of a store, with a record in the journal after each shard from which to go on.

A record tells where the first batch begins that is not wholly in finished shards (`point`), how many documents after
that place are in them already (`skip`), and all that was counted up to that place. Going on means to read from the
point, to count everything again from there, and to write all documents but the first `skip`. So neither the size of a
batch nor that of the next run's batches plays a part.

Side files: `sources`, one line per file that was read to its end, and with duplicates dropped `documents`, one record
per document that was encoded, and `special`, the special strings in each of those that have any. A part of a job keeps
them for `merge`; a whole store does not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.preparing.building import Building
from lt_data.preparing.counts import Counts
from lt_data.preparing.duplicates import HASH
from lt_data.preparing.intake import Intake
from lt_data.storage import make_folder, os_errors, remove_tree, write
from lt_data.store.manifest import EMPTY, SHARD_FOLDER, Amount, Selection, Shard, SourceFile
from lt_data.store.megatron import index_size
from lt_data.store.shards import ShardWriter

PART_FOLDER = "part"  # of the store that a part of a job is: what merging needs
TOO_FEW_TOKENS = "too few tokens"
TOO_MANY_TOKENS = "too many tokens"
SOURCES, DOCUMENTS, SPECIAL = "sources", "documents", "special"
ENTRY = np.dtype([("hash", HASH), ("text_bytes", "<u8"), ("tokens", "<u4")])
"""What `documents` holds per document: its hash, UTF-8 bytes, and ids with BOS and EOS (0: none)."""


def reason_by_tokens(tokens: np.ndarray, selection: Selection) -> list[tuple[str, np.ndarray]]:
    """Which documents are left out for their ids: (reason, bool [n]) each, no document in two, from ids [n]."""
    empty = tokens == 0
    few = ~empty & (tokens < (selection.min_tokens or 0))
    many = tokens > selection.max_tokens if selection.max_tokens is not None else np.zeros(tokens.size, bool)
    return [(EMPTY, empty), (TOO_FEW_TOKENS, few), (TOO_MANY_TOKENS, many)]


def read_sources(path: Path) -> list[SourceFile]:
    """The files named in a `sources` file."""
    with os_errors("read", path):
        lines = path.read_bytes().splitlines()
    return [SourceFile(**json.loads(line)) for line in lines]


def clear(content: Path, folders: Sequence[Path], finished: Sequence[Shard], dtype: str) -> None:
    """Take away what no record knows, and make sure that all shards are there that the records know.

    Args:
        content: the folder that becomes the store.
        folders: folders in it that are kept, that of the shards first.
        finished: the shards that have a record.
        dtype: of the ids.
    """
    known = {f"{shard.name}.{kind}" for shard in finished for kind in ("bin", "idx")}
    with os_errors("clear", content):
        for path in content.iterdir():
            if path not in folders:
                remove_tree(path) if path.is_dir() else path.unlink()
        for path in folders[0].iterdir():
            if path.name not in known:
                path.unlink()
    for shard in finished:
        path = folders[0] / f"{shard.name}.bin"
        with os_errors("go on after the shard", path):
            sizes = (path.stat().st_size, path.with_suffix(".idx").stat().st_size)
        if sizes != (shard.tokens * np.dtype(dtype).itemsize, index_size(shard.documents)):
            raise DataError(f"{path}: not as the journal says; start afresh (--fresh)")


class StoreWriter:
    """Writes the shards of a store that is being built, and keeps count.

    Attributes:
        counts: of everything up to the end of the last batch that was written.
        point: place in the sources (file, record) after that batch.
    """

    def __init__(
        self,
        job: Building,
        *,
        shard_tokens: int,
        dtype: Literal["uint16", "uint32"],
        selection: Selection,
        special_strings: Sequence[str],
        keep_sides: bool,
    ) -> None:
        """Begin after the last record of the job.

        Args:
            job: the folder.
            shard_tokens: about how many ids go into one shard.
            dtype: of the ids.
            selection: which documents are wanted.
            special_strings: what is counted in the texts.
            keep_sides: whether the side files belong to the result.
        """
        self._job = job
        self._selection = selection
        self._special_strings = special_strings
        last = job.records[-1] if job.records else {"point": (0, 0), "skip": 0, "counts": Counts().to_json()}
        finished = [Shard(**record["shard"]) for record in job.records]
        self.counts = Counts.from_json(last["counts"])
        self.point: tuple[int, int] = tuple(last["point"])
        self.note: Mapping[str, Any] = last.get("note", {})
        self._skip: int = last["skip"]
        self._skipped_here = 0
        self._shard_folder = job.content / SHARD_FOLDER
        side_folder = job.content / PART_FOLDER if keep_sides else None
        self._folders = [self._shard_folder, *([side_folder] if side_folder else [])]
        with os_errors("write", job.content):
            for folder in self._folders:
                make_folder(folder)
        clear(job.content, self._folders, finished, dtype)
        self._sources = job.side(SOURCES, side_folder)
        self._begun_at = self._n_listed = self.point[0]
        self._entries: BinaryIO | None = None
        self._specials: BinaryIO | None = None
        if selection.drop_duplicates:
            self._entries = job.side(DOCUMENTS, side_folder)
            if keep_sides:
                self._specials = job.side(SPECIAL, side_folder)
        self._writer = ShardWriter(
            self._shard_folder, shard_tokens, dtype, closed=self._shard_closed, finished=finished
        )

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def seen(self) -> np.ndarray:
        """The hashes of the documents up to the point (S16)."""
        if self._entries is None:
            return np.zeros(0, HASH)
        with os_errors("read", self._entries.name):
            return np.fromfile(self._entries.name, ENTRY)["hash"]

    def write(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        *,
        texts: Sequence[str],
        text_bytes: int,
        special: Mapping[str, int],
        point: tuple[int, int],
        intake: Intake,
        sources: Sequence[SourceFile],
    ) -> None:
        """Write a batch.

        Args:
            tokens: the ids of its documents, one after the other.
            lengths: ids of each (int64).
            texts: the documents; empty where they came as ids.
            text_bytes: of all texts.
            special: special strings in the texts.
            point: place in the sources after the batch.
            intake: where the documents came through.
            sources: the files that were read to their end since the job began or went on, in order.
        """
        out = np.zeros(lengths.size, bool)
        left_out: list[tuple[str, np.ndarray]] = []
        for reason, among in reason_by_tokens(lengths, self._selection):
            if among.any():
                left_out.append((reason, np.flatnonzero(among)))
                out |= among
        if out.any():
            tokens_in = tokens
            tokens = tokens[np.repeat(~out, lengths)]
            assert tokens.size + int(lengths[out].sum()) == tokens_in.size
        self._append(tokens, lengths[~out])
        # From here on the counts are those after the batch. A shard that was closed above has noted those before it.
        self._count(lengths, texts, text_bytes, special, left_out, out, intake)
        self._list_sources(sources, below=point[0])
        self.point = point

    def listed(self) -> list[SourceFile]:
        """The files of the sources that were read to their end."""
        with os_errors("write", self._sources.name):
            self._sources.flush()
        return read_sources(Path(self._sources.name))

    def side_hashes(self) -> dict[str, str]:
        """SHA-256 (hex) of the side files, by name."""
        found: dict[str, str] = {}
        for side in (self._sources, self._entries, self._specials):
            if side is not None:
                with os_errors("read", side.name):
                    side.flush()
                    with open(side.name, "rb") as file:
                        found[Path(side.name).name] = hashlib.file_digest(file, "sha256").hexdigest()
        return found

    def finish(self, intake: Intake, sources: Sequence[SourceFile]) -> tuple[Shard, ...]:
        """Close the last shard and count what stands after the last batch."""
        assert self._skip == 0
        shards = self._writer.finish()
        intake.settle_rest(self.counts)
        self._list_sources(sources, below=None)
        assert sum(shard.documents for shard in shards) + _documents(self.counts) == self.counts.read.documents
        return shards

    def _append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        drop = min(self._skip, lengths.size)
        self._skipped_here = drop
        self._writer.append(tokens[int(lengths[:drop].sum()) :], lengths[drop:])
        self._skip -= drop
        self._skipped_here = 0

    def _shard_closed(self, shard: Shard, appended: int) -> None:
        record = {
            "shard": asdict(shard),
            "point": self.point,
            "skip": self._skipped_here + appended,
            "counts": self.counts.to_json(),
            "note": self.note,
        }
        self._job.add(record, self._folders)

    def _count(
        self,
        lengths: np.ndarray,
        texts: Sequence[str],
        text_bytes: int,
        special: Mapping[str, int],
        left_out: list[tuple[str, np.ndarray]],
        out: np.ndarray,
        intake: Intake,
    ) -> None:
        counts = self.counts
        hashes = intake.settle(lengths.size, counts)
        counts.read += Amount(documents=lengths.size, text_bytes=text_bytes, tokens=int(lengths.sum()))
        counts.text_bytes += text_bytes
        for reason, which in left_out:
            n_bytes = sum(len(texts[int(i)].encode()) for i in which) if texts else 0
            counts.text_bytes -= n_bytes
            counts.leave_out(reason, documents=which.size, text_bytes=n_bytes, tokens=int(lengths[which].sum()))
        if special and (out.any() or self._specials is not None):
            self._count_special_one_by_one(texts, out)
        else:
            counts.special.update(special)
        if self._entries is not None:
            entries = np.zeros(lengths.size, ENTRY)
            entries["hash"] = hashes
            entries["text_bytes"] = [len(text.encode()) for text in texts] if texts else 0
            entries["tokens"] = lengths
            self._write(self._entries, entries.tobytes())

    def _count_special_one_by_one(self, texts: Sequence[str], out: np.ndarray) -> None:
        first = self._entries.tell() // ENTRY.itemsize if self._entries is not None else 0
        for i, text in enumerate(texts):
            found = {string: n for string in self._special_strings if (n := text.count(string))}
            if found and not out[i]:
                self.counts.special.update(found)
                if self._specials is not None:
                    line = json.dumps({"document": first + i, "special": found})
                    self._write(self._specials, f"{line}\n".encode())

    def _list_sources(self, files: Sequence[SourceFile], below: int | None) -> None:
        """Note the files that were read to their end, up to the one in which the next document stands."""
        end = len(files) if below is None else min(len(files), below - self._begun_at)
        for file in files[self._n_listed - self._begun_at : end]:
            self._write(self._sources, f"{json.dumps(asdict(file))}\n".encode())
            self._n_listed += 1

    def _write(self, side: BinaryIO, content: bytes) -> None:
        with os_errors("write", side.name):
            write(side, content)


def _documents(counts: Counts) -> int:
    return sum(amount.documents for amount in counts.left_out.values())
