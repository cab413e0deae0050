"""PyTorch adapter: batches as tensors, an `IterableDataset` for workers, and a stateful loader.

Ids are transferred to the device in the store's dtype (2 or 4 bytes each) and converted there; labels, positions and
document numbers are computed there too, so a batch of 2-byte ids costs an eighth of the transfer of four int32 arrays.
This is the only module of lt-data that imports torch (`pip install "lt-data[torch]"`).

With N workers, worker w makes the batches w, w + N, ... and torch's DataLoader takes them in turn, so the sequence is
that of one process for any N. The state counts the batches that were yielded, not those that workers prefetched: in a
`StreamLoader` of all workers together, in a `StreamDataset` of its own process, where torchdata's `StatefulDataLoader`
saves and restores it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError('lt_data.torch needs torch: pip install "lt-data[torch]"', name="torch") from exc
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map  # where torch documents it for types of others

from lt_data.errors import DataError
from lt_data.streaming.rows import IGNORE_INDEX, TokenRows
from lt_data.streaming.stream import RowSource, Stream, StreamBatch, StreamState

TensorBatch = dict[str, torch.Tensor]


class _WholeBatch(dict[str, Any]):
    """Batch that is complete already: a loader that would make batches of batches is refused."""


def _refuse_collation(batch: Any, *, collate_fn_map: Any = None) -> Any:
    raise DataError(
        "batch_size of the DataLoader: a StreamDataset yields whole batches; give DataLoader(..., batch_size=None)"
    )


default_collate_fn_map[_WholeBatch] = _refuse_collation


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


class StreamDataset(IterableDataset[Any]):
    """Batches of one data-parallel rank, for `DataLoader(dataset, batch_size=None, num_workers=N)`.

    Has the protocol of torchdata's `StatefulDataLoader`: `state_dict` and `load_state_dict`.

    Args:
        source: a `RowReader`, a `Mixture` or `Buckets`.
        global_batch_size: as for `Stream`, like the other options.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        seed: seed of the shuffle.
        shuffle: False: the order of the pack.
        transform: function from a batch to the yielded item; worker processes must be able to import it.

    Attributes:
        state: where the next iteration begins: after the last batch that this process has yielded.

    Raises:
        DataError: as `Stream` does.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[[StreamBatch], Any] = to_cpu_tensors,
    ) -> None:
        super().__init__()
        self._source = source
        self._options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._transform = transform
        self.state = Stream(source, **self._options).state

    def stream(self) -> Stream:
        """Return a stream at `state`."""
        return Stream(self._source, **self._options, state=self.state)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from `state` on, without end; in a worker process every `num_workers`-th."""
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        everyones, own = self.stream(), self.stream()
        own.state = own.state_after(worker_id)
        while True:
            item = self._transform(own.next())
            own.state = own.state_after(num_workers - 1)
            # That of worker 0, for each worker: the next iteration adds the worker's number again.
            self.state = everyones.state = everyones.state_after(num_workers)
            yield _WholeBatch(item) if type(item) is dict else item

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return self.state.to_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore a state for the next iteration, also one of another dp_size.

        Raises:
            DataError: not a state, or the state of another sequence.
        """
        before = self.state
        self.state = StreamState.from_dict(values)
        try:
            self.stream()
        except BaseException:
            self.state = before
            raise


class StreamLoader:
    """Stateful DataLoader over a `StreamDataset`.

    A new iteration (`iter`) continues after the last batch that was yielded.

    Args:
        dataset: the batches.
        num_workers: worker processes; 0: this process. The sequence is the same.
        options: options of `torch.utils.data.DataLoader`, such as `pin_memory` and `prefetch_factor`.

    Raises:
        DataError: `persistent_workers=True` or `in_order=False`.
    """

    def __init__(self, dataset: StreamDataset, *, num_workers: int = 0, **options: Any) -> None:
        if options.get("persistent_workers"):
            raise DataError(
                "persistent_workers=True: such workers keep the dataset of the first iteration, so the next one would "
                "repeat its rows; leave it out"
            )
        if not options.get("in_order", True):
            raise DataError(
                "in_order=False: the order of the batches, and so the state, would be undefined; leave it out"
            )
        self._dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)

    @property
    def state(self) -> StreamState:
        """State after the last batch that was yielded."""
        return self._dataset.state

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end."""
        stream = self._dataset.stream()
        for batch in self._loader:
            stream.state = stream.state_after(1)
            self._dataset.state = stream.state
            yield batch

    def skip(self, n_rows: int) -> None:
        """Skip rows in the next iteration, as `Stream.skip` does."""
        stream = self._dataset.stream()
        stream.skip(n_rows)
        self._dataset.state = stream.state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return self._dataset.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore a state for the next iteration, also one of another dp_size or number of workers.

        Raises:
            DataError: not a state, or the state of another sequence.
        """
        self._dataset.load_state_dict(values)
