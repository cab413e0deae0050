"""Datasets of the Hugging Face hub, `hf://org/name`; the only module that imports `datasets`.

The revision is resolved to a commit first, so that the recorded source is reproducible. Without streaming, the dataset
is downloaded to the cache of `datasets` when it is listed, and its rows are read in ranges of 65536. With streaming it
is read file by file; a slice of row numbers is one range. The hash is over the content of the rows: for each the number
of its bytes (8 bytes, little-endian), then the bytes (UTF-8, or ids as little-endian int64).
"""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lt_data.errors import DataError
from lt_data.sources.options import SourceOptions
from lt_data.sources.pieces import Digest
from lt_data.sources.record import BadRecord, DamagedFileError, SourceRecord
from lt_data.sources.tables import iter_rows, select_columns
from lt_data.sources.transfer_errors import decompression_errors, library_errors

HUB_SCHEME = "hf://"
ROWS_PER_PIECE = 1 << 16
_BATCH_ROWS = 256
_BZ2_DAMAGE = "Invalid data stream"  # text of an OSError
_SETTINGS = ("config", "split", "revision", "streaming")
_ROW_SLICE = re.compile(r"(?P<name>[\w.-]+)\[(?P<first>\d*):(?P<last>\d*)\]")


@dataclass(frozen=True, kw_only=True)
class HubPiece:
    """Range of rows of one split, or one of its shards.

    Attributes:
        name: repository, commit, configuration, split and rows.
        size: approximate bytes of the column; None if unknown before reading.
        dataset: arguments of `datasets.load_dataset`.
        first: first row.
        last: row after the last; None at the end.
        shard: shard and number of shards, of a streamed split.
    """

    name: str
    size: int | None
    dataset: dict[str, Any]
    first: int = 0
    last: int | None = None
    shard: tuple[int, int] | None = None

    @property
    def manifest_name(self) -> str:
        """Name in the manifest."""
        return self.name

    @property
    def is_continuation(self) -> bool:
        """False: the damage of one range of rows is known when the dataset is listed."""
        return False

    @property
    def is_checked_at_end(self) -> bool:
        """True if damage may be found after documents that look good."""
        return bool(self.dataset["streaming"])

    def hash(self, digest: Digest) -> None:
        """Do nothing: there are no rows to hash in a damaged shard."""

    def divide(self, max_bytes: int) -> "list[HubPiece]":
        """Return the piece itself: it is small, or cannot be divided."""
        del max_bytes
        return [self]

    def records(self, options: SourceOptions, digest: Digest) -> Generator[SourceRecord]:
        """Yield the rows, numbered in the split (in its shard, if it is streamed by shards)."""
        with _translate_errors(self.name):
            number = self.first
            rows = _load(**self.dataset)
            columns = select_columns(_column_names(rows), options)
            rows = (rows.select_columns(columns) if columns else rows).with_format("arrow")
            if self.shard:
                rows = rows.shard(num_shards=self.shard[1], index=self.shard[0])
            elif not self.dataset["streaming"]:
                rows = rows.select(range(self.first, self.last or len(rows)))
            else:
                rows = rows.skip(self.first) if self.first else rows
                rows = rows if self.last is None else rows.take(self.last - self.first)
            for table in rows.iter(batch_size=_BATCH_ROWS):
                for record in iter_rows(table, options, number):
                    _hash_record(record, digest)
                    yield record
                number += table.num_rows


def list_hub_dataset(url: str, options: SourceOptions) -> list[HubPiece]:
    """List the pieces of a hub dataset, in order.

    Args:
        url: `hf://org/name`, with `@revision` and settings such as `?config=en&split=train[:10%]&streaming=true`,
            which override those of `options`.
        options: configuration, split, revision, field.

    Raises:
        DataError: no such dataset, configuration or split; no network; a package is missing.
    """
    try:
        return _list_pieces(url, options)
    except DamagedFileError as exc:
        raise DataError(f"{url}: {exc}") from exc


