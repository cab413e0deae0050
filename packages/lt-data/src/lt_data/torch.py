"""PyTorch adapter: batches as tensors, and a loader with a state that owns its worker processes.

Ids are transferred to the device in the store's dtype (2 or 4 bytes each) and converted there; labels, positions and
document numbers are computed there too, so a batch of 2-byte ids costs an eighth of the transfer of four int32 arrays.
This is the only module of lt-data that imports torch (`pip install "lt-data[torch]"`).

With N workers, worker w makes the batches w, w + N, ... and torch's DataLoader takes them in turn, so the sequence is
that of one process for any N. A worker's position is unknown to the process that saves the state, so the loader counts
the batches that it yields itself, and no dataset is offered that another loader could iterate.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError('lt_data.torch needs torch: pip install "lt-data[torch]"', name="torch") from exc
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lt_data.errors import DataError
from lt_data.streaming.rows import IGNORE_INDEX, TokenRows
from lt_data.streaming.stream import RowSource, Stream, StreamBatch

TensorBatch = dict[str, torch.Tensor]


def to_tensors(rows: TokenRows, device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.int64) -> TensorBatch:
    """Convert rows to tensors on a device; the values are those of `TokenRows.to_int32`.

    Args:
        rows: rows in the store's dtype.
        device: target device.
        dtype: of input_ids and labels.

    Returns:
        input_ids, labels [n, seq_len] in `dtype`; position_ids, doc_ids [n, seq_len] and cu_seqlens [segments + 1] in
        int32; loss_mask (bool) [n, seq_len].
    """
    n, seq_len = rows.input_ids.shape
    device = torch.device(device)
    # torch supports little of unsigned types beyond conversion; 4-byte ids are below 2^31.
    narrow = rows.input_ids if rows.input_ids.dtype.itemsize == 2 else rows.input_ids.view(np.int32)
    input_ids = torch.from_numpy(narrow).to(device, non_blocking=True).to(dtype)
    labels = torch.empty_like(input_ids)
    labels[:, :-1] = input_ids[:, 1:]
    ends = rows.slice_begin + rows.slice_length - 1
    last = np.where(rows.has_next, rows.next_ids.astype(np.int64), IGNORE_INDEX)
    labels.view(-1)[torch.from_numpy(ends).to(device)] = torch.from_numpy(last).to(device, dtype)
    begin, length, number = rows.segments()
    of_segment = torch.from_numpy(np.stack([begin, number]).astype(np.int32)).to(device)
    lengths = torch.from_numpy(length).to(device)
    total = n * seq_len
    begin_at, doc_ids = torch.repeat_interleave(of_segment, lengths, dim=1, output_size=total)
    position_ids = torch.arange(total, dtype=torch.int32, device=device) - begin_at
    position_ids = position_ids.view(n, seq_len)
    padding = torch.arange(seq_len, device=device) >= torch.from_numpy(rows.tokens_per_row()).to(device)[:, None]
    labels.masked_fill_(padding, IGNORE_INDEX)
    if rows.document_mask:
        position_ids.masked_fill_(padding, 0)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "doc_ids": doc_ids.view(n, seq_len),
        "cu_seqlens": torch.from_numpy(rows.cu_seqlens()).to(device),
        "loss_mask": labels != IGNORE_INDEX,
    }


def to_cpu_tensors(batch: StreamBatch) -> TensorBatch:
    """Convert a batch to CPU tensors, plus `valid_tokens` of the global batch (int64, 0-dimensional)."""
    return {**to_tensors(batch.tokens), "valid_tokens": torch.tensor(batch.valid_tokens)}


class _WorkerBatches(IterableDataset[Any]):
    """Batches of a stream from its state on; in a worker process every `num_workers`-th, on a copy of the stream."""

    def __init__(self, stream: Stream, transform: Callable[[StreamBatch], Any]) -> None:
        super().__init__()
        self.stream = stream
        self._transform = transform

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream = copy(self.stream)
        stream.state = stream.state_after(worker_id)
        while True:
            yield self._transform(stream.next())
            stream.state = stream.state_after(num_workers - 1)


class StreamLoader:
    """Loader of batches as tensors, from worker processes of its own.

    It is endless: `len` is the number of whole batches in an epoch, and rows that remain begin the next epoch. The
    state is that after the last batch yielded, whatever the workers have made ahead; a new iteration continues there.

        loader = StreamLoader(rows, batch_size=8, seed=1, num_workers=2)
        for batch in loader:
            ...
            json.dump(loader.state_dict(), file)

    Args:
        stream: the batches; do not call its `next` while the loader is iterated. Or the rows: a stream of them is made.
        batch_size: rows of a batch, of a stream that is made here.
        seed: seed of the shuffle, likewise.
        num_workers: worker processes; 0: this process. The sequence is the same.
        transform: function from a batch to the yielded item; worker processes must be able to import it.
        options: options of `torch.utils.data.DataLoader`, such as `pin_memory` and `prefetch_factor`.

    Attributes:
        stream: the stream.

    Raises:
        DataError: `persistent_workers=True` or `in_order=False`, or a batch size beside a stream.
    """

    def __init__(
        self,
        stream: Stream | RowSource,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        transform: Callable[[StreamBatch], Any] = to_cpu_tensors,
        **options: Any,
    ) -> None:
        if isinstance(stream, Stream) != (batch_size is None):
            raise DataError(f"batch_size = {batch_size}: give it with rows, and only there; a stream has its own")
        if not isinstance(stream, Stream):
            stream = Stream(stream, global_batch_size=batch_size or 0, seed=seed)
        if options.get("persistent_workers"):
            raise DataError(
                "persistent_workers=True: such workers keep the stream of the first iteration, so the next one would "
                "repeat its rows; leave it out"
            )
        if not options.get("in_order", True):
            raise DataError(
                "in_order=False: the order of the batches, and so the state, would be undefined; leave it out"
            )
        self.stream = stream
        batches = _WorkerBatches(stream, transform)
        self._loader: DataLoader[Any] = DataLoader(batches, batch_size=None, num_workers=num_workers, **options)

    def __len__(self) -> int:
        return self.stream.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end.

        Raises:
            DataError: the stream was moved since the last batch: by `load_state_dict`, `skip` or another iteration.
        """
        state = self.stream.state
        for batch in self._loader:
            if self.stream.state is not state:
                raise DataError("the stream was moved during this iteration; begin a new one: iter(loader)")
            self.stream.state = state = self.stream.state_after(1)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch yielded, as JSON values."""
        return self.stream.state.to_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore a state for the next iteration, also one of another dp_size or number of workers.

        Raises:
            DataError: not a state, or the state of another sequence.
        """
        self.stream.restore(values)
