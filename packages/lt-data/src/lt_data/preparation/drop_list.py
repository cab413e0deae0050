"""Drop list of a joined store: its parts without the documents that an earlier part has too.

The extents that are left (lt_data.store.extents) are written part by part, each column to a file of its own, which are
then joined: memory for the documents of one part.

Cost: one read of each part's list of documents, and of the indexes of the shards that lose documents.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.duplicates import read_duplicates, read_entries
from lt_data.storage import create_file, fsync, read_file, translate_os_errors, write
from lt_data.store.combined_manifest import LoadedPart, combine_manifests
from lt_data.store.extents import COLUMNS, ShardExtents, extents_of_mask
from lt_data.store.manifest import DUPLICATE, SHARD_FOLDER, DocumentTotals, DropList, ShardFile
from lt_data.store.megatron import decode_index, index_size

_COPIED_BYTES = 2**24


class _ExtentsWriter:
    """Writer of extents in order.

    Attributes:
        n: extents so far.
        documents: their documents.
        tokens: their tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.n = self.documents = self.tokens = 0
        self._paths = {name: folder / f"extents.{name}" for name in COLUMNS}
        self._open = ExitStack()
        with translate_os_errors("write", folder):
            self._files = {name: self._open.enter_context(create_file(path)) for name, path in self._paths.items()}

    def add(self, shard: int, extents: ShardExtents) -> None:
        """Add the extents of the next shard."""
        n = extents.document.size
        self._write(
            first_token=self.tokens + np.cumsum(extents.tokens) - extents.tokens,
            first_document=self.documents + np.cumsum(extents.documents) - extents.documents,
            shard_token=extents.token,
            shard_document=extents.document,
            shard=np.full(n, shard),
        )
        self.n += n
        self.documents += int(extents.documents.sum())
        self.tokens += int(extents.tokens.sum())

    def finish(self, n_shards: int, target: Path) -> str:
        """Add the totals, and join the columns to one file; return its SHA-256 (hex)."""
        totals = {"first_token": self.tokens, "first_document": self.documents, "shard": n_shards}
        self._write(**totals, shard_token=0, shard_document=0)
        self._open.close()
        digest = hashlib.sha256()
        with translate_os_errors("write", target), create_file(target) as file:
            for path in self._paths.values():
                with path.open("rb") as column:
                    while content := column.read(_COPIED_BYTES):
                        digest.update(content)
                        write(file, content)
            file.flush()
            fsync(file.fileno())
        return digest.hexdigest()

    def _write(self, **columns: np.ndarray | int) -> None:
        for name, values in columns.items():
            with translate_os_errors("write", self._paths[name]):
                write(self._files[name], np.asarray(values, COLUMNS[name]).tobytes())

    def __enter__(self) -> "_ExtentsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()


def write_drop_list(parts: Sequence[LoadedPart], duplicates: Sequence[Path], work: Path) -> tuple[DropList, Path]:
    """Write the extents of parts without their duplicates.

    Args:
        parts: the parts, in order.
        duplicates: files of the duplicates of all ranges.
        work: an empty folder to work in.

    Returns:
        The drop list, and the path of the file of the extents in `work`.

    Raises:
        DataError: a list or an index of a part differs from its manifest.
    """
    flat = combine_manifests(parts)
    lost = DocumentTotals()
    first_shard = 0
    target = work / "extents"
    with _ExtentsWriter(work) as writer:
        for number, part in enumerate(parts):
            entries = read_entries(part.folder)
            kept = np.ones(entries.size, bool)
            kept[read_duplicates(duplicates, number)] = False
            sizes = entries["text_bytes"][~kept] if flat.text_bytes else np.zeros(0, np.uint64)
            lost += DocumentTotals(
                documents=int((~kept).sum()),
                text_bytes=int(sizes.sum()),
                tokens=int(entries["tokens"][~kept].sum(dtype=np.int64)),
            )
            first = 0
            for place, shard in enumerate(part.manifest.shards):
                of_shard = kept[first : first + shard.documents]
                if of_shard.all():  # no need of its lengths
                    whole = (0, 0, shard.documents, shard.tokens)
                    extents = ShardExtents(*(np.array([value], np.int64) for value in whole))
                else:
                    extents = extents_of_mask(of_shard, _read_lengths(part.folder, shard))
                writer.add(first_shard + place, extents)
                first += shard.documents
            first_shard += len(part.manifest.shards)
        sha256 = writer.finish(first_shard, target)
    left_out = dict(flat.left_out)
    if lost.documents:
        left_out[DUPLICATE] = left_out.get(DUPLICATE, DocumentTotals()) + lost
    return (
        DropList(
            sha256=sha256,
            extents=writer.n,
            documents=flat.documents - writer.documents,
            tokens=flat.tokens - writer.tokens,
            text_bytes=flat.text_bytes - lost.text_bytes,
            read=flat.read,
            left_out=left_out,
            special_strings=flat.special_strings,
        ),
        target,
    )


def _read_lengths(folder: Path, shard: ShardFile) -> np.ndarray:
    """Return the tokens of each document of a shard, compared with its hash."""
    path = folder / SHARD_FOLDER / f"{shard.name}.idx"
    with translate_os_errors("read", path):
        content = read_file(path, max_bytes=index_size(shard.documents), inside=folder)
    if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
        raise DataError(f"{path}: SHA-256 differs from the manifest: copy the part again or prepare it again")
    return decode_index(content, str(path))[0].astype(np.int64)
