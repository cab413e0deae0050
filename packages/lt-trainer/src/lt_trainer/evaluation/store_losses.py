"""Loss over a held-out store: of the whole, by source file and by document length.

The rows are those of validation (`data.validation_batches`): a document longer than a row is cut, every token but a
document's first has a label, and each rank has equally many batches. A position belongs to the document of its slice in
the pack, and a document to its source file and to a range of lengths between powers of two. Each rank adds up its own
positions by group in float64; the sums of all ranks are exchanged once at the end.

Cost: one forward pass over the store; memory for two numbers per document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lt_data import RowReader, TokenStore
from lt_trainer.data.training_data import text_bytes, validation_batches, validation_rows
from lt_trainer.evaluation.scorer import BatchShape, Scorer

RECORD_BITS = 40
"""Bits of the record in a document's source; those above are the index of its file."""
LENGTH_BITS = 64
"""Numbers of bits that a document's length may have."""
MAX_LOSS_FOR_EXP = 700.0


def evaluate_store(
    scorer: Scorer,
    reader: RowReader,
    shape: BatchShape,
    *,
    name: str,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return the loss over all rows of a reader: of the whole, then by source, then by length; collective.

    Args:
        scorer: Model of this rank.
        reader: Rows of the store, of `shape.seq_len` positions.
        shape: Shape of every batch.
        name: Name of the store in the results.
        on_batch: Called with the number of this rank's batches that are done, and of all.

    Returns:
        A dict for each group of documents: `store`, `group` ("all", "source" or "length"), `name` (source file, or
        range of lengths in tokens such as "256-511"), `documents`, `tokens` (positions with a label), `loss_sum`
        (nats), `loss` (nats per token), `perplexity`; that of the whole also has `text_bytes` and `bits_per_byte`.
    """
    assert reader.seq_len == shape.seq_len
    topology, pack = scorer.topology, reader.pack
    keys, group_of_document = _group_documents(reader.store)
    sums, tokens = np.zeros(len(keys)), np.zeros(len(keys), np.int64)
    n_batches = -(-reader.n_rows // (shape.micro_batch_size * topology.dp_size))
    batches = validation_batches(reader, topology, shape.micro_batch_size)
    row_numbers = validation_rows(reader.n_rows, topology, shape.micro_batch_size)
    for done, (batch, rows) in enumerate(zip(batches, row_numbers, strict=True), start=1):
        scores = scorer.score(batch)
        groups = np.zeros(batch.labels.shape[1:], np.int64)
        for index, row in enumerate(rows.tolist()):
            slices = slice(*pack.row_offsets[row : row + 2].tolist())
            documents = np.repeat(pack.document[slices].astype(np.int64), pack.length[slices].astype(np.int64))
            groups[index, : documents.size] = group_of_document[documents]
        reported = scores.is_reported[0]
        sums -= np.bincount(groups[reported], weights=scores.log_probs[0][reported], minlength=len(keys))
        tokens += np.bincount(groups[reported], minlength=len(keys))
        on_batch(done, n_batches)
    parts = scorer.control.all_gather([sums.tolist(), tokens.tolist()])
    n_documents = np.bincount(group_of_document, minlength=len(keys))

    def total(group: str, label: str, chosen: Sequence[int]) -> dict[str, Any]:
        loss_sum = math.fsum(part[0][i] for part in parts for i in chosen)
        n_tokens = sum(part[1][i] for part in parts for i in chosen)
        loss = loss_sum / n_tokens if n_tokens else math.nan
        found = {"store": name, "group": group, "name": label, "documents": int(n_documents[list(chosen)].sum())}
        perplexity = math.exp(min(loss, MAX_LOSS_FOR_EXP))
        return {**found, "tokens": n_tokens, "loss_sum": loss_sum, "loss": loss, "perplexity": perplexity}

    whole = total("all", "", range(len(keys)))
    n_bytes = text_bytes(reader.store)
    bits_per_byte = whole["loss_sum"] / math.log(2) / n_bytes if n_bytes else math.nan
    losses = [{**whole, "text_bytes": n_bytes, "bits_per_byte": bits_per_byte}]
    for source in sorted({source for source, _ in keys} - {""}):
        losses.append(total("source", source, [i for i, key in enumerate(keys) if key[0] == source]))
    for bits in sorted({bits for _, bits in keys}):
        label = f"{1 << bits >> 1}-{(1 << bits) - 1}"
        losses.append(total("length", label, [i for i, key in enumerate(keys) if key[1] == bits]))
    return losses


def files_of_documents(store: TokenStore) -> np.ndarray:
    """Return the index of each document's source file, int64 [n_documents]; 0 without known sources."""
    if not (store.has_sources and store.n_documents):
        return np.zeros(store.n_documents, np.int64)
    shards = [store.shard_sources(number) for number in range(len(store.manifest.shards))]
    return np.concatenate([part >> np.uint64(RECORD_BITS) for part in shards if part is not None]).astype(np.int64)


def _group_documents(store: TokenStore) -> tuple[list[tuple[str, int]], np.ndarray]:
    """Return source file and bits of the length of each group that occurs, and the group of each document, int64 [n].

    Without known sources all documents are of the source "".
    """
    bits = np.frexp(store.lengths.astype(np.float64))[1].astype(np.int64)
    names = [file.path for file in store.source_files] if store.has_sources else [""]
    found, of_document = np.unique(files_of_documents(store) * LENGTH_BITS + bits, return_inverse=True)
    return [(names[int(key) // LENGTH_BITS], int(key) % LENGTH_BITS) for key in found], of_document.reshape(-1)
