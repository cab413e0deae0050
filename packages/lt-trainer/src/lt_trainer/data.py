"""What a run reads, from the recipe's data section: stores opened and checked, streams over them, and step batches.

Costs nothing at start: stores and packs are memory-mapped, no index is built. (A validation store that was made from
ids is decoded once, for the bytes of its text.)

Shapes: M micro-batches, B rows per micro-batch, T positions per row; a stream's rows come as [M * B, T].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_data import Buckets, Mixture, Phase, RowReader, Rows, Stream, StreamState, TokenStore, open_pack
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import RecipeError
from lt_trainer.loader_factory import find_factory
from lt_trainer.sections import DataOptions
from lt_trainer.synthetic import SyntheticRows

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

    Rows to train on (None where a loader of the user's own gives them), the sets to validate on, and the vocabulary
    that all were made with.
    """

    train: RowReader | Mixture | Buckets | SyntheticRows | None
    validation: tuple[ValidationSet, ...]
    vocab_size: int
    tokenizer_files: dict[str, bytes]
    """Empty where no store has a tokenizer."""


def open_data(recipe: Recipe) -> TrainingData:
    """Open and check the stores that a recipe names.

    Raises:
        RecipeError: the vocabulary, the tokenizer or the stores do not agree.
        DataError: a store or a pack is missing or damaged, or a mixture's weights are wrong.
    """
    data = recipe.data
    if data.loader:
        find_factory(data.loader)  # what is not there is said before anything is loaded
    stores = _open_stores(data)
    first = next(iter(stores.values()), None)
    vocab_size = recipe.model.vocab_size if first is None else _vocab_size(recipe, first)
    train = None
    if data.kind == "synthetic":
        train = SyntheticRows(vocab_size=vocab_size, seq_len=data.seq_len, seed=recipe.run.seed)
    elif data.kind == "mixture":
        readers = {name: _reader(data, stores[f"data.mixture.{name}.store"]) for name in data.mixture}
        most = {name: source.max_epochs for name, source in data.mixture.items() if source.max_epochs}
        train = Mixture(readers, [Phase(**phase) for phase in _phases(recipe)], max_epochs=most)
    elif data.kind == "store" and data.pack == "buckets":
        store = stores["data.store"]
        train = Buckets(
            store,
            open_pack(store, seq_len=data.seq_len, mode="buckets", shortest=data.shortest),
            global_batch=recipe.batch.global_batch,
            weights=[Phase(**phase) for phase in _phases(recipe)] if data.bucket_weights else None,
            document_mask=data.document_mask,
        )
    elif data.kind == "store":
        train = _reader(data, stores["data.store"])
    return TrainingData(
        train=train,
        validation=tuple(_validation_sets(data, stores)),
        vocab_size=vocab_size,
        tokenizer_files={} if first is None else dict(first.tokenizer().files),
    )


def _open_stores(data: DataOptions) -> dict[str, TokenStore]:
    """Every store that the section names, by the name of its field, all of one tokenizer."""
    paths = {"data.store": data.store}
    paths |= {f"data.mixture.{name}.store": source.store for name, source in data.mixture.items()}
    paths |= {"data.validation": data.validation}
    paths |= {f"data.validation_sets.{name}.store": one.store for name, one in data.validation_sets.items()}
    stores = {name: TokenStore.open(path) for name, path in paths.items() if path}
    if not stores:
        return {}
    first = next(iter(stores))
    for name, store in stores.items():
        if store.manifest.tokenizer.sha256 != stores[first].manifest.tokenizer.sha256:
            raise RecipeError(
                f"was made with another tokenizer than {first} = {paths[first]!r}",
                values={name: paths[name]},
                remedy="prepare both with the same tokenizer",
            )
    tokenizer = stores[first].manifest.tokenizer
    # The default name asks for nothing: a recipe written out with all its values must load again.
    if data.tokenizer not in (DataOptions.tokenizer, tokenizer.name, tokenizer.sha256):
        raise RecipeError(
            f"{paths[first]} was made with the tokenizer {tokenizer.name!r} (sha256 {tokenizer.sha256})",
            values={"data.tokenizer": data.tokenizer},
            remedy="leave data.tokenizer (TOKENIZER) out, since the store carries its own, or prepare the data "
            "with the tokenizer that you mean",
        )
    return stores