def _list_pieces(url: str, options: SourceOptions) -> list[HubPiece]:
    try:
        import datasets
        from huggingface_hub import HfApi, constants
    except ImportError as exc:
        raise DataError(f'{url}: hub datasets need the datasets package: pip install "lt-data[datasets]"') from exc
    repo, options = _parse_url(url, options)
    with _translate_errors(url):
        commit = options.revision
        if not constants.HF_HUB_OFFLINE:  # else `datasets` reads its cache
            commit = HfApi().dataset_info(repo, revision=options.revision).sha
        split = options.split
        if split is None:
            splits = datasets.get_dataset_split_names(repo, options.config, revision=commit)
            if len(splits) != 1:
                names = ", ".join(splits)
                raise DataError(f"{url}: the splits are {names}; choose with split (--split), such as {splits[0]}")
            split = splits[0]
        name = f"{HUB_SCHEME}{repo}{f'@{commit}' if commit else ''}/{options.config or 'default'}/{split}"
        arguments = {"path": repo, "name": options.config, "revision": commit, "streaming": options.streaming}
        if not options.streaming:
            return _list_rows(name, {**arguments, "split": split})
        if not (sliced := _ROW_SLICE.fullmatch(split)):
            arguments["split"] = split
            n = _load(**arguments).num_shards
            shards = [(f"{name}/part-{i}-of-{n}", (i, n)) for i in range(n)]
            return [HubPiece(name=label, size=None, dataset=arguments, shard=shard) for label, shard in shards]
        first, last = int(sliced["first"] or 0), int(sliced["last"]) if sliced["last"] else None
        arguments["split"] = sliced["name"]
        return [HubPiece(name=name, size=None, dataset=arguments, first=first, last=last)]


def _list_rows(name: str, arguments: dict[str, Any]) -> list[HubPiece]:
    rows = _load(**arguments)
    total = len(rows)
    row_bytes = rows.data.nbytes / max(1, total)
    return [
        HubPiece(
            name=f"{name}/{first}-{last}",
            size=round(row_bytes * (last - first)),
            dataset=arguments,
            first=first,
            last=last,
        )
        for first in range(0, total, ROWS_PER_PIECE)
        for last in [min(total, first + ROWS_PER_PIECE)]
    ]


def _load(**arguments: Any) -> Any:
    """Return the dataset; the last one is kept, since its pieces are read one after the other."""
    import datasets

    if _loaded.get("arguments") != arguments:
        _loaded.update(arguments=arguments, dataset=datasets.load_dataset(**arguments))
    return _loaded["dataset"]


_loaded: dict[str, Any] = {}


def _column_names(rows: Any) -> list[str]:
    return rows.column_names or list(next(iter(rows.take(1)), {}))


def _parse_url(url: str, options: SourceOptions) -> tuple[str, SourceOptions]:
    parts = urlsplit(url)
    given: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    repo, _, revision = (parts.netloc + parts.path).strip("/").partition("@")
    if revision:
        given["revision"] = revision
    if unknown := [key for key in given if key not in _SETTINGS]:
        raise DataError(f"{url}: unknown setting {unknown[0]!r}; there are {', '.join(_SETTINGS)}")
    if "streaming" in given:
        if given["streaming"] not in ("true", "false"):
            raise DataError(f"{url}: streaming = {given['streaming']!r}: give true or false")
        given["streaming"] = given["streaming"] == "true"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise DataError(f"{url}: a dataset is named hf://org/name; single files are named hf://datasets/org/name/file")
    return repo, replace(options, **given)


def _hash_record(record: SourceRecord, digest: Digest) -> None:
    value = record.value
    if isinstance(value, BadRecord):
        content = value.message.encode("utf-8", "surrogatepass")
    else:
        content = value.encode() if isinstance(value, str) else value.astype("<i8").tobytes()
    digest.update(len(content).to_bytes(8, "little") + content)


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert errors of `datasets` about a name, the network or the data to `DataError` or `DamagedFileError`."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except DataError:
        raise
    except (DatasetsError, OSError, ValueError, RuntimeError, *library_errors(), *decompression_errors()) as exc:
        root: BaseException = exc
        while root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, decompression_errors()) or str(root) == _BZ2_DAMAGE:
            raise DamagedFileError(f"damaged file: {root}; download it again, or tell its owner") from exc
        reason = " ".join(str(exc.__cause__ or exc).split())
        raise DataError(f"cannot read {name}: {reason}; check its name, its settings and the network") from exc
