from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, TokenStore, pack
from lt_data.analysis.steps import steps_per_epoch
from lt_data.display.stats_text import format_epoch_steps
from lt_data.packing.pack_index import build_index


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 9))
def test_rows_are_steps_and_a_remainder(lengths: list[int], dp_size: int, per_rank: int) -> None:
    import numpy as np

    index = build_index(np.array(lengths), seq_len=16, mode="bfd")
    (found,) = steps_per_epoch(index, global_batch_size=dp_size * per_rank, dp_size=dp_size)
    assert found.steps * dp_size * per_rank + found.remainder == found.rows == index.n_rows
    assert 0 <= found.remainder < dp_size * per_rank
    assert found.rows_per_rank == per_rank
    assert found.tokens_per_step == dp_size * per_rank * 16
    assert found.exact_steps * (dp_size * per_rank) == index.n_rows


def test_buckets_are_counted_each(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([8] * 11 + [4] * 9 + [2] * 5)
    index = pack(store, seq_len=8, mode="buckets", min_seq_len=2)
    found = steps_per_epoch(index, global_batch_size=2, dp_size=2)
    assert [(item.seq_len, item.rows, item.global_batch_size, item.steps, item.remainder) for item in found] == [
        (8, 11, 2, 5, 1),
        (4, 9, 4, 2, 1),
        (2, 5, 8, 0, 5),
    ]
    assert {item.tokens_per_step for item in found} == {16}


@pytest.mark.parametrize(("batch", "dp_size"), [(0, 1), (8, 3), (4, 0), (-4, 2)])
def test_a_batch_that_cannot_be_divided(batch: int, dp_size: int, counting_store: Callable[..., TokenStore]) -> None:
    index = pack(counting_store([5, 5]), seq_len=8)
    with pytest.raises(
        DataError, match=f"global_batch_size = {batch}: must be a positive multiple of dp_size = {dp_size}"
    ):
        steps_per_epoch(index, global_batch_size=batch, dp_size=dp_size)


def test_in_words(counting_store: Callable[..., TokenStore]) -> None:
    index = pack(counting_store([8] * 17), seq_len=8)
    (found,) = steps_per_epoch(index, global_batch_size=4, dp_size=2)
    assert format_epoch_steps(found) == (
        "17 rows of 8 tokens = 4 steps of 4 rows (2 for each of 2 ranks, 32 tokens) + 1: 1 row remains for the "
        "first step of the next epoch"
    )
    assert format_epoch_steps(steps_per_epoch(index, global_batch_size=17)[0]).endswith("+ 0: no rows remain")