def _vocab_size(recipe: Recipe, store: TokenStore) -> int:
    """Ids of a store's tokenizer, which must be those of the recipe; a model may have rows to spare."""
    given, found = recipe.model.vocab_size, store.vocab_size
    if given and given != found and not (recipe.model.init_from and given > found):
        raise RecipeError(
            f"does not fit the tokenizer of {store.path}, which has {found} ids",
            values={"model.vocab_size": given},
            remedy="leave model.vocab_size (VOCAB_SIZE) out to take the store's, or prepare the data with the "
            "tokenizer that you mean",
        )
    return found


def _reader(data: DataOptions, store: TokenStore) -> RowReader:
    """Rows of one store, of seq_len positions all."""
    mode = "bfd" if data.pack == "buckets" else data.pack
    return RowReader(store, open_pack(store, seq_len=data.seq_len, mode=mode), document_mask=data.document_mask)


def _validation_sets(data: DataOptions, stores: Mapping[str, TokenStore]) -> Iterator[ValidationSet]:
    """The sets to validate on, data.validation first."""
    fields = {"": "data.validation", **{name: f"data.validation_sets.{name}.store" for name in data.validation_sets}}
    for name, field in fields.items():
        if field in stores:
            store = stores[field]
            yield ValidationSet(name=name, reader=_reader(data, store), text_bytes=text_bytes(store))


def text_bytes(store: TokenStore) -> int:
    """UTF-8 bytes of a store's text, which bits per byte are over.

    The manifest knows them where the store was made from text. A store that was made from ids knows no text: its
    documents are decoded without special tokens, which takes about a second for a million tokens.
    """
    if store.manifest.text_bytes or not store.n_documents:
        return store.manifest.text_bytes
    tokenizer = store.tokenizer()
    return sum(len(tokenizer.decode(store.document(i), skip_special=True).encode()) for i in range(store.n_documents))


def _phases(recipe: Recipe) -> list[dict[str, Any]]:
    """The phases of the weights as `lt_data.Phase` takes them; a phase that is counted in steps begins with its row."""
    ramp, batch = recipe.batch.grows(recipe.data.seq_len), recipe.batch.global_batch
    phases = recipe.data.phases(lambda step: batch * step if ramp is None else ramp.rows_before(step))
    return [{"from_row": row, "weights": weights} for row, weights in phases]


def position_facts(recipe: Recipe) -> dict[str, Any]:
    """What, beside the position, says which rows a step reads: for the event `data` (lt_data.looking.run_files)."""
    data, ramp = recipe.data, recipe.batch.grows(recipe.data.seq_len)
    facts: dict[str, Any] = {} if ramp is None else {"ramp": ramp.to_json()}
    if data.kind == "mixture":
        sources = data.mixture.items()
        facts["rows"] = {
            "kind": "mixture",
            "stores": {name: source.store for name, source in sources},
            "phases": _phases(recipe),
            "max_epochs": {name: source.max_epochs for name, source in sources if source.max_epochs},
        }
    elif data.pack == "buckets" and data.kind == "store":
        phases = _phases(recipe) if data.bucket_weights else []
        facts["rows"] = {"kind": "buckets", "store": data.store, "shortest": data.shortest, "phases": phases}
    elif data.kind == "synthetic":
        facts["rows"] = {"kind": "synthetic"}
    elif data.kind == "loader":
        facts["rows"] = {"kind": "loader", "loader": data.loader}
    return facts


def position(saved: Mapping[str, Any]) -> StreamState:
    """The position in a checkpoint's data state, which may hold more beside it.

    Raises:
        DataError: it is not the state of a stream.
    """
    return StreamState.from_json({name: value for name, value in saved.items() if name != "loader"})


def open_stream(recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None) -> Stream:
    """The deterministic stream of this rank's rows, from the start or from a checkpoint's state."""
    assert data.train is not None, "a loader's rows are in no stream"
    return Stream(
        data.train,
        global_batch=recipe.batch.global_batch,
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        state=state,
        ramp=recipe.batch.grows(recipe.data.seq_len),
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


def step_batch(batch: StreamBatch, micro_batch: int, seq_len: int = 0) -> StepBatch:
    """This rank's rows of one step as a step batch.

    Args:
        batch: of a stream.
        micro_batch: rows of a micro-batch.
        seq_len: positions of such a row; of shorter ones a micro-batch has as many more as make up for it.
    """
    shorter = max(1, seq_len // batch.rows.input_ids.shape[1])
    return micro_batches(batch.rows, micro_batch * shorter, batch.valid_tokens)


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
