"""Datasets of the Hugging Face hub, `hf://org/name`; the only module that imports `datasets`.

The revision is resolved to a commit first, so that the recorded source is reproducible. Without streaming, the dataset
is downloaded to the cache of `datasets` when it is listed, and its rows are read in ranges of 65536, so that the parts
of a job can share them. With streaming, it is read file by file; a slice is one range, read by one part. The hash is
over the content of the rows: for each the number of its bytes (8 bytes, little-endian), then the bytes (UTF-8, or ids
as little-endian int64).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlsplit

from lt_data.errors import DataError
from lt_data.sources.columns import BATCH_ROWS, iter_records, select_columns
from lt_data.sources.hashing_reader import HashingCounter
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, SourceRecord
from lt_data.sources.transfer_errors import library_errors, translate_answer_errors

HUB_SCHEME = "hf://"
ROWS_PER_RUN = 1 << 16
_SETTINGS = ("config", "split", "revision", "streaming")
_SLICE_PATTERN = re.compile(r"(?P<name>[\w.-]+)\[(?P<first>[^:\]]*):(?P<last>[^:\]]*)\]")


@dataclass(frozen=True, kw_only=True)
class HubRows:
    """Range of rows of one split.

    Attributes:
        name: repository, commit, configuration, split and rows.
        size: approximate bytes of the column; None if unknown before reading.
        first: index of the first row in the split (streaming: in the part).
        tables: function that returns an iterator over the rows, as small pyarrow tables.
    """

    name: str
    size: int | None
    first: int
    tables: Callable[[], Iterator[Any]]

    @property
    def manifest_name(self) -> str:
        """Name in the manifest."""
        return self.name

    def records(self, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
        """Yield the rows from index `start` of the range on; all of them are hashed."""
        row = self.first
        counter.unchecked = "hub"
        with _translate_errors(self.name):
            for table in self.tables():
                for record in iter_records(table, options, row):
                    _hash_record(record, counter)
                    if record.next_index - self.first > start:
                        yield SourceRecord(
                            record.next_index - self.first,
                            record.number,
                            record.value,
                            record.n_masked,
                            record.fields,
                        )
                row += table.num_rows


def list_hub_dataset(url: str, options: SourceOptions) -> list[HubRows]:
    """List the row ranges of a hub dataset, in order.

    Args:
        url: `hf://org/name`, with `@revision` and settings such as `?config=en&split=train[:10%]&streaming=true`,
            which override those of `options`.
        options: configuration, split, revision, field.

    Raises:
        DataError: no such dataset, configuration, split or column; no network; a package is missing.
    """
    try:
        import datasets
    except ImportError as exc:
        raise DataError(f'{url}: hub datasets need the datasets package: pip install "lt-data[datasets]"') from exc
    repo, options = _parse_url(url, options)
    with _translate_errors(url), translate_answer_errors(url):
        commit = _resolve_commit(repo, options.revision)
        split = options.split or _only_split(datasets, url, repo, options.config, commit)
        name = f"{HUB_SCHEME}{repo}{f'@{commit}' if commit else ''}/{options.config or 'default'}/{split}"
        if options.streaming:
            return _list_streaming(datasets, name, repo, commit, split, options)
        dataset = datasets.load_dataset(repo, options.config, split=split, revision=commit, token=_choose_token())
        columns = _select_columns(name, dataset.column_names, options)
        rows = dataset.select_columns(columns).with_format("arrow")
        total = len(rows)
        row_bytes = rows.data.nbytes / max(1, total)

    def run(first: int, last: int) -> HubRows:
        def tables() -> Iterator[Any]:
            for begin in range(first, last, BATCH_ROWS):
                yield rows[begin : min(last, begin + BATCH_ROWS)]

        size = round(row_bytes * (last - first))
        return HubRows(name=f"{name}/{first}-{last}", size=size, first=first, tables=tables)

    return [run(first, min(total, first + ROWS_PER_RUN)) for first in range(0, total, ROWS_PER_RUN)]


def _list_streaming(
    datasets: Any, name: str, repo: str, commit: str | None, split: str, options: SourceOptions
) -> list[HubRows]:
    plain, bounds = _parse_slice(datasets, name, repo, options.config, commit, split)
    stream = datasets.load_dataset(
        repo, options.config, split=plain, revision=commit, streaming=True, token=_choose_token()
    )
    names = stream.column_names or list(next(iter(stream.take(1)), {}))
    stream = stream.select_columns(_select_columns(name, names, options)).with_format("arrow")
    if bounds is None:
        parts = [stream.shard(num_shards=stream.num_shards, index=i) for i in range(stream.num_shards)]
        shown = [f"{name}/part-{i}-of-{len(parts)}" for i in range(len(parts))]
        first = 0
    else:
        first, last = bounds
        part = stream.skip(first) if first else stream
        parts, shown = [part if last is None else part.take(last - first)], [name]
    return [
        HubRows(name=label, size=None, first=first, tables=lambda part=part: part.iter(batch_size=BATCH_ROWS))
        for label, part in zip(shown, parts, strict=True)
    ]


def _parse_url(url: str, options: SourceOptions) -> tuple[str, SourceOptions]:
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    repo, _, revision = (parts.netloc + parts.path).strip("/").partition("@")
    if revision:
        given["revision"] = revision
    if unknown := [key for key in given if key not in _SETTINGS]:
        raise DataError(f"{url}: unknown setting {unknown[0]!r}; there are {', '.join(_SETTINGS)}")
    changes: dict[str, Any] = {**given}
    if "streaming" in given:
        if given["streaming"] not in ("true", "false"):
            raise DataError(f"{url}: streaming = {given['streaming']!r}: give true or false")
        changes["streaming"] = given["streaming"] == "true"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise DataError(f"{url}: a dataset is named hf://org/name; single files are named hf://datasets/org/name/file")
    return repo, replace(options, **changes)


def _resolve_commit(repo: str, revision: str | None) -> str | None:
    from lt_data.hub_client import HubClient, is_offline  # imported here: slow

    if is_offline():  # then `datasets` reads its cache
        return revision
    hub = HubClient.from_environment()
    path = f"/api/datasets/{repo}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
    return hub.read_info(path, f"{HUB_SCHEME}{repo}{f'@{revision}' if revision else ''}")["sha"]


def _choose_token() -> Literal[False] | None:
    from lt_data.hub_client import choose_library_token

    return choose_library_token()


def _only_split(datasets: Any, url: str, repo: str, config: str | None, commit: str | None) -> str:
    names = datasets.get_dataset_split_names(repo, config, revision=commit, token=_choose_token())
    if len(names) != 1:
        raise DataError(f"{url}: the splits are {', '.join(names)}; choose with split (--split), such as {names[0]}")
    return names[0]


def _parse_slice(
    datasets: Any, name: str, repo: str, config: str | None, commit: str | None, split: str
) -> tuple[str, tuple[int, int | None] | None]:
    """Split off the slice and return its rows: `datasets` streams only whole splits."""
    sliced = _SLICE_PATTERN.fullmatch(split)
    if sliced is None:
        return split, None
    plain, first, last = sliced["name"], sliced["first"], sliced["last"]
    if all(bound == "" or bound.isdecimal() for bound in (first, last)):
        begin = int(first or 0)
        return plain, (begin, max(begin, int(last)) if last else None)
    known = datasets.load_dataset_builder(repo, config, revision=commit, token=_choose_token()).info.splits or {}
    rows = getattr(known.get(plain), "num_examples", 0)
    if not rows:
        raise DataError(
            f"{name}: the hub does not report the number of rows of {plain}, so {split} cannot be streamed; give row "
            "numbers such as train[:1000], or do not stream"
        )
    (absolute,) = datasets.ReadInstruction.from_spec(split).to_absolute({plain: rows})
    return plain, (absolute.from_, absolute.to)


def _select_columns(name: str, available: list[str], options: SourceOptions) -> list[str]:
    columns = select_columns(available, options)
    if isinstance(columns, BadRecord):
        raise DataError(f"{name}: {columns.message}")
    return columns


def _hash_record(record: SourceRecord, counter: HashingCounter) -> None:
    value = record.value
    if isinstance(value, BadRecord):
        content = value.message.encode("utf-8", "surrogatepass")
    elif isinstance(value, str):
        content = value.encode()
    else:
        content = value.astype("<i8").tobytes()
    counter.update(len(content).to_bytes(8, "little"))
    counter.update(content)


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert errors of `datasets` about a name, the network or the data to `DataError`."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except DataError:
        raise
    except (DatasetsError, OSError, ValueError, RuntimeError, *library_errors()) as exc:
        reasons = [" ".join(str(each).split()) for each in (exc, exc.__cause__) if each is not None]
        reason = reasons[0] if reasons[-1] in reasons[0] else ": ".join(reasons)
        raise DataError(f"cannot read {name}: {reason}; check its name, its settings and the network") from exc
