r"""Folders of Hugging Face `datasets`, as `save_to_disk` writes them: written and read with pyarrow alone.

    data-00000-of-00002.arrow ...   the Arrow stream format
    dataset_info.json               the columns
    state.json                      the files, in order

Rows (with `seq_len`) have the columns of the trainers of AWS Neuron and of `transformers`: input_ids (int32),
attention_mask (int8, 0 in padding) and labels (int32). Those trainers shift inside the row: they compare what
position t predicts with labels[t + 1]. So labels[t + 1] here is what lt_data.streaming.rows would predict at t, or
-100, and labels[0] is never used. Without padding and `bfd`, that makes labels equal to input_ids.

Documents (without) have the column input_ids. The features are written as "Sequence", which old and new versions of
`datasets` read. Memory: one batch of about a million tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from os import SEEK_END
from pathlib import Path
from typing import Any, cast

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.files import Files
from lt_data.exports.job import Job, Written
from lt_data.exports.samples import document_batches, row_batches, runs
from lt_data.storage import os_errors
from lt_data.streaming.rows import IGNORE

FILE_BYTES = 500_000_000  # the custom of `datasets`
INFO_FILE = "dataset_info.json"
STATE_FILE = "state.json"
DICT_FILE = "dataset_dict.json"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
_ROW_COLUMNS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
_DOCUMENT_COLUMNS = {"input_ids": "int32"}


def at_least(job: Job) -> int:
    """Bytes that the export needs."""
    if job.options.seq_len is None:
        return 4 * job.store.n_tokens
    return sum(np.dtype(dtype).itemsize for dtype in _ROW_COLUMNS.values()) * job.n_rows * job.options.seq_len


def write(job: Job, files: Files) -> Written:
    """Write the folder."""
    pyarrow = _pyarrow()
    file_bytes = job.options.file_bytes or FILE_BYTES
    seq_len = job.options.seq_len
    columns = _DOCUMENT_COLUMNS if seq_len is None else _ROW_COLUMNS
    if seq_len is None:
        borders = runs(4 * job.store.lengths.astype(np.int64), file_bytes)
    else:
        borders = runs(np.full(job.n_rows, at_least(job) // job.n_rows), file_bytes)
    fields = [(name, pyarrow.list_(getattr(pyarrow, dtype)())) for name, dtype in columns.items()]
    features = {name: _feature(dtype) for name, dtype in columns.items()}
    schema = pyarrow.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    names = [f"data-{i:05d}-of-{borders.size - 1:05d}.arrow" for i in range(borders.size - 1)]
    padding = lost = done = 0
    total = job.store.n_tokens
    for name, first, last in zip(names, borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        with files.new(name) as file, pyarrow.ipc.new_stream(file, schema) as stream:
            if seq_len is None:
                for batch in document_batches(job.store, first, last):
                    stream.write_batch(_record(pyarrow, schema, batch.lengths, [batch.tokens]))
                    job.progress(done := done + batch.tokens.size, total, "tokens")
                continue
            for rows in row_batches(job.rows, first, last):
                mask = (rows.doc_ids >= 0).astype(np.int8)
                labels = _labels(rows.input_ids, rows.labels, copied=job.options.labels == "copy")
                lengths = np.full(len(mask), seq_len)
                input_ids = np.where(mask, rows.input_ids, np.int32(job.pad_id))
                stream.write_batch(_record(pyarrow, schema, lengths, [input_ids, mask, labels]))
                padding += mask.size - int(mask.sum())
                lost += int((rows.labels[:, -1] != IGNORE).sum())
                job.progress(done := done + int(mask.sum()), total, "tokens")
    _write_descriptions(job, files, names, features)
    samples = int(borders[-1])
    tokens = total if seq_len is None else samples * seq_len - padding
    return Written(samples=samples, tokens=tokens, padding=padding, lost_labels=lost)


def _labels(input_ids: np.ndarray, labels: np.ndarray, *, copied: bool) -> np.ndarray:
    """What a reader that shifts needs: the label of position t at t + 1, and the first id, which it never uses."""
    return input_ids if copied else np.concatenate([input_ids[:, :1], labels[:, :-1]], axis=1)


def _record(pyarrow: Any, schema: Any, lengths: np.ndarray, columns: list[np.ndarray]) -> Any:
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    arrays = [
        pyarrow.ListArray.from_arrays(
            pyarrow.array(offsets),
            pyarrow.array(values.reshape(-1).astype(field.type.value_type.to_pandas_dtype(), copy=False)),
        )
        for field, values in zip(schema, columns, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _feature(dtype: str) -> dict[str, Any]:
    return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"}


def _write_descriptions(job: Job, files: Files, names: list[str], features: dict[str, Any]) -> None:
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    # The names of the caches that `datasets` makes hang on the fingerprint: other bytes, another one.
    digest = hashlib.sha256("".join(file.sha256 for file in files.listed).encode())
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": job.options.split,
    }
    files.add(INFO_FILE, (json.dumps(info, indent=2) + "\n").encode())
    files.add(STATE_FILE, (json.dumps(state, indent=2, sort_keys=True) + "\n").encode())


def read(path: Path, field: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """The samples of a folder that `save_to_disk` (or `write`) wrote.

    Args:
        path: the folder.
        field: the column of the ids. Where there is an attention_mask, what it masks is left out.

    Yields:
        The ids of a sample (integers), how many were masked, and where it stands.

    Raises:
        DataError: not such a folder, or the column is missing or holds something else.
    """
    pyarrow = _pyarrow()
    for name in _data_files(path):
        file = path / name
        _check_end(file)
        try:
            with os_errors("read", file), pyarrow.memory_map(str(file)) as mapped:
                for first, batch in _batches(pyarrow, mapped):
                    names = batch.schema.names
                    columns = {name: batch.column(name) for name in (field, "attention_mask") if name in names}
                    if field not in columns:
                        raise DataError(f"{file}: no column {field!r} (found {', '.join(names)}); name it")
                    for i in range(batch.num_rows):
                        where = f"{file}:{first + i + 1}"
                        ids = _row(columns[field], i, where, field)
                        if "attention_mask" in columns:
                            mask = _row(columns["attention_mask"], i, where, "attention_mask")
                            if mask.size != ids.size:
                                raise DataError(f"{where}: {ids.size} ids and {mask.size} mask values; correct the row")
                            kept = ids[mask != 0]
                            yield kept, ids.size - kept.size, where
                        else:
                            yield ids, 0, where
        except pyarrow.ArrowInvalid as exc:
            raise DataError(f"{file}: not a whole Arrow stream ({exc}); copy it again") from exc


def _check_end(file: Path) -> None:
    """Arrow's reader takes a file that was cut between two batches for a whole one."""
    with os_errors("read", file), file.open("rb") as opened:
        size = opened.seek(0, SEEK_END)
        opened.seek(max(0, size - len(_END)))
        end = opened.read()
    if end != _END:
        raise DataError(f"{file}: not a whole Arrow stream (its end is missing); copy it again")


