"""Training and validation data of a run: checked stores, streams over them, and step batches.

Free at start: stores and packs are memory-mapped, no index is built. (A validation store that was prepared from ids is
decoded once to count the bytes of its text.)

Shapes: M micro-batches, B rows per micro-batch, T positions per row; a stream's rows are [M * B, T].
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lt_data import Mixture, Phase, RowReader, Stream, Tokenizer, TokenStore, open_pack
from lt_data.store.generations import locate_generation, names_generation
from lt_data.streaming.rows import Rows
from lt_data.streaming.stream import StreamState
from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.sections import Recipe
from lt_trainer.data.document_boundaries import micro_batch_cu_seqlens
from lt_trainer.data.loader_factory import import_loader_factory
from lt_trainer.data.synthetic import SyntheticRows
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import RecipeError, as_recipe_error
from lt_trainer.toml import format_value

IGNORE_INDEX = -100
ROW_FIELDS = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "doc_ids": -1}
"""Arrays of rows, with what padding has there."""
STORES = "stores"
"""Key of a checkpoint's data state: the fingerprint of each store, by field of the recipe."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Validation rows, the same each time."""

    name: str
    """Name of its section in the recipe; "" for data.validation."""
    reader: RowReader
    rows: np.ndarray
    """Numbers of the rows that are evaluated, ascending (int64)."""
    text_bytes: int
    """UTF-8 bytes of the text of these rows: those of the whole set, by the share of labels."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Opened data of a recipe: training rows (None with a custom loader), validation sets, vocabulary."""

    train: RowReader | Mixture | SyntheticRows | None
    validation: tuple[ValidationSet, ...]
    vocab_size: int
    tokenizer_files: dict[str, bytes]
    """Empty without a store."""
    fingerprints: dict[str, str]
    """Fingerprint of each store, by field of the recipe."""
    paths: dict[str, str]
    """Path of each store, by field; that of a generation where an older one is read than its store opens as."""


def open_data(recipe: Recipe, *, read: Mapping[str, str] | None = None) -> TrainingData:
    """Open and check the stores of a recipe.

    Args:
        recipe: recipe.
        read: fingerprint of each store that the run has read, by field (lt_trainer.data.generations).

    Raises:
        RecipeError: vocabulary, tokenizer or stores are inconsistent.
        DataError: a store or pack is missing or damaged, or the weights of a mixture are invalid.
    """
    data = recipe.data
    if data.loader:
        import_loader_factory(data.loader)  # fail before anything is loaded
    paths = generation_paths(data, read or {})
    stores = open_stores(data, paths)
    first = next(iter(stores.values()), None)
    if first is not None:
        _check_tokenizer(recipe, first)
    vocab_size = recipe.model.vocab_size if first is None else first.vocab_size
    sets = {"data.validation": "", **{f"data.validation_sets.{name}.store": name for name in data.validation_sets}}
    sets = {name: stores[field] for field, name in sets.items() if field in stores}
    return TrainingData(
        train=open_rows(recipe, stores, vocab_size),
        validation=tuple(_validation_set(recipe, name, store, len(sets)) for name, store in sets.items()),
        vocab_size=vocab_size,
        tokenizer_files={} if first is None else dict(first.tokenizer().files),
        fingerprints={field: store.manifest.fingerprint for field, store in stores.items()},
        paths=paths,
    )


def open_rows(
    recipe: Recipe, stores: Mapping[str, TokenStore], vocab_size: int
) -> RowReader | Mixture | SyntheticRows | None:
    """Open the training rows of a recipe, of open stores by field; None with a custom loader.

    Raises:
        DataError: a pack is missing or damaged, or the weights of a mixture are invalid.
    """
    data = recipe.data
    if data.source_kind == "synthetic":
        return SyntheticRows(vocab_size=vocab_size, seq_len=data.seq_len, seed=recipe.run.seed)
    if data.source_kind == "mixture":
        fields = {name: f"data.mixture.{name}.store" for name in data.mixture}
        readers = {name: _reader(data, stores[field], field) for name, field in fields.items()}
        max_epochs = {name: source.max_epochs for name, source in data.mixture.items() if source.max_epochs}
        ramp, batch = recipe.batch.batch_ramp(data.seq_len), recipe.batch.global_batch_size
        phases = data.weight_phases(lambda step: batch * step if ramp is None else ramp.rows_before(step))
        weights = [Phase(from_row=row, weights=weights) for row, weights in phases]
        return Mixture(readers, weights, max_epochs=max_epochs)
    return _reader(data, stores["data.store"], "data.store") if data.source_kind == "store" else None


