"""Generations of the stores of a run: it goes on with those that its checkpoint has read.

A store that was appended to opens as its newest generation. Each checkpoint records the fingerprints of the stores, and
a run that resumes reads these generations again, whatever was appended since. Only a recipe that names a generation
(`STORE/generations/N`) changes that: from the checkpoint's position on, the rows are drawn from the named generation,
so a row that was read before may be read again. Everything else about the sequence must be as it was.

Cost: one read of each generation's manifest; on such a change, the packs of both generations are opened.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lt_data.streaming.stream import StreamState, sequence_fingerprint
from lt_trainer.config.sections import Recipe
from lt_trainer.data import training_data
from lt_trainer.data.training_data import TrainingData


def reopen_data(recipe: Recipe, data: TrainingData, saved: Mapping[str, Any] | None) -> TrainingData:
    """Return the data as a checkpoint has read it: the same if its stores are the same.

    Raises:
        DataError: see `open_data`.
    """
    read = (saved or {}).get(training_data.STORES, {})
    return data if data.fingerprints.items() >= read.items() else training_data.open_data(recipe, read=read)


def changed_generations(
    recipe: Recipe, data: TrainingData, saved: Mapping[str, Any] | None
) -> dict[str, tuple[str, str]]:
    """Return the generation that a checkpoint has read and the one of `data`, by field, where they differ."""
    read = (saved or {}).get(training_data.STORES, {})
    before = training_data.generation_paths(recipe.data, read, follow_names=False)
    return {
        field: (before[field], path)
        for field, path in data.paths.items()
        if field in read and before[field] != path and read[field] != data.fingerprints[field]
    }


def resume_state(recipe: Recipe, data: TrainingData, saved: Mapping[str, Any]) -> StreamState:
    """Return the position in a checkpoint's data state, in the rows of `data`.

    Raises:
        DataError: not the state of a stream.
    """
    state = training_data.parse_stream_state(saved)
    if data.train is None or not changed_generations(recipe, data, saved):
        return state
    stores = training_data.open_stores(
        recipe.data, training_data.generation_paths(recipe.data, saved[training_data.STORES], follow_names=False)
    )
    was, now = (
        sequence_fingerprint(rows, shuffle=recipe.data.shuffle, position=state.row)
        for rows in (training_data.open_rows(recipe, stores, data.vocab_size), data.train)
        if rows is not None
    )
    # if more than a generation changed, the stream names the differences
    return replace(state, fingerprint=now) if was == state.fingerprint else state
