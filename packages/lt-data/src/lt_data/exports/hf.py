"""Folders as `save_to_disk` of Hugging Face datasets makes them, written with pyarrow only.

    data-00000.arrow ...   the Arrow stream format
    dataset_info.json      the columns
    state.json             the files, in order

Rows (with `seq_len`) have the columns of the trainers of AWS Neuron and of `transformers`: input_ids (int32),
attention_mask (int8, 0 in padding) and labels (int32). Those trainers shift within the row: the prediction at position
t is compared with labels[t + 1]. So labels[t + 1] here is the label of lt_data.streaming.rows at t, or -100, and
labels[0] is never used. Without padding and `bfd`, labels equal input_ids.

Rows of `bfd`, which hold whole documents side by side, also have position_ids (int32), from which the flash attention
of `transformers` finds them in batches of one row (in larger ones it takes each row for one text). Padding counts as
the last document. Documents (without `seq_len`) have the column input_ids. Features are written as "Sequence", which
old and new versions of `datasets` read. `lt data prepare --tokens-field input_ids` reads such a folder.
"""

import hashlib
import json
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.exports.job import ExportJob, Samples
from lt_data.storage import write_file
from lt_data.streaming.rows import IGNORE_INDEX

FILE_BYTES = 500_000_000  # default of `datasets`
_TYPES = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32", "position_ids": "int32"}


def write(job: ExportJob) -> None:
    """Write the folder."""
    try:
        import pyarrow as pa
        from pyarrow import ipc
    except ImportError as exc:
        raise DataError(
            f'the format hf needs pyarrow ({exc}); install it with: pip install "lt-data[parquet]"'
        ) from exc
    is_rows, is_bfd = job.options.seq_len is not None, job.options.packing == "bfd"
    names = [*_TYPES][: 4 if is_bfd else 3 if is_rows else 1]
    value = {name: {"feature": {"dtype": _TYPES[name], "_type": "Value"}, "_type": "Sequence"} for name in names}
    fields = [(name, pa.list_(getattr(pa, _TYPES[name])())) for name in names]
    schema = pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": value}})})
    row_bytes = sum(np.dtype(_TYPES[name]).itemsize for name in names)
    files: list[dict[str, str]] = []
    for number, batches in job.files(row_bytes, FILE_BYTES):
        files.append({"filename": f"data-{number:05d}.arrow"})
        with job.create(files[-1]["filename"]) as file, ipc.new_stream(file, schema) as stream:
            for batch in batches:
                offsets = pa.array(np.append(0, np.cumsum(batch.lengths)).astype(np.int32))
                columns = _columns(job, batch)
                arrays = [pa.array(np.ravel(columns[name]).astype(_TYPES[name], copy=False)) for name in names]
                lists = [pa.ListArray.from_arrays(offsets, array) for array in arrays]
                stream.write_batch(pa.RecordBatch.from_arrays(lists, schema=schema))
    # `datasets` names its caches by the fingerprint, so it must depend on the content.
    fingerprint = hashlib.sha256(f"{job.store.manifest.fingerprint} {job.options} {job.pad_id}".encode()).hexdigest()
    info = {"citation": "", "description": "", "features": value, "homepage": "", "license": ""}
    state = {
        **{"_data_files": files, "_fingerprint": fingerprint[:16], "_split": job.options.split},
        **{"_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False},
    }
    for name, values in (("dataset_info.json", info), ("state.json", state)):
        write_file(job.folder / name, (json.dumps(values, indent=2) + "\n").encode())


def _columns(job: ExportJob, batch: Samples) -> dict[str, Any]:
    """Return the values of each column."""
    if batch.rows is None:
        return {"input_ids": batch.ids}
    rows = batch.rows
    labels = np.concatenate([rows.input_ids[:, :1], rows.labels[:, :-1]], axis=1)  # of a position at the next one
    padding_begin = batch.mask.reshape(rows.labels.shape).sum(axis=1, keepdims=True)
    at = np.arange(rows.labels.shape[1]) - padding_begin
    job.report.dropped_labels += int((rows.labels[:, -1] != IGNORE_INDEX).sum())
    return {
        "input_ids": batch.ids,
        "attention_mask": batch.mask,
        "labels": batch.ids if job.options.labels == "copy" else labels,
        "position_ids": np.where(at < 0, rows.position_ids, at),
    }
