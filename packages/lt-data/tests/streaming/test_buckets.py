"""Buckets: nothing lost in the cutting, one length and as many tokens in each step, one sequence whatever the ranks."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import IGNORE_INDEX, Buckets, DataError, Phase, RowReader, Stream, StreamState, TokenStore, open_pack, pack
from lt_data.analysis.stats import stats
from lt_data.packing.pack_index import build_index
from lt_data.packing.packs import verify_packs
from lt_data.streaming.shuffle import shuffle_positions

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=25)
SHAPES = st.sampled_from([(32, 4), (16, 16), (24, 3), (8, 1)])


def buckets_of(store: TokenStore, seq_len: int, shortest: int, **options: object) -> Buckets:
    index = build_index(
        store.lengths,
        seq_len=seq_len,
        mode="buckets",
        min_seq_len=shortest,
        store_fingerprint=store.manifest.fingerprint,
    )
    return Buckets(store, index, **{"global_batch_size": 2, **options})  # pyright: ignore[reportArgumentType]


@settings(max_examples=60)
@given(LENGTHS, SHAPES)
def test_every_token_stands_in_exactly_one_row(
    counting_store: Callable[..., TokenStore], lengths: list[int], shape: tuple[int, int]
) -> None:
    longest, shortest = shape
    store = counting_store(lengths)
    buckets = buckets_of(store, longest, shortest)
    ends = np.cumsum(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen: list[int] = []
    for length, reader in buckets.readers.items():
        rows = reader.read_rows(np.arange(reader.n_rows))
        assert rows.input_ids.shape == (reader.n_rows, length)
        padding = rows.doc_ids == -1
        tokens = rows.input_ids[~padding]
        seen += tokens.tolist()
        # The label is the next token of the document, also where the document goes on in another row.
        expected = np.where(np.isin(tokens, ends), IGNORE_INDEX, tokens + 1)
        assert np.array_equal(rows.labels[~padding], expected)
        assert (rows.labels[padding] == IGNORE_INDEX).all()
        assert reader.valid.tolist() == rows.loss_mask.sum(axis=1).tolist()
        if length > shortest:  # every row is full and of one document
            assert not padding.any()
            assert not rows.doc_ids.any()
            assert (owner[rows.input_ids - 1] == owner[rows.input_ids - 1][:, :1]).all()
    assert sorted(seen) == list(range(1, sum(lengths) + 1))
    assert buckets.pack.n_positions == sum(length * reader.n_rows for length, reader in buckets.readers.items())


@given(LENGTHS, SHAPES)
def test_documents_are_cut_as_their_length_in_binary(lengths: list[int], shape: tuple[int, int]) -> None:
    longest, shortest = shape
    index = build_index(np.array(lengths), seq_len=longest, mode="buckets", min_seq_len=shortest)
    begins = np.cumsum([0, *lengths])
    pieces: dict[int, list[tuple[int, int]]] = {}
    for document, start, length in zip(index.document, index.start, index.length, strict=True):
        pieces.setdefault(int(document), []).append((int(start), int(length)))
    for document, length in enumerate(lengths):
        cut = [n for _, n in sorted(pieces[document])]
        # Longest first, each at most once below the longest, and one remainder below the shortest.
        assert cut == sorted(cut, reverse=True)
        assert cut.count(longest) == length // longest
        short = [n for n in cut if n < longest]
        assert len(set(short)) == len(short)
        assert sum(n < shortest for n in cut) == (length % shortest > 0)
        assert sorted(pieces[document])[0][0] == begins[document]


def test_exact_rows() -> None:
    index = build_index(np.array([21, 3, 5, 8]), seq_len=8, mode="buckets", min_seq_len=2)
    # 21 = 8 + 8 + 4 + 1, 3 = 2 + 1, 5 = 4 + 1, 8 = 8; the three single tokens stand in two rows of 2.
    assert index.buckets == ((8, 3), (4, 2), (2, 3))
    columns = (index.document, index.start, index.length, index.labels)
    flat = list(zip(*(column.tolist() for column in columns), strict=True))
    rows = [flat[a:b] for a, b in zip(index.row_offsets[:-1], index.row_offsets[1:], strict=True)]
    assert rows == [
        [(0, 0, 8, 8)],
        [(0, 8, 8, 8)],
        [(3, 29, 8, 7)],
        [(0, 16, 4, 4)],
        [(2, 24, 4, 4)],
        [(1, 21, 2, 2)],
        [(0, 20, 1, 0), (1, 23, 1, 0)],
        [(2, 28, 1, 0)],
    ]
    assert index.valid.tolist() == [8, 8, 7, 4, 4, 2, 0, 0]
    assert index.n_positions == 8 * 3 + 4 * 2 + 2 * 3
    middle = index.bucket(4)
    assert (middle.seq_len, middle.n_rows, middle.n_slices, middle.valid.tolist()) == (4, 2, 2, [4, 4])
    with pytest.raises(DataError, match=r"bucket 16: the pack has \[8, 4, 2\]"):
        index.bucket(16)


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 3), st.integers(0, 2**40))
def test_each_step_has_one_length_and_as_many_tokens(
    counting_store: Callable[..., TokenStore], lengths: list[int], per_rank: int, seed: int
) -> None:
    store = counting_store(lengths)
    batch = 2 * per_rank
    buckets = buckets_of(store, 16, 4, global_batch_size=batch)
    read: dict[int, list[int]] = {length: [] for length in buckets.readers}
    streams = [Stream(buckets, global_batch_size=batch, dp_rank=rank, dp_size=2, seed=seed) for rank in range(2)]
    for step in range(15):
        batches = [stream.next() for stream in streams]
        length = batches[0].rows.input_ids.shape[1]
        assert [made.rows.input_ids.shape for made in batches] == [(per_rank * (16 // length), length)] * 2
        assert batches[0].state == batches[1].state
        assert (batches[0].state.step, batches[0].state.row) == (step + 1, (step + 1) * batch)
        ids = np.concatenate([made.row_ids for made in batches])
        assert batches[0].valid_tokens == sum(int(made.rows.loss_mask.sum()) for made in batches)
        read[length] += [buckets.locate(row)[1] for row in ids.tolist()]
        assert {len(buckets.locate(row)[0].pack.buckets or ()) for row in ids.tolist()} == {1}
    for length, rows in read.items():
        n_rows = buckets.readers[length].n_rows
        assert rows == shuffle_positions(np.arange(len(rows)), n_rows, f"{seed}/{length}").tolist()
        assert buckets.epochs(15 * batch)[length] == len(rows) / n_rows


def test_without_weights_the_buckets_end_together(counting_store: Callable[..., TokenStore]) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 400).tolist()
    buckets = buckets_of(counting_store(lengths, 100), 16, 4, global_batch_size=2)
    steps = buckets.pack.n_positions // 32
    epochs = buckets.epochs(steps * 2)
    # Off by less than a step of rows each.
    for length, reader in buckets.readers.items():
        assert abs(epochs[length] - 1) <= buckets.rows_per_step(length) / reader.n_rows


def test_a_curriculum(counting_store: Callable[..., TokenStore]) -> None:
    phases = [Phase(weights={4: 1, 8: 1}), Phase(weights={16: 3, 8: 1}, from_row=12)]
    buckets = buckets_of(counting_store([29] * 30), 16, 4, global_batch_size=2, weights=phases)
    stream = Stream(buckets, global_batch_size=2)
    shapes = [stream.next().tokens.input_ids.shape for _ in range(14)]
    assert [length for _, length in shapes] == [8, 4, 8, 4, 8, 4, 16, 16, 16, 8, 16, 16, 16, 8]
    assert {n * length for n, length in shapes} == {32}
    assert buckets.shares == [{"16": 0, "8": 1, "4": 1}, {"16": 3, "8": 1, "4": 0}]
    with pytest.raises(DataError, match="a phase begins at row 13: give a multiple of global_batch_size, 2"):
        buckets_of(buckets.store, 16, 4, weights=[phases[0], Phase(weights={16: 1}, from_row=13)])
    with pytest.raises(DataError, match="weights: no source '5'; the sources are 16, 8, 4"):
        buckets_of(buckets.store, 16, 4, weights={5: 1})


def test_going_on_with_other_ranks_and_after_a_skip(counting_store: Callable[..., TokenStore]) -> None:
    buckets = buckets_of(counting_store([29, 5, 64, 13] * 9), 16, 4, global_batch_size=4)
    plain = Stream(buckets, global_batch_size=4, seed=3)
    whole = [plain.next().row_ids.tolist() for _ in range(12)]
    state: StreamState | None = None
    for step, dp_size in enumerate([1, 2, 4, 4, 1, 2]):
        streams = [
            Stream(buckets, global_batch_size=4, dp_rank=r, dp_size=dp_size, seed=3, state=state)
            for r in range(dp_size)
        ]
        batches = [stream.next() for stream in streams]
        assert np.concatenate([batch.row_ids for batch in batches]).tolist() == whole[step]
        state = StreamState.from_dict(json.loads(json.dumps(batches[0].state.to_dict())))
    assert state is not None
    stream = Stream(buckets, global_batch_size=4, seed=3, state=state)
    with pytest.raises(DataError, match="27 rows: not whole steps of the buckets' global_batch_size = 4"):
        stream.skip(3)
    assert stream.state == state
    stream.skip(8)
    assert stream.next().row_ids.tolist() == whole[8]
    assert stream.state.skipped == ((24, 32),)
    with pytest.raises(DataError, match="not whole steps of the buckets' global_batch_size = 4"):
        Stream(buckets, global_batch_size=6, seed=3)
    other = buckets_of(buckets.store, 16, 4, global_batch_size=8)
    with pytest.raises(DataError, match="global_batch_size: 4 before, 8 now"):
        Stream(other, global_batch_size=8, seed=3, state=state)


def test_saved_and_opened(store: TokenStore) -> None:
    made = pack(store, seq_len=64, mode="buckets", min_seq_len=8)
    assert made.folder == store.path / "packs" / "buckets-64-8"
    header = json.loads((made.folder / "pack.json").read_text(encoding="utf-8"))
    assert header["mode"] == "buckets"
    assert [length for length, _ in header["buckets"]] == [64, 32, 16, 8]
    opened = open_pack(store, seq_len=64, mode="buckets", min_seq_len=8)
    assert opened.buckets == made.buckets
    assert verify_packs(store) == 1
    (found,) = stats(store).packs
    assert found.padding == opened.n_positions - store.n_tokens
    with pytest.raises(DataError, match=r"no pack buckets-64-16; make it with: .* --mode buckets --min-seq-len 16"):
        open_pack(store, seq_len=64, mode="buckets", min_seq_len=16)
    with pytest.raises(DataError, match=r"rows of several lengths: read it with lt_data\.Buckets"):
        RowReader(store, opened)
    path = made.folder / "pack.json"
    for broken in (header["buckets"][1:], [[64, 1, 2]], None):
        path.write_text(json.dumps({**header, "buckets": broken}), encoding="utf-8")
        with pytest.raises(DataError, match=r"pack\.json: .*buckets"):
            open_pack(store, seq_len=64, mode="buckets", min_seq_len=8)
    moved = [[header["buckets"][0][0], header["buckets"][0][1] - 1], *header["buckets"][1:]]
    moved[1] = [moved[1][0], moved[1][1] + 1]
    path.write_text(json.dumps({**header, "buckets": moved}), encoding="utf-8")
    with pytest.raises(DataError, match="do not match its fingerprint"):
        verify_packs(store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 48, "mode": "buckets", "min_seq_len": 5}, r"min_seq_len = 5: .* one of \[48, 24, 12, 6, 3\]"),
        ({"seq_len": 8, "mode": "buckets", "min_seq_len": 16}, "min_seq_len = 16"),
        ({"seq_len": 64, "mode": "buckets"}, "min_seq_len = 256"),
        ({"seq_len": 64, "mode": "bfd", "min_seq_len": 8}, "min_seq_len = 8: requires mode='buckets'"),
    ],
)
def test_wrong_lengths(store: TokenStore, options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack(store, **options)


def test_what_is_not_buckets(store: TokenStore) -> None:
    with pytest.raises(DataError, match="pack of mode 'bfd': has no buckets"):
        Buckets(store, pack(store, seq_len=64), global_batch_size=1)
    index = pack(store, seq_len=64, mode="buckets", min_seq_len=8)
    with pytest.raises(DataError, match="global_batch_size = 0"):
        Buckets(store, index, global_batch_size=0)
    buckets = Buckets(store, index, global_batch_size=1)
    with pytest.raises(IndexError, match="rows must be of one bucket"):
        buckets.read_rows(np.array([0, index.n_rows - 1]))
    with pytest.raises(IndexError, match="rows must not be empty and in"):
        buckets.read_rows(np.array([index.n_rows]))


def test_epochs_count_how_often_a_row_has_come(counting_store: Callable[..., TokenStore]) -> None:
    buckets = buckets_of(counting_store([32, 16, 8, 4, 31, 17, 5]), 32, 4)
    rows = buckets.rows_at(0, 60, seed=4, shuffle=True).tolist()
    assert max(rows) > 3
    assert buckets.epochs_at(0, 60).tolist() == [rows[:i].count(row) for i, row in enumerate(rows)]
