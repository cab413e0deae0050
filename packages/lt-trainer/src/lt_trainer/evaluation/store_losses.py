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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lt_data import RowReader, TokenStore
from lt_data.packing.algorithms import concat_aranges
from lt_trainer.data.training_data import text_bytes, validation_batches, validation_rows
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer, TaskResult

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


class StoreGroups:
    """Groups of a store's documents by source file and range of lengths; those that occur.

    Args:
        store: The store; without known sources all documents are of the source "".
        rank: This rank, of `world_size`: it decodes every `world_size`-th document.

    Attributes:
        keys: Source file of each group, and the number of bits of its documents' lengths.
        of_document: Index in `keys` of each document, int64 [n_documents].
    """

    def __init__(self, store: TokenStore, rank: int, world_size: int) -> None:
        self.store, self._rank, self._world_size = store, rank, world_size
        lengths = store.lengths.astype(np.int64)
        bits = np.zeros(lengths.size, np.int64)
        bits[lengths > 0] = np.floor(np.log2(lengths[lengths > 0])).astype(np.int64) + 1
        files, names = np.zeros(lengths.size, np.int64), [""]
        if store.has_sources and store.n_documents:
            shards = [store.shard_sources(number) for number in range(len(store.manifest.shards))]
            files = np.concatenate([part >> np.uint64(RECORD_BITS) for part in shards if part is not None])
            names = [file.path for file in store.source_files]
        found, of_document = np.unique(files.astype(np.int64) * 64 + bits, return_inverse=True)
        self.keys = [(names[int(key) // 64], int(key) % 64) for key in found]
        self.of_document = of_document.reshape(-1)

    @cached_property
    def n_bytes(self) -> list[int]:
        """UTF-8 bytes of the text of this rank's share of the documents, by group."""
        tokenizer, found = self.store.tokenizer(), [0] * len(self.keys)
        for index in range(self._rank, self.store.n_documents, self._world_size):
            text = tokenizer.decode(self.store.document(index), skip_special_tokens=True)
            found[int(self.of_document[index])] += len(text.encode())
        return found


def evaluate_store(
    scorer: Scorer,
    reader: RowReader,
    groups: StoreGroups,
    shape: BatchShape,
    *,
    name: str,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[GroupLoss]:
    """Return the loss over all rows of a reader: of the whole, then by source, then by length; collective.

    Args:
        scorer: Model of this rank.
        reader: Rows of the store, of `shape.seq_len` positions.
        groups: Groups of the store's documents.
        shape: Shape of every batch.
        name: Name of the store in the results.
        on_batch: Called with the number of this rank's batches that are done, and of all.

    Raises:
        EvaluationError: the store has no label.
    """
    assert reader.seq_len == shape.seq_len
    topology, n_groups = scorer.topology, len(groups.keys)
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
    parts = scorer.control.all_gather([sums.tolist(), tokens.tolist(), groups.n_bytes])
    documents, whole = np.bincount(groups.of_document, minlength=n_groups), text_bytes(reader.store)

    def total(group: str, label: str, chosen: list[int]) -> GroupLoss:
        return GroupLoss(
            store=name,
            group=group,
            name=label,
            documents=int(documents[chosen].sum()),
            tokens=sum(part[1][i] for part in parts for i in chosen),
            text_bytes=whole if group == "all" else sum(part[2][i] for part in parts for i in chosen),
            loss_sum=math.fsum(part[0][i] for part in parts for i in chosen),
        )

    losses = [total("all", "", list(range(n_groups)))]
    if not losses[0].tokens:
        raise EvaluationError(f"{name} has no label: its documents have at most one token; prepare longer ones")
    for source in sorted({source for source, _ in groups.keys} - {""}):
        losses.append(total("source", source, [i for i, key in enumerate(groups.keys) if key[0] == source]))
    for bits in sorted({bits for _, bits in groups.keys}):
        label = f"{1 << bits >> 1}-{(1 << bits) - 1}"
        losses.append(total("length", label, [i for i, key in enumerate(groups.keys) if key[1] == bits]))
    return losses


def store_result(name: str, losses: list[GroupLoss]) -> TaskResult:
    """Return the losses over a validation set in the form of a task's result: loss, perplexity and bits per byte."""
    items = tuple(loss.to_dict() for loss in losses)
    metrics = {metric: items[0][metric] for metric in ("loss", "perplexity", "bits_per_byte")}
    return TaskResult(task=name, n_items=losses[0].documents, metrics=metrics, items=items)


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
