"""Loss over a held-out store: of the whole, by source file and by document length.

The rows are those of validation (`data.validation_batches`): a document longer than a row is cut, every token but a
document's first has a label, and each rank has equally many batches. A position belongs to the document of its slice in
the pack, and a document to its source file and to a range of lengths between powers of two. Each rank adds up its own
positions by group in float64; the sums of all ranks are exchanged once at the end. Bits per byte of a group need the
bytes of its text: each rank decodes its share of the documents, about a second per million tokens.

Cost: one forward pass over the store; memory for two numbers per document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lt_data import RowReader, TokenStore
from lt_data.packing.algorithms import concat_aranges
from lt_trainer.data.training_data import text_bytes, validation_batches, validation_rows
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer

RECORD_BITS = 40
"""Bits of the record in a document's source; those above are the index of its file."""
MAX_LOSS_FOR_EXP = 700.0


@dataclass(frozen=True, kw_only=True)
class GroupLoss:
    """Loss over a group of a store's documents."""

    store: str
    group: str
    """"all", "source" or "length"."""
    name: str
    """Source file, or range of document lengths in tokens such as "256-511"; "" for all."""
    documents: int
    tokens: int
    """Positions with a label."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    loss_sum: float
    """In nats."""

    @property
    def loss(self) -> float:
        """Nats per token; nan without tokens."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < MAX_LOSS_FOR_EXP else math.inf if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Loss of the group in bits, over the bytes of its text; nan without text."""
        return self.loss_sum / math.log(2) / self.text_bytes if self.text_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the numbers made of them."""
        return asdict(self) | {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentGroups:
    """Groups of a store's documents by source file and range of lengths; those that occur."""

    keys: list[tuple[str, int]]
    """Source file, and the number of bits of the length."""
    of_document: np.ndarray
    """Index in `keys` of each document, int64 [n_documents]."""

    @staticmethod
    def of_store(store: TokenStore) -> DocumentGroups:
        """Return the groups of a store; without known sources all documents are of the source ""."""
        lengths = store.lengths.astype(np.int64)
        bits = np.zeros(lengths.size, np.int64)
        bits[lengths > 0] = np.floor(np.log2(lengths[lengths > 0])).astype(np.int64) + 1
        files = np.zeros(lengths.size, np.int64)
        names = [""]
        if store.has_sources and store.n_documents:
            shards = [store.shard_sources(number) for number in range(len(store.manifest.shards))]
            files = np.concatenate([part >> np.uint64(RECORD_BITS) for part in shards if part is not None])
            names = [file.path for file in store.source_files]
        found, of_document = np.unique(files.astype(np.int64) * 64 + bits, return_inverse=True)
        keys = [(names[int(key) // 64], int(key) % 64) for key in found]
        return DocumentGroups(keys=keys, of_document=of_document.reshape(-1))


@dataclass(kw_only=True)
class StoreText:
    """Groups of a store's documents, and the bytes of text of this rank's share of each, read once."""

    store: TokenStore
    rank: int
    world_size: int

    @cached_property
    def groups(self) -> DocumentGroups:
        """Groups of the documents."""
        return DocumentGroups.of_store(self.store)

    @cached_property
    def n_bytes(self) -> list[int]:
        """UTF-8 bytes of the text of this rank's share, by group."""
        return _text_bytes_by_group(self.store, self.groups, self.rank, self.world_size)


def evaluate_store(
    scorer: Scorer,
    reader: RowReader,
    shape: BatchShape,
    *,
    name: str,
    text: StoreText | None = None,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[GroupLoss]:
    """Return the loss over all rows of a reader: of the whole, then by source, then by length.

    Equal on all ranks.

    Args:
        scorer: the model.
        reader: rows of the store.
        shape: rows of a batch; its `seq_len` is the reader's.
        name: name of the store in the results.
        text: of the store, where it is evaluated more than once.
        on_batch: told of this rank's batches, done and in all.

    Raises:
        EvaluationError: the store has no label.
    """
    assert reader.seq_len == shape.seq_len
    topology = scorer.topology
    text = text or StoreText(store=reader.store, rank=topology.rank, world_size=topology.world_size)
    groups = text.groups
    n_groups = len(groups.keys)
    sums, tokens = np.zeros(n_groups), np.zeros(n_groups, np.int64)
    n_batches = -(-reader.n_rows // (shape.micro_batch_size * topology.dp_size))
    batches = validation_batches(reader, topology, shape.micro_batch_size)
    row_numbers = validation_rows(reader.n_rows, topology, shape.micro_batch_size)
    for done, (batch, rows) in enumerate(zip(batches, row_numbers, strict=True), start=1):
        scores = scorer.score(batch)
        group = np.zeros(batch.labels.shape[1:], np.int64)
        group[: rows.size] = groups.of_document[_documents_of_rows(reader, rows)]
        reported = scores.is_reported[0]
        sums -= np.bincount(group[reported], weights=scores.log_probs[0][reported], minlength=n_groups)
        tokens += np.bincount(group[reported], minlength=n_groups)
        on_batch(done, n_batches)
    parts = scorer.control.all_gather([sums.tolist(), tokens.tolist(), text.n_bytes])
    sums_of, tokens_of, bytes_of = ([part[i] for part in parts] for i in range(3))
    cells = [
        _Cell(
            key=key,
            documents=int(documents),
            tokens=sum(part[i] for part in tokens_of),
            text_bytes=sum(part[i] for part in bytes_of),
            loss_sum=math.fsum(part[i] for part in sums_of),
        )
        for i, (key, documents) in enumerate(
            zip(groups.keys, np.bincount(groups.of_document, minlength=n_groups), strict=True)
        )
    ]
    if not sum(cell.tokens for cell in cells):
        raise EvaluationError(f"{name} has no label: its documents have at most one token; prepare longer ones")
    return list(_losses(name, reader.store, cells))


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """Sums over the documents of one source file and range of lengths."""

    key: tuple[str, int]
    documents: int
    tokens: int
    text_bytes: int
    loss_sum: float


def _losses(name: str, store: TokenStore, cells: list[_Cell]) -> Iterator[GroupLoss]:
    def total(group: str, label: str, some: list[_Cell]) -> GroupLoss:
        return GroupLoss(
            store=name,
            group=group,
            name=label,
            documents=sum(cell.documents for cell in some),
            tokens=sum(cell.tokens for cell in some),
            text_bytes=text_bytes(store) if group == "all" else sum(cell.text_bytes for cell in some),
            loss_sum=math.fsum(cell.loss_sum for cell in some),
        )

    yield total("all", "", cells)
    for source in sorted({cell.key[0] for cell in cells} - {""}):
        yield total("source", source, [cell for cell in cells if cell.key[0] == source])
    for bits in sorted({cell.key[1] for cell in cells}):
        label = f"{1 << bits >> 1}-{(1 << bits) - 1}"
        yield total("length", label, [cell for cell in cells if cell.key[1] == bits])


def _documents_of_rows(reader: RowReader, rows: np.ndarray) -> np.ndarray:
    """Return the document of each position, int64 [n, T]; in padding, that of the row's last one."""
    pack = reader.pack
    found = np.empty((rows.size, reader.seq_len), np.int64)
    first, end = pack.row_offsets[rows], pack.row_offsets[rows + 1]
    slices = np.repeat(first, end - first) + concat_aranges(end - first)
    lengths = pack.length[slices].astype(np.int64)
    documents = np.repeat(pack.document[slices].astype(np.int64), lengths)
    used = np.add.reduceat(lengths, np.append(0, np.cumsum(end - first)[:-1])) if rows.size else lengths
    begin = 0
    for row, n in enumerate(used.tolist()):
        found[row, :n] = documents[begin : begin + n]
        found[row, n:] = documents[begin + n - 1]
        begin += n
    return found


def _text_bytes_by_group(store: TokenStore, groups: DocumentGroups, rank: int, world_size: int) -> list[int]:
    """Return the UTF-8 bytes of the text of this rank's share of the documents, by group."""
    tokenizer, found = store.tokenizer(), [0] * len(groups.keys)
    for index in range(rank, store.n_documents, world_size):
        text = tokenizer.decode(store.document(index), skip_special_tokens=True)
        found[int(groups.of_document[index])] += len(text.encode())
    return found


@dataclass(frozen=True, kw_only=True)
class StoreResult:
    """Losses over a validation set, in the form of a task's result (`tasks.TaskResult`)."""

    task: str
    """Name of the set."""
    losses: tuple[GroupLoss, ...]

    @property
    def n_items(self) -> int:
        """Documents."""
        return self.losses[0].documents

    @property
    def metrics(self) -> dict[str, float]:
        """loss, perplexity and bits_per_byte of the whole set."""
        values = self.losses[0].to_dict()
        return {name: values[name] for name in ("loss", "perplexity", "bits_per_byte")}

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The whole, then each group."""
        return tuple(loss.to_dict() for loss in self.losses)