def _batches(pyarrow: Any, mapped: Any) -> Iterator[tuple[int, Any]]:
    first = 0
    for batch in pyarrow.ipc.open_stream(mapped):
        yield first, batch
        first += batch.num_rows


def _row(column: Any, index: int, where: str, name: str) -> np.ndarray:
    values = getattr(column[index], "values", None)
    if values is None or values.null_count:
        raise DataError(f"{where}: column {name!r} holds no list of numbers there; correct or remove the row")
    found = values.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "iub":
        raise DataError(f"{where}: column {name!r} holds {values.type}, not integers; name another column")
    return found


def _data_files(path: Path) -> list[str]:
    if (path / DICT_FILE).is_file():
        found = sorted(entry.parent.name for entry in path.glob(f"*/{STATE_FILE}"))
        raise DataError(f"{path} holds the splits {', '.join(found)}: name one of these folders")
    with os_errors("read the dataset's", path / STATE_FILE):
        content = (path / STATE_FILE).read_bytes()
    try:
        names = [file["filename"] for file in cast(Any, json.loads(content))["_data_files"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{path / STATE_FILE}: not the state of a saved dataset ({exc!r}); save it again") from exc
    if foreign := [name for name in names if Path(name).name != name]:
        raise DataError(f"{path / STATE_FILE}: {foreign[0]!r} is not a file of this folder; save the dataset again")
    return names


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as exc:
        raise DataError(
            f'the format hf needs pyarrow ({exc}); install it with: pip install "lt-data[parquet]"'
        ) from exc
    import_module("pyarrow.ipc")
    return pyarrow
