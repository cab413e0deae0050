"""Mixtures: exact counts, each source in its own order and epochs, one sequence whatever the ranks and the stops."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Mixture, Phase, RowReader, Stream, TokenStore
from lt_data.packing.pack_index import build_index
from lt_data.store.manifest import encode_manifest
from lt_data.streaming.permutation import shuffle_positions

SEQ_LEN = 4


@pytest.fixture(scope="session")
def make(counting_store) -> Callable[..., RowReader]:
    cache: dict[tuple, RowReader] = {}

    def make(n_rows: int, *, seq_len: int = SEQ_LEN, mode: str = "bfd", document_mask: bool = True) -> RowReader:
        key = (n_rows, seq_len, mode, document_mask)
        if key not in cache:
            store = counting_store([seq_len] * (n_rows - 1) + [seq_len - 1])
            index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=store.manifest.fingerprint)
            cache[key] = RowReader(store, index, document_mask=document_mask)
        return cache[key]

    return make


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
PHASES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 7), min_size=4, max_size=4)), min_size=1, max_size=3
)


def mixture_of(make: Callable[..., RowReader], sizes: list[int], phases: list[tuple[int, list[int]]]) -> Mixture:
    """A mixture of sources s0, s1, ...; each phase is (rows since the one before, weights); s0 always has some."""
    start, made = 0, []
    for i, (rows, weights) in enumerate(phases):
        start += rows if i else 0
        of_sources = {f"s{j}": weight + (j == 0) for j, weight in enumerate(weights[: len(sizes)])}
        made.append(Phase(weights=of_sources, from_row=start))
    return Mixture({f"s{j}": make(size) for j, size in enumerate(sizes)}, made)


@settings(max_examples=60)
@given(SIZES, PHASES, st.integers(0, 2**40), st.booleans())
def test_each_source_gives_its_own_sequence_and_exact_counts(make, sizes, phases, seed, shuffle):
    mixture = mixture_of(make, sizes, phases)
    rows = mixture.rows_at(0, 150, seed=seed, shuffle=shuffle)
    names = np.array([mixture.locate(row)[0] for row in rows.tolist()])
    begin = 0
    for j, (name, reader) in enumerate(mixture.sources.items()):
        own = rows[names == name] - sum(sizes[:j])
        expected = shuffle_positions(np.arange(own.size), reader.n_rows, f"{seed}/{name}" if shuffle else None)
        assert own.tolist() == expected.tolist()
        for epoch in range(own.size // reader.n_rows):  # each epoch is every row once, also across phases
            part = own[epoch * reader.n_rows : (epoch + 1) * reader.n_rows]
            assert sorted(part.tolist()) == list(range(reader.n_rows))
        begin += reader.n_rows
    for position in range(0, 151, 7):
        assert mixture.counts(position) == {name: int((names[:position] == name).sum()) for name in mixture.sources}
    starts = [0, *np.cumsum([length for length, _ in phases[1:]]).tolist()]
    for i, start in enumerate(starts):  # within one row of the ideal at each row of a phase
        end = min(starts[i + 1] if i + 1 < len(starts) else 150, 150)
        weights = phases[i][1]
        shares = {f"s{j}": weight + (j == 0) for j, weight in enumerate(weights[: len(sizes)])}
        for name, share in shares.items():
            given_rows = np.cumsum(names[start:end] == name)
            ideal = np.arange(1, given_rows.size + 1) * share / sum(shares.values())
            assert (np.abs(given_rows - ideal) < 1).all()


@given(st.lists(st.integers(0, 19), max_size=12))
def test_gathered_rows_are_those_of_the_sources(make, chosen):
    mixture = Mixture({"a": make(11), "b": make(6, mode="concat"), "c": make(3)}, {"a": 1, "b": 1, "c": 1})
    rows = mixture.read_rows(np.array(chosen, np.int64))
    for i, row in enumerate(chosen):
        _, reader, number = mixture.locate(row)
        expected = reader.read_rows(np.array([number]))
        for name in ("input_ids", "labels", "position_ids", "doc_ids"):
            assert np.array_equal(getattr(rows, name)[i : i + 1], getattr(expected, name))
    assert mixture.count_labels(np.array(chosen, np.int64)) == int(rows.loss_mask.sum())


def test_weights_ahead_may_change_and_those_behind_may_not(make):
    sources = {"a": make(11), "b": make(6)}

    def mixture(second: Mapping[str, float], first: float = 1, more: Mapping[str, RowReader] | None = None) -> Mixture:
        phases = [Phase(weights={"a": first, "b": 1}), Phase(weights=second, from_row=8)]
        return Mixture(sources | (more or {}), phases)

    before = mixture({"a": 1})
    stream = Stream(before, global_batch_size=4, seed=2)
    states = [stream.next().state for _ in range(3)]
    for state in states[:2]:  # rows 0 to 7 are read: the second phase has not begun
        other = Stream(mixture({"c": 1}, more={"c": make(3)}), global_batch_size=4, seed=2, state=state)
        assert other.state == state
        assert other.reader.rows_at(8, 3, seed=2, shuffle=True).min() >= 17
    with pytest.raises(DataError, match=r"weights@8: a=1 before, b=1 now"):
        Stream(mixture({"b": 1}), global_batch_size=4, seed=2, state=states[2])
    with pytest.raises(DataError, match=r"weights@0: a=1,b=1 before, a=2,b=1 now"):
        Stream(mixture({"a": 1}, first=2), global_batch_size=4, seed=2, state=states[0])
    with pytest.raises(DataError, match=r"a\.store: \w+ before, \w+ now; a\.pack"):
        Stream(Mixture({**sources, "a": make(10)}, {"a": 1, "b": 1}), global_batch_size=4, seed=2, state=states[0])
    Stream(mixture({"a": 1}), global_batch_size=6, dp_rank=2, dp_size=3, seed=2, state=states[2])


def test_a_source_that_is_exhausted_says_so_at_its_last_row(make):
    mixture = Mixture({"a": make(11), "b": make(3)}, {"a": 1, "b": 1}, max_epochs={"b": 2})
    first_too_many = next(p for p in range(100) if mixture.counts(p + 1)["b"] == 7)
    assert mixture.rows_at(0, first_too_many, seed=0, shuffle=True).size == first_too_many
    with pytest.raises(DataError, match=r"source b: its 3 rows were read 2 times, its max_epochs"):
        mixture.rows_at(0, first_too_many + 1, seed=0, shuffle=True)
    stream = Stream(mixture, global_batch_size=first_too_many // 2)
    stream.next()
    stream.next()
    state = stream.state
    with pytest.raises(DataError, match="source b"):
        stream.next()
    assert stream.state == state


@pytest.mark.parametrize(
    ("sizes", "weights", "options", "message"),
    [
        ({}, {}, {}, "a mixture needs at least one source"),
        ({"a b": 3}, {"a b": 1}, {}, "source 'a b': use letters"),
        ({"a/b": 3}, {"a/b": 1}, {}, "source 'a/b'"),
        ({"a": 3}, {"b": 1}, {}, "weights: no source 'b'; the sources are a"),
        ({"a": 3}, {"a": 0}, {}, "the weights of a are all 0"),
        ({"a": 3}, {"a": 1}, {"max_epochs": {"a": 0}}, "max_epochs of a: 0"),
        ({"a": 3}, {"a": 1}, {"max_epochs": {"c": 1}}, "max_epochs: no source 'c'"),
        ({"a": 3}, [], {}, r"phases begin at rows \[\]"),
        ({"a": 3}, [Phase(weights={"a": 1}, from_row=3)], {}, r"phases begin at rows \[3\]"),
        ({"a": 3}, [Phase(weights={"a": 1}, from_row=-1)], {}, r"phases begin at rows \[-1\]"),
        ({"a": 3}, [Phase(weights={"a": 1}), Phase(weights={"a": 1}, from_row=1.5)], {}, r"rows \[0, 1.5\]"),
        ({"a": 3}, [Phase(weights={"a": 1}), Phase(weights={"a": 1})], {}, r"phases begin at rows \[0, 0\]"),
    ],
)
def test_wrong_mixtures(make, sizes, weights, options, message):
    with pytest.raises(DataError, match=message):
        Mixture({name: make(size) for name, size in sizes.items()}, weights, **options)


def test_sources_that_do_not_fit_together(make, counting_store):
    with pytest.raises(DataError, match=r"sources a and b: different row length \(4 and 5\)"):
        Mixture({"a": make(3), "b": make(3, seq_len=5)}, {"a": 1})
    with pytest.raises(DataError, match=r"different document_mask"):
        Mixture({"a": make(3), "b": make(3, document_mask=False)}, {"a": 1})
    store = counting_store([4, 4])
    other = replace(store.manifest, tokenizer=replace(store.manifest.tokenizer, sha256="f" * 64))
    (store.path / "manifest.json").write_bytes(encode_manifest(other))
    changed = TokenStore(store.path)
    index = build_index(store.lengths, seq_len=SEQ_LEN, mode="bfd", store_fingerprint=other.fingerprint)
    with pytest.raises(DataError, match=r"sources a and b: different tokenizer \(0{16} and f{16}\)"):
        Mixture({"a": make(3), "b": RowReader(changed, index)}, {"a": 1})


@pytest.mark.parametrize("mask", [True, False])
def test_each_batch_has_the_bound_of_all_sources(counting_store, mask):
    """Also one with rows of a single source, or of none: shapes must not change from batch to batch."""
    readers: dict[str, RowReader] = {}
    for name, lengths in (("few", [16, 16, 15]), ("many", [2] * 24), ("some", [5, 5, 5] * 3)):
        store = counting_store(lengths)
        index = build_index(store.lengths, seq_len=16, mode="bfd", store_fingerprint=store.manifest.fingerprint)
        readers[name] = RowReader(store, index, document_mask=mask)
    assert [reader.max_segments_per_row for reader in readers.values()] == ([2, 9, 4] if mask else [1, 1, 1])
    for names in (["few", "many", "some"], ["many", "some", "few"], ["some", "few", "many"]):
        mixture = Mixture({name: readers[name] for name in names}, dict.fromkeys(names, 1))
        assert mixture.n_rows == 3 + 3 + 3
        for rows in ([], *([row] for row in range(9)), [0, 3], [8, 5], list(range(9))):
            batch = mixture.read_token_rows(np.array(rows, np.int64))
            assert batch.max_segments_per_row == (9 if mask else 1), (names, rows)
            segments = np.bincount(batch.segments()[0] // 16, minlength=len(rows))
            assert (segments <= batch.max_segments_per_row).all()
