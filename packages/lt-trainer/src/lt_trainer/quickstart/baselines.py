"""N-gram baselines: validation loss of the model against unigrams and bigrams.

One pair of baselines counts exactly the positions that the model was trained on, the other all training data. Both use
add-k smoothing with the best k of a small grid, chosen on the validation set, which favors the baselines. Bits per byte
are the loss over the whole validation text divided by its bytes, so they are comparable across tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lt_data import NgramCounts, RowReader, Rows, Stream
from lt_data.analysis.ngram import Order
from lt_trainer.quickstart.settings import QuickstartSettings
from lt_trainer.quickstart.stages import PackedStore

ROWS_PER_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Score:
    """Validation loss of one predictor."""

    name: str
    nats_per_token: float
    bits_per_byte: float
    k: float | None = None


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """Scores of the baselines on all validation positions, of the model on those that its run validated."""

    model: Score
    baselines: tuple[Score, ...]
    seen_tokens: int
    validation_tokens: int

    @property
    def target_baseline(self) -> Score:
        """Baseline to beat: bigrams over the positions that the model was trained on."""
        (score,) = (score for score in self.baselines if score.name == "bigram, seen tokens")
        return score

    @property
    def beats_baseline(self) -> bool:
        """True if the model has a lower loss than the target baseline."""
        return self.model.nats_per_token < self.target_baseline.nats_per_token


def trained_rows(rows: RowReader, settings: QuickstartSettings, seed: int) -> np.ndarray:
    """Return the indices of the rows consumed by training, from the same stream."""
    stream = Stream(rows, global_batch_size=settings.global_batch_size, seed=seed)
    return stream.global_rows(stream.state, settings.steps * settings.global_batch_size)


def compare_with_baselines(
    train: PackedStore,
    validation: PackedStore,
    settings: QuickstartSettings,
    *,
    seed: int,
    val_loss: float,
    val_tokens: int,
) -> BaselineComparison:
    """Count n-grams and compare their validation loss with the model's."""
    validation_rows = list(_blocks(validation.rows, np.arange(validation.rows.n_rows)))
    n_labels = sum(int((rows.labels != -100).sum()) for rows in validation_rows)
    bits_per_byte = n_labels / math.log(2) / validation.store.manifest.text_bytes
    seen, all_data = (NgramCounts(train.store.vocab_size) for _ in range(2))
    for rows in _blocks(train.rows, trained_rows(train.rows, settings, seed)):
        seen.add(rows)
    for rows in _blocks(train.rows, np.arange(train.rows.n_rows)):
        all_data.add(rows)
    orders: dict[str, Order] = {"unigram": 1, "bigram": 2}
    scores = []
    for name, counts in (("seen tokens", seen), ("all training data", all_data)):
        for kind, order in orders.items():
            k, nats = counts.find_best_k(validation_rows, order)
            scores.append(Score(name=f"{kind}, {name}", nats_per_token=nats, bits_per_byte=nats * bits_per_byte, k=k))
    model = Score(name="model", nats_per_token=val_loss, bits_per_byte=val_loss * bits_per_byte)
    return BaselineComparison(
        model=model, baselines=tuple(scores), seen_tokens=seen.n_pairs, validation_tokens=val_tokens
    )


def _blocks(reader: RowReader, numbers: np.ndarray) -> Iterator[Rows]:
    for start in range(0, len(numbers), ROWS_PER_BLOCK):
        yield reader.read_rows(numbers[start : start + ROWS_PER_BLOCK])
