r"""Folders of Hugging Face `datasets.save_to_disk`, written and read with pyarrow only.

    data-00000-of-00002.arrow ...   the Arrow stream format
    dataset_info.json               the columns
    state.json                      the files, in order

Rows (with `seq_len`) have the columns of the trainers of AWS Neuron and of `transformers`: input_ids (int32),
attention_mask (int8, 0 in padding) and labels (int32). Those trainers shift within the row: the prediction at position
t is compared with labels[t + 1]. So labels[t + 1] here is the label of lt_data.streaming.rows at t, or -100, and
labels[0] is never used. Without padding and `bfd`, labels equal input_ids.

Rows of `bfd`, which hold whole documents side by side, also say where each begins: by position_ids (int32), from which
the flash attention of `transformers` finds them in batches of one row (in larger ones it takes each row for one text),
or by seq_lengths (int32, as many as the row has documents), which TRL's collator reads. Padding counts as the last of
them.

Documents (without `seq_len`) have the column input_ids. Features are written as "Sequence", which old and new versions
of `datasets` read. Memory: one batch of about a million tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from os import SEEK_END
from pathlib import Path
from typing import Any

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.exports.export_job import ExportJob, WriteResult
from lt_data.exports.files import OutputFiles
from lt_data.exports.input_files import MAX_DESCRIPTION_BYTES
from lt_data.exports.samples import document_batches, row_batches, split_by_size
from lt_data.file_names import is_plain_name
from lt_data.storage import read_file, translate_os_errors
from lt_data.streaming.rows import IGNORE_INDEX

FILE_BYTES = 500_000_000  # default of `datasets`
INFO_FILE = "dataset_info.json"
STATE_FILE = "state.json"
DICT_FILE = "dataset_dict.json"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # end mark of an Arrow stream
_ROW_COLUMNS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
_DOCUMENT_COLUMNS = {"input_ids": "int32"}
_POSITIONS = "position_ids"


def min_bytes(job: ExportJob) -> int:
    """Return the bytes that the export needs."""
    if job.options.seq_len is None:
        return 4 * job.store.n_tokens
    return sum(np.dtype(dtype).itemsize for dtype in _columns(job).values()) * job.n_rows * job.options.seq_len


def _columns(job: ExportJob) -> dict[str, str]:
    """Return the columns and their dtypes."""
    if job.options.seq_len is None:
        return _DOCUMENT_COLUMNS
    boundaries = {job.options.document_boundaries: "int32"} if job.options.packing == "bfd" else {}
    return {**_ROW_COLUMNS, **boundaries}


def write(job: ExportJob, files: OutputFiles) -> WriteResult:
    """Write the folder."""
    pyarrow = _import_pyarrow()
    file_bytes = job.options.file_bytes or FILE_BYTES
    seq_len = job.options.seq_len
    columns = _columns(job)
    if seq_len is None:
        boundaries = split_by_size(4 * job.store.lengths.astype(np.int64), file_bytes)
    else:
        boundaries = split_by_size(np.full(job.n_rows, min_bytes(job) // job.n_rows), file_bytes)
    fields = [(name, pyarrow.list_(getattr(pyarrow, dtype)())) for name, dtype in columns.items()]
    features = {name: _feature(dtype) for name, dtype in columns.items()}
    schema = pyarrow.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    names = [f"data-{i:05d}-of-{boundaries.size - 1:05d}.arrow" for i in range(boundaries.size - 1)]
    padding = dropped_labels = done = 0
    total = job.store.n_tokens
    for name, (first, last) in zip(names, pairwise(boundaries.tolist()), strict=True):
        with files.create(name) as file, pyarrow.ipc.new_stream(file, schema) as stream:
            if seq_len is None:
                for batch in document_batches(job.store, first, last):
                    stream.write_batch(_make_record_batch(pyarrow, schema, [(batch.tokens, batch.lengths)]))
                    job.progress(done := done + batch.tokens.size, total, "tokens")
                continue
            for rows in row_batches(job.row_reader, first, last):
                mask = (rows.doc_ids >= 0).astype(np.int8)
                labels = _shift_labels(rows.input_ids, rows.labels, copy=job.options.labels == "copy")
                lengths = np.full(len(mask), seq_len)
                input_ids = np.where(mask, rows.input_ids, np.int32(job.pad_id))
                values = [(column, lengths) for column in (input_ids, mask, labels)]
                if len(columns) > len(values):
                    positions, document_lengths, n_documents = document_positions(rows.doc_ids)
                    is_positions = job.options.document_boundaries == _POSITIONS
                    values.append((positions, lengths) if is_positions else (document_lengths, n_documents))
                stream.write_batch(_make_record_batch(pyarrow, schema, values))
                padding += mask.size - int(mask.sum())
                dropped_labels += int((rows.labels[:, -1] != IGNORE_INDEX).sum())
                job.progress(done := done + int(mask.sum()), total, "tokens")
    _write_descriptions(job, files, names, features)
    samples = int(boundaries[-1])
    tokens = total if seq_len is None else samples * seq_len - padding
    return WriteResult(samples=samples, tokens=tokens, padding=padding, dropped_labels=dropped_labels)


def _shift_labels(input_ids: np.ndarray, labels: np.ndarray, *, copy: bool) -> np.ndarray:
    """Return labels for a reader that shifts: the label of position t at t + 1; the first id is unused."""
    return input_ids if copy else np.concatenate([input_ids[:, :1], labels[:, :-1]], axis=1)


def document_positions(doc_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the documents of rows in two forms; padding is one more document at the end of its row.

    Args:
        doc_ids: number of the document at each position, -1 in padding [n, seq_len].

    Returns:
        The positions within the documents [n, seq_len], the lengths of all documents in order, and how many of them
        each row has [n].
    """
    n, seq_len = doc_ids.shape
    begins = np.ones((n, seq_len), bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    at = np.arange(seq_len)
    positions = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    lengths = np.diff(np.append(np.flatnonzero(begins), n * seq_len))
    return positions, lengths, begins.sum(axis=1)


def _make_record_batch(pyarrow: Any, schema: Any, columns: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Return a batch of columns, each given by its values and the length of each row's list."""
    arrays = []
    for field, (values, lengths) in zip(schema, columns, strict=True):
        offsets = np.zeros(lengths.size + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        flat = values.reshape(-1).astype(field.type.value_type.to_pandas_dtype(), copy=False)
        arrays.append(pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat)))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _feature(dtype: str) -> dict[str, Any]:
    return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"}


def _write_descriptions(job: ExportJob, files: OutputFiles, names: list[str], features: dict[str, Any]) -> None:
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    # `datasets` names its caches by the fingerprint, so it must depend on the content.
    digest = hashlib.sha256("".join(file.sha256 for file in files.completed).encode())
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
    """Yield the samples of a folder that `save_to_disk` (or `write`) wrote.

    Args:
        path: the folder.
        field: column of the ids. If there is an attention_mask, masked ids are left out.

    Yields:
        The ids of a sample (integers), the number of masked ids, and its location.

    Raises:
        DataError: not such a folder, or the column is missing or of another type.
    """
    pyarrow = _import_pyarrow()
    for name in _data_files(path):
        file = path / name
        _check_end(file)
        try:
            with translate_os_errors("read", file), pyarrow.memory_map(str(file)) as mapped:
                for first, batch in _batches(pyarrow, mapped):
                    names = batch.schema.names
                    columns = {name: batch.column(name) for name in (field, "attention_mask") if name in names}
                    if field not in columns:
                        raise DataError(f"{file}: no column {field!r} (found {', '.join(names)}); name it")
                    for i in range(batch.num_rows):
                        location = f"{file}:{first + i + 1}"
                        ids = _read_row(columns[field], i, location, field)
                        if "attention_mask" in columns:
                            mask = _read_row(columns["attention_mask"], i, location, "attention_mask")
                            if mask.size != ids.size:
                                raise DataError(
                                    f"{location}: {ids.size} ids and {mask.size} mask values; correct the row"
                                )
                            kept = ids[mask != 0]
                            yield kept, ids.size - kept.size, location
                        else:
                            yield ids, 0, location
        except pyarrow.ArrowInvalid as exc:
            raise DataError(f"{file}: damaged Arrow stream ({exc}); copy it again") from exc


def _check_end(file: Path) -> None:
    """Check the end mark: Arrow's reader does not detect truncation between two batches."""
    with translate_os_errors("read", file), file.open("rb") as opened:
        size = opened.seek(0, SEEK_END)
        opened.seek(max(0, size - len(_END)))
        end = opened.read()
    if end != _END:
        raise DataError(f"{file}: truncated Arrow stream (no end mark); copy it again")


def _batches(pyarrow: Any, mapped: Any) -> Iterator[tuple[int, Any]]:
    first = 0
    for batch in pyarrow.ipc.open_stream(mapped):
        yield first, batch
        first += batch.num_rows


def _read_row(column: Any, index: int, location: str, name: str) -> np.ndarray:
    values = getattr(column[index], "values", None)
    if values is None or values.null_count:
        raise DataError(f"{location}: column {name!r} is not a list of numbers; correct or remove the row")
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "iub":
        raise DataError(f"{location}: column {name!r} holds {values.type}, not integers; name another column")
    return array


def _data_files(path: Path) -> list[str]:
    if (path / DICT_FILE).is_file():
        splits = sorted(entry.parent.name for entry in path.glob(f"*/{STATE_FILE}"))
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; give one of these folders")
    with translate_os_errors("read the dataset's", path / STATE_FILE):
        content = read_file(path / STATE_FILE, max_bytes=MAX_DESCRIPTION_BYTES)
    state = strict_json.load_object(content, str(path / STATE_FILE), "save the dataset again")
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError) as exc:
        raise DataError(f"{path / STATE_FILE}: not the state of a saved dataset ({exc!r}); save it again") from exc
    if foreign := [name for name in names if not is_plain_name(name)]:
        raise DataError(f"{path / STATE_FILE}: {foreign[0]!r} is not a file of this folder; save the dataset again")
    return names


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as exc:
        raise DataError(
            f'the format hf needs pyarrow ({exc}); install it with: pip install "lt-data[parquet]"'
        ) from exc
    import_module("pyarrow.ipc")
    return pyarrow
