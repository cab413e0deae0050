"""The stream for torch: batches as tensors, a dataset that worker processes can share, and a loader with a state.

Ids cross to the device in the store's own type (2 or 4 bytes each) and are widened there; labels, positions and
document numbers are made there too, so a batch of 2-byte ids costs an eighth of the transfer of four int32 arrays. This
is the only module of lt-data that imports torch (`pip install "lt-data[torch]"`).

With N workers, worker w makes the batches w, w + N, ... and torch's DataLoader takes them in turn, so the sequence is
that of one process, whatever N. The state counts the batches that were handed out, not those that workers have made
ahead.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError('lt_data.torch needs torch: pip install "lt-data[torch]"', name="torch") from exc
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lt_data.errors import DataError
from lt_data.streaming.rows import IGNORE, TokenRows
from lt_data.streaming.stream import RowSource, Stream, StreamBatch, StreamState

Batch = dict[str, torch.Tensor]


def tensors(rows: TokenRows, device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.int64) -> Batch:
    """Rows as tensors on a device: what `TokenRows.widen` makes on the host, made there.

    Args:
        rows: as the store holds them.
        device: where to.
        dtype: of input_ids and labels.

    Returns:
        input_ids, labels [n, seq_len] in `dtype`; position_ids, doc_ids [n, seq_len] and cu_seqlens [segments + 1] in
        int32; loss_mask (bool) [n, seq_len].
    """
    n, seq_len = rows.input_ids.shape
    device = torch.device(device)
    # torch knows little of unsigned types but how to widen them; 4-byte ids are below 2^31.
    narrow = rows.input_ids if rows.input_ids.dtype.itemsize == 2 else rows.input_ids.view(np.int32)
    input_ids = torch.from_numpy(narrow).to(device, non_blocking=True).to(dtype)
    labels = torch.empty_like(input_ids)
    labels[:, :-1] = input_ids[:, 1:]
    ends = rows.slice_begin + rows.slice_length - 1
    last = np.where(rows.has_next, rows.next_ids.astype(np.int64), IGNORE)
    labels.view(-1)[torch.from_numpy(ends).to(device)] = torch.from_numpy(last).to(device, dtype)
    begin, length, number = rows.segments()
    of_segment = torch.from_numpy(np.stack([begin, number]).astype(np.int32)).to(device)
    lengths = torch.from_numpy(length).to(device)
    total = n * seq_len
    begin_at, doc_ids = torch.repeat_interleave(of_segment, lengths, dim=1, output_size=total)
    position_ids = torch.arange(total, dtype=torch.int32, device=device) - begin_at
    position_ids = position_ids.view(n, seq_len)
    padding = torch.arange(seq_len, device=device) >= torch.from_numpy(rows.used()).to(device)[:, None]
    labels.masked_fill_(padding, IGNORE)
    if rows.document_mask:
        position_ids.masked_fill_(padding, 0)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "doc_ids": doc_ids.view(n, seq_len),
        "cu_seqlens": torch.from_numpy(rows.cu_seqlens()).to(device),
        "loss_mask": labels != IGNORE,
    }


def on_cpu(batch: StreamBatch) -> Batch:
    """A batch as tensors in this process's memory, and `valid_tokens` of the global batch (int64, no dimension)."""
    return {**tensors(batch.tokens), "valid_tokens": torch.tensor(batch.valid_tokens)}


class StreamDataset(IterableDataset[Any]):
    """The batches of one data-parallel rank, for `DataLoader(dataset, batch_size=None, num_workers=N)`.

    Args:
        source: a `RowReader`, a `Mixture` or `Buckets`.
        global_batch: as of `Stream`, like the rest of the options.
        dp_rank: this rank.
        dp_size: ranks that share the batch.
        seed: of the shuffle.
        shuffle: False: the order of the pack.
        work: what is given for each batch; a function that worker processes can import.

    Attributes:
        state: where the next walk over the dataset begins.

    Raises:
        DataError: as `Stream` does.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        work: Callable[[StreamBatch], Any] = on_cpu,
    ) -> None:
        super().__init__()
        self._source = source
        self._options: dict[str, Any] = {
            "global_batch": global_batch,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._work = work
        self.state = Stream(source, **self._options).state

    def stream(self) -> Stream:
        """A stream that stands at `state`."""
        return Stream(self._source, **self._options, state=self.state)

    def __iter__(self) -> Iterator[Any]:
        """The batches from `state` on, without end; in a worker those that are its turn."""
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream = self.stream()
        stream.state = stream.ahead(turn)
        while True:
            batch = stream.next()
            stream.state = stream.ahead(turns - 1)
            yield self._work(batch)


class StreamLoader:
    """A DataLoader over a `StreamDataset` that knows where it stands.

    A new walk (`iter`) goes on behind the last batch that was handed out.

    Args:
        dataset: the batches.
        num_workers: processes that make them; 0: this one. The sequence is the same.
        options: of `torch.utils.data.DataLoader`, such as `pin_memory` and `prefetch_factor`.

    Raises:
        DataError: `persistent_workers=True` or `in_order=False`.
    """

    def __init__(self, dataset: StreamDataset, *, num_workers: int = 0, **options: Any) -> None:
        if options.get("persistent_workers"):
            raise DataError(
                "persistent_workers=True: such workers keep the dataset of the first walk, and the next one would "
                "repeat its rows; leave it out"
            )
        if not options.get("in_order", True):
            raise DataError(
                "in_order=False: batches would come in no known order, and no state could tell; leave it out"
            )
        self._dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)

    @property
    def state(self) -> StreamState:
        """After the last batch that was handed out."""
        return self._dataset.state

    def __iter__(self) -> Iterator[Any]:
        """Batch after batch, without end."""
        stream = self._dataset.stream()
        for batch in self._loader:
            stream.state = stream.ahead(1)
            self._dataset.state = stream.state
            yield batch

    def skip(self, n_rows: int) -> None:
        """Jump over rows, as `Stream.skip` does; for the next walk."""
        stream = self._dataset.stream()
        stream.skip(n_rows)
        self._dataset.state = stream.state

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return self.state.to_json()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take up a state, also of another dp_size or number of workers; for the next walk.

        Raises:
            DataError: not a state, or of another sequence.
        """
        before = self._dataset.state
        self._dataset.state = StreamState.from_json(values)
        try:
            self._dataset.stream()
        except BaseException:
            self._dataset.state = before
            raise
