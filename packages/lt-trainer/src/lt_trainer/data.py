"""From the recipe's data section to step batches.

Opens stores and packs, checks them against the recipe, and cuts a stream's rows into micro-batches.

Costs nothing at start: the store and the pack are memory-mapped, no index is built.

Shapes: M micro-batches, B rows per micro-batch, T positions per row; a stream's rows come as [M * B, T].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lt_data import RowReader, Rows, Stream, StreamState, TokenStore, open_pack
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import RecipeError
from lt_trainer.sections import DataOptions

if TYPE_CHECKING:
    from lt_data import StreamBatch
    from lt_trainer.recipe import Recipe

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Rows to validate on; all of them are read each time."""

    name: str
    """That of its section in the recipe; "" for data.validation."""
    reader: RowReader
    text_bytes: int
    """UTF-8 bytes of the text behind all rows."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a run reads.

    Rows to train on, the sets to validate on, and the vocabulary that all were made with.
    """

    train: RowReader
    validation: tuple[ValidationSet, ...]
    vocab_size: int
    tokenizer_files: dict[str, bytes]


def open_data(recipe: Recipe) -> TrainingData:
    """Open and check the stores that a recipe names.

    Raises:
        RecipeError: the vocabulary, the tokenizer or the two stores do not agree.
        DataError: a store or a pack is missing or damaged.
    """
    data = recipe.data
    store = TokenStore.open(data.store)
    given, found = recipe.model.vocab_size, store.vocab_size
    if given and given != found and not (recipe.model.init_from and given > found):
        raise RecipeError(
            f"does not fit the tokenizer of {data.store}, which has {found} ids",
            values={"model.vocab_size": given},
            remedy="leave model.vocab_size (VOCAB_SIZE) out to take the store's, or prepare the data with the "
            "tokenizer that you mean",
        )
    tokenizer = store.manifest.tokenizer
    # The default name asks for nothing: a recipe written out with all its values must load again.
    if data.tokenizer not in (DataOptions.tokenizer, tokenizer.name, tokenizer.sha256):
        raise RecipeError(
            f"{data.store} was made with the tokenizer {tokenizer.name!r} (sha256 {tokenizer.sha256})",
            values={"data.tokenizer": data.tokenizer},
            remedy="leave data.tokenizer (TOKENIZER) out, since the store carries its own, or prepare the data "
            "with the tokenizer that you mean",
        )
    train = RowReader(store, open_pack(store, seq_len=data.seq_len, mode=data.pack), document_mask=data.document_mask)
    return TrainingData(
        train=train,
        validation=_open_validation(data, tokenizer.sha256),
        vocab_size=found,
        tokenizer_files=dict(store.tokenizer().files),
    )


def _open_validation(data: DataOptions, tokenizer_sha256: str) -> tuple[ValidationSet, ...]:
    """The sets to validate on, data.validation first."""
    named = {name: (f"data.validation_sets.{name}.store", entry.store) for name, entry in data.validation_sets.items()}
    first = {"": ("data.validation", data.validation)} if data.validation else {}
    found: list[ValidationSet] = []
    for name, (option, path) in (first | named).items():
        store = TokenStore.open(path)
        if store.manifest.tokenizer.sha256 != tokenizer_sha256:
            raise RecipeError(
                f"was made with another tokenizer than data.store = {data.store!r}",
                values={option: path},
                remedy="prepare both with the same tokenizer",
            )
        pack = open_pack(store, seq_len=data.seq_len, mode=data.pack)
        reader = RowReader(store, pack, document_mask=data.document_mask)
        found.append(ValidationSet(name=name, reader=reader, text_bytes=text_bytes(store)))
    return tuple(found)


def text_bytes(store: TokenStore) -> int:
    """UTF-8 bytes of a store's text, which bits per byte are over.

    The manifest knows them where the store was made from text. A store that was made from ids knows no text: its
    documents are decoded without special tokens, which takes about a second for a million tokens.
    """
    if store.manifest.text_bytes or not store.n_documents:
        return store.manifest.text_bytes
    tokenizer = store.tokenizer()
    return sum(len(tokenizer.decode(store.document(i), skip_special=True).encode()) for i in range(store.n_documents))


def open_stream(recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None) -> Stream:
    """The deterministic stream of this rank's rows, from the start or from a checkpoint's state."""
    return Stream(
        data.train,
        global_batch=recipe.batch.global_batch,
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        state=state,
    )


def micro_batches(rows: Rows, micro_batch: int, valid_tokens: int) -> StepBatch:
    """View rows [M * B, T] as a step batch [M, B, T]."""
    n, seq_len = rows.input_ids.shape
    assert n % micro_batch == 0, (n, micro_batch)
    shape = (n // micro_batch, micro_batch, seq_len)
    return StepBatch(
        input_ids=rows.input_ids.reshape(shape),
        labels=rows.labels.reshape(shape),
        position_ids=rows.position_ids.reshape(shape),
        doc_ids=rows.doc_ids.reshape(shape),
        valid_tokens=valid_tokens,
    )


def step_batch(batch: StreamBatch, micro_batch: int) -> StepBatch:
    """This rank's rows of one step as a step batch."""
    return micro_batches(batch.rows, micro_batch, batch.valid_tokens)


def validation_batches(reader: RowReader, topology: Topology, micro_batch: int) -> Iterator[StepBatch]:
    """Every row of `reader` exactly once over all ranks, as batches [1, B, T], the same number on every rank.

    Row r belongs to rank r % dp_size. Where rows run out, a batch is filled with rows without any label: they cost time
    and add nothing, but no rank is left waiting in a collective for one that has finished.
    """
    per_round = micro_batch * topology.dp_size
    for start in range(0, reader.n_rows, per_round):
        mine = np.arange(
            start + topology.dp_rank, min(start + per_round, reader.n_rows), topology.dp_size, dtype=np.int64
        )
        rows = reader.gather(mine)
        short = micro_batch - len(mine)
        if short:
            rows = Rows(
                input_ids=_pad(rows.input_ids, short, 0),
                labels=_pad(rows.labels, short, IGNORE),
                position_ids=_pad(rows.position_ids, short, 0),
                doc_ids=_pad(rows.doc_ids, short, -1),
            )
        yield micro_batches(rows, micro_batch, int((rows.labels != IGNORE).sum()))


def _pad(array: np.ndarray, rows: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full((rows, array.shape[1]), value, array.dtype)])
