"""JSON lines of ids for SageMaker model parallel recipes: `.json`, or `.json.gz` (`--zipped_data 1`).

    {"input_ids":[1,5,7],"attention_mask":[1,1,1]}

One document or one row per line; padding has mask 0. Files are `part-00000.json.gz` and so on, each about `file_bytes`
of text; the recipe loads one at a time into memory and crops lines longer than its context at random, so give
`seq_len`. The folder contains nothing else, as the recipe reads every file of that suffix. The output is reproducible
(gzip without time and name). `lt data prepare --tokens-field input_ids` reads such files. Long lines are written in
chunks.
"""

import gzip
from contextlib import nullcontext

import numpy as np

from lt_data.exports.job import ExportJob

FILE_BYTES = 1 << 28
_CHUNK_IDS = 1 << 16  # ids converted to text at a time


def write(job: ExportJob) -> None:
    """Write the files."""
    gz = job.options.gz
    for number, batches in job.files(len(str(job.store.vocab_size - 1)) + 3, FILE_BYTES):
        with (
            job.create(f"part-{number:05d}.json{'.gz' * gz}") as file,
            gzip.GzipFile("", "wb", 6, file, mtime=0) if gz else nullcontext(file) as lines,
        ):
            for batch in batches:
                ends = np.cumsum(batch.lengths).tolist()
                for begin, end in zip([0, *ends], ends, strict=False):
                    lines.write(b'{"input_ids":[')
                    for at in range(begin, end, _CHUNK_IDS):
                        ids = batch.ids[at : min(at + _CHUNK_IDS, end)].tolist()
                        lines.write((b"," if at > begin else b"") + ",".join(map(str, ids)).encode())
                    used = int(np.count_nonzero(batch.mask[begin:end]))
                    mask = b"1," * used + b"0," * (end - begin - used)
                    lines.write(b'],"attention_mask":[' + mask[:-1] + b"]}\n")