def generation_paths(data: DataOptions, read: Mapping[str, str], *, follow_names: bool = True) -> dict[str, str]:
    """Return the path of each store by field: of the generation that was read, if it is not the newest.

    Args:
        data: section of the recipe.
        read: fingerprint of each store that was read, by field.
        follow_names: keep the paths that name a generation.
    """
    paths = data.store_paths()
    for field, path in paths.items():
        if field in read and not path.startswith("s3://") and not (follow_names and names_generation(path)):
            generation = locate_generation(path, read[field])
            if generation is not None and TokenStore(path).manifest.fingerprint != read[field]:
                paths[field] = str(generation)
    return paths


def open_stores(data: DataOptions, paths: Mapping[str, str]) -> dict[str, TokenStore]:
    """Return all stores by field, checked to have the same tokenizer.

    Raises:
        RecipeError: a store cannot be read, or has another tokenizer; names its field.
    """
    stores: dict[str, TokenStore] = {}
    for name, path in paths.items():
        with as_recipe_error(path, name):
            stores[name] = TokenStore(path, packs=data.packs)
    first = next(iter(stores), "")
    for name, store in stores.items():
        if store.manifest.tokenizer.sha256 != stores[first].manifest.tokenizer.sha256:
            problem = f"prepared with another tokenizer than {first} = {format_value(paths[first])}"
            raise RecipeError(problem, values={name: paths[name]}, remedy="prepare both with the same tokenizer")
    return stores


def _check_tokenizer(recipe: Recipe, store: TokenStore) -> None:
    """Raise RecipeError if the recipe names another tokenizer: by its name, the hash of its files, or their path."""
    tokenizer, name = store.manifest.tokenizer, recipe.data.tokenizer
    # The default name stands for every store's.
    if name in (DataOptions().tokenizer, tokenizer.name, tokenizer.sha256):
        return
    found = ""
    if os.path.exists(name):
        with as_recipe_error(name, "data.tokenizer"):
            loaded = Tokenizer.load(name)
        if loaded.sha256 == tokenizer.sha256:
            return
        found = f", not with that of this path (sha256 {loaded.sha256})"
    problem = f"{store.path} was prepared with the tokenizer {tokenizer.name!r} (sha256 {tokenizer.sha256}){found}"
    remedy = "remove data.tokenizer (TOKENIZER) to use the store's, or prepare the data with this tokenizer"
    raise RecipeError(problem, values={"data.tokenizer": name}, remedy=remedy)


def _reader(data: DataOptions, store: TokenStore, field: str) -> RowReader:
    """Return the rows of the store of a field, all of seq_len positions."""
    with as_recipe_error(str(store.path), field):
        pack = open_pack(store, seq_len=data.seq_len, mode=data.packing)
    return RowReader(store, pack, document_mask=data.document_mask)


