"""How good the model is beside what counting alone reaches: validation loss against unigrams and bigrams.

The fair opponents have counted exactly the positions that the model was trained on; the strong ones have counted all
training data. Add-k smoothing with the best k of a small grid, chosen on the validation set, which favours the
opponent. Bits per byte divide the loss over the whole validation text by its bytes, so they compare across tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lt_data import NgramCounts, RowReader, Rows, Stream
from lt_data.looking.ngram import Order
from lt_trainer.quickstart.settings import Settings
from lt_trainer.quickstart.stages import Packed

ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Score:
    """One predictor on the validation set."""

    name: str
    nats_per_token: float
    bits_per_byte: float
    k: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The model and the counts on exactly the same validation positions."""

    model: Score
    baselines: tuple[Score, ...]
    seen_tokens: int
    validation_tokens: int

    @property
    def opponent(self) -> Score:
        """The baseline that must be beaten: bigrams over the positions that the model has seen."""
        (score,) = (score for score in self.baselines if score.name == "bigram, seen tokens")
        return score

    @property
    def beaten(self) -> bool:
        """Whether the model predicts better than its opponent."""
        return self.model.nats_per_token < self.opponent.nats_per_token


def seen_rows(rows: RowReader, settings: Settings, seed: int) -> np.ndarray:
    """Numbers of the rows that training has consumed, from the same stream."""
    stream = Stream(rows, global_batch=settings.global_batch, seed=seed)
    return stream.global_rows(stream.state, settings.steps * settings.global_batch)


def compare(
    train: Packed, validation: Packed, settings: Settings, *, seed: int, val_loss: float, val_tokens: int
) -> Comparison:
    """Count, and put the model's validation loss beside it."""
    evaluation = list(_blocks(validation.rows, np.arange(validation.rows.n_rows)))
    counted = sum(int((rows.labels != -100).sum()) for rows in evaluation)
    assert counted == val_tokens, f"the engine evaluated {val_tokens} positions, the validation set has {counted}"
    bits_per_byte = counted / math.log(2) / validation.store.manifest.text_bytes
    seen, everything = (NgramCounts(train.store.vocab_size) for _ in range(2))
    for rows in _blocks(train.rows, seen_rows(train.rows, settings, seed)):
        seen.add(rows)
    for rows in _blocks(train.rows, np.arange(train.rows.n_rows)):
        everything.add(rows)
    orders: dict[str, Order] = {"unigram": 1, "bigram": 2}
    scores = []
    for name, counts in (("seen tokens", seen), ("all training data", everything)):
        for kind, order in orders.items():
            k, nats = counts.best(evaluation, order)
            scores.append(Score(name=f"{kind}, {name}", nats_per_token=nats, bits_per_byte=nats * bits_per_byte, k=k))
    model = Score(name="model", nats_per_token=val_loss, bits_per_byte=val_loss * bits_per_byte)
    return Comparison(model=model, baselines=tuple(scores), seen_tokens=seen.n_pairs, validation_tokens=counted)


def _blocks(reader: RowReader, numbers: np.ndarray) -> Iterator[Rows]:
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        yield reader.gather(numbers[start : start + ROWS_AT_ONCE])