def _validation_set(recipe: Recipe, name: str, store: TokenStore, n_sets: int) -> ValidationSet:
    """Open a validation set, or a part of it that depends on the recipe alone.

    The part is the beginning of a random order of the rows that is the same for every run. By default all sets together
    have a tenth of the positions trained on between two validations: a forward pass over them takes about a thirtieth
    of that time.
    """
    field = f"data.validation_sets.{name}.store" if name else "data.validation"
    reader = _reader(recipe.data, store, field)
    n_tokens, steps = recipe.metrics.validation_tokens, recipe.schedule.max_steps
    if not n_tokens:
        interval = min(recipe.metrics.validation_interval or steps, steps)
        n_tokens = interval * recipe.batch.global_batch_size * reader.seq_len // (10 * n_sets)
    n_rows = reader.n_rows if n_tokens < 0 else min(reader.n_rows, max(1, -(-n_tokens // reader.seq_len)))
    rows = np.sort(reader.rows_at(0, n_rows, seed=0, shuffle=True))
    n_labels = reader.count_labels(rows)
    if not n_labels and reader.n_rows:
        raise RecipeError(
            f"no position of the {rows.size} rows that validation{f' {name}' if name else ''} reads has a label",
            values={"metrics.validation_tokens": recipe.metrics.validation_tokens},
            remedy="set it higher, or to -1 for all rows",
        )
    share = n_labels / max(1, int(reader.valid.sum(dtype=np.int64)))
    return ValidationSet(name=name, reader=reader, rows=rows, text_bytes=round(text_bytes(store) * share))


def text_bytes(store: TokenStore) -> int:
    """Return the UTF-8 bytes of a store's text, for bits per byte.

    The manifest has them if the store was prepared from text. Otherwise the documents are decoded without special
    tokens, about a second per million tokens.
    """
    if store.manifest.text_bytes or not store.n_documents:
        return store.manifest.text_bytes
    tokenizer = store.tokenizer()
    documents = (store[i] for i in range(store.n_documents))
    return sum(len(tokenizer.decode(ids, skip_special_tokens=True).encode()) for ids in documents)


def parse_stream_state(saved: Mapping[str, Any]) -> StreamState:
    """Return the position in a checkpoint's data state.

    Raises:
        DataError: not the state of a stream.
    """
    return StreamState.from_dict({name: value for name, value in saved.items() if name not in ("loader", STORES)})


def open_stream(recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None) -> Stream:
    """Open the deterministic stream of this rank's rows, at the start or at a checkpoint's state."""
    assert data.train is not None, "a custom loader has no stream"
    return Stream(
        data.train,
        global_batch_size=recipe.batch.global_batch_size,
        micro_batch_size=recipe.batch.micro_batch_size,
        ramp=recipe.batch.batch_ramp(recipe.data.seq_len),
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        state=state,
    )


def to_micro_batches(
    rows: Rows, starts: np.ndarray, max_segments_per_row: int, *, micro_batch_size: int, valid_tokens: int
) -> StepBatch:
    """View rows [M * B, T] as a step batch [M, B, T].

    Args:
        rows: all rows of this rank.
        starts: first positions of the documents in the flattened rows, ascending.
        max_segments_per_row: bound on the documents of a row, over all batches of the run.
        micro_batch_size: B.
        valid_tokens: positions with a label in the global batch.
    """
    n, seq_len = rows.input_ids.shape
    assert n % micro_batch_size == 0, (n, micro_batch_size)
    arrays = {name: getattr(rows, name).reshape(-1, micro_batch_size, seq_len) for name in ROW_FIELDS}
    n_micro, max_documents = n // micro_batch_size, micro_batch_size * max_segments_per_row
    n_tokens = micro_batch_size * seq_len
    bounds = micro_batch_cu_seqlens(starts, n_micro=n_micro, n_tokens=n_tokens, max_documents=max_documents)
    return StepBatch(**arrays, cu_seqlens=bounds, valid_tokens=valid_tokens)


def validation_rows(n_rows: int, topology: Topology, micro_batch_size: int) -> Iterator[np.ndarray]:
    """Yield the row numbers (int64) of this rank's batches; the last may have fewer."""
    per_round = micro_batch_size * topology.dp_size
    for start in range(0, n_rows, per_round):
        yield np.arange(start + topology.dp_rank, min(start + per_round, n_rows), topology.dp_size, dtype=np.int64)


def validation_batches(
    reader: RowReader, topology: Topology, micro_batch_size: int, rows: np.ndarray | None = None
) -> Iterator[StepBatch]:
    """Yield rows of `reader`, all by default, once over all ranks: equally many batches [1, B, T] on every rank.

    The r-th row belongs to rank r % dp_size. When rows run out, batches are padded with rows without labels: they cost
    time but do not change the sum, and no rank waits in a collective for one that has finished.
    """
    chosen = np.arange(reader.n_rows) if rows is None else rows
    for numbers in validation_rows(chosen.size, topology, micro_batch_size):
        tokens = reader.read_token_rows(chosen[numbers])
        padding = np.arange(len(numbers), micro_batch_size, dtype=np.int64)
        starts, found = np.append(tokens.segments()[0], padding * reader.seq_len), tokens.to_int32()
        padded = Rows(*(_pad(getattr(found, name), padding.size, value) for name, value in ROW_FIELDS.items()))
        n_labels = int((padded.labels != IGNORE_INDEX).sum())
        yield to_micro_batches(
            padded, starts, tokens.max_segments_per_row, micro_batch_size=micro_batch_size, valid_tokens=n_labels
        )


def _pad(array: np.ndarray, n_rows: int, value: int) -> np.ndarray:
    return np.pad(array, ((0, n_rows), (0, 0)), constant_values=value)
