"""Packs against a packer by the definition; what is written, opened and refused."""

import pickle
import shutil

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_data import DataError, TokenStore, open_pack, pack, split, verify
from lt_data.packing.best_fit import best_fit
from lt_data.packing.pack_index import ARRAYS, PackIndex, PackMode, build_index, write_pack
from lt_data.packing.packs import verify_packs

Slice = tuple[int, int, int, int]
"""Document, start, length and labels."""
MODES: tuple[PackMode, ...] = ("bfd", "concat")
each_mode = pytest.mark.parametrize("mode", MODES)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def plain_pack(lengths: list[int], seq_len: int, mode: PackMode, per_group: int) -> list[list[Slice]]:
    """Rows by the definition: groups of documents, each packed by itself, one slice at a time."""
    rows: list[list[Slice]] = []
    ends = np.cumsum(lengths).tolist()
    for first in range(0, len(lengths), per_group):
        documents = range(first, min(first + per_group, len(lengths)))
        pieces: list[Slice] = []
        filled, opened = 0, len(rows)
        for document in documents:
            begin, end = ends[document] - lengths[document], ends[document]
            room = seq_len
            while begin < end:
                room = seq_len - filled % seq_len if mode == "concat" else seq_len
                stop = min(begin + room, end)
                is_last = stop == (ends[-1] if mode == "concat" else end)
                pieces.append((document, begin, stop - begin, stop - begin - is_last))
                filled, begin = filled + stop - begin, stop
        if mode == "concat":
            filled = 0
            for piece in pieces:
                rows += [[]] if filled % seq_len == 0 else []
                rows[-1].append(piece)
                filled += piece[2]
            continue
        spaces: dict[int, tuple[int, int]] = {}  # of each row of the group: space, and when it was last used
        whole = [piece for piece in pieces if piece[2] == seq_len]
        rest = sorted((piece for piece in pieces if piece[2] < seq_len), key=lambda piece: -piece[2])
        for time, piece in enumerate([*whole, *rest]):
            fitting = [(space, used, row) for row, (space, used) in spaces.items() if space >= piece[2]]
            row = min(fitting)[2] if fitting else len(rows)
            rows += [] if fitting else [[]]
            rows[row].append(piece)
            spaces[row] = (spaces.get(row, (seq_len, 0))[0] - piece[2], time)
        assert len(rows) - opened == len(spaces)
    return rows


def rows_of(index: PackIndex) -> list[list[Slice]]:
    rows = np.repeat(np.arange(index.n_rows), np.diff(index.row_offsets))
    labels = index.labels(np.arange(rows.size), rows)
    columns = (index.document, index.start, index.length, labels)
    slices = list(zip(*(column.tolist() for column in columns), strict=True))
    return [slices[a:b] for a, b in zip(index.row_offsets[:-1].tolist(), index.row_offsets[1:].tolist(), strict=True)]


@each_mode
@given(lengths=LENGTHS, seq_len=st.integers(1, 24), per_group=st.integers(1, 70))
@example(lengths=[3, 3, 1, 1, 1], seq_len=3, per_group=2)  # the row of most slices begins a group
def test_rows_are_those_of_the_plain_packer(tmp_path_factory, mode, lengths, seq_len, per_group):
    expected = plain_pack(lengths, seq_len, mode, per_group)
    index = build_index(np.array(lengths), seq_len=seq_len, mode=mode, documents_per_group=per_group)
    assert rows_of(index) == expected
    assert index.valid.tolist() == [sum(labels for *_, labels in row) for row in expected]
    assert index.max_slices_per_row == max(map(len, expected))
    folder = tmp_path_factory.mktemp("pack") / "pack"
    write_pack(np.array(lengths), folder, seq_len=seq_len, mode=mode, documents_per_group=per_group)
    written = PackIndex.load(folder)
    written.verify()
    assert written.fingerprint == index.fingerprint
    assert rows_of(written) == expected
    for name, dtype in ARRAYS.items():
        array = np.load(folder / f"{name}.npy")
        assert array.dtype.str == dtype
        assert np.array_equal(array, getattr(written, name))


def test_exact_placement():
    """The rows of every pack depend on these: they must never change."""
    order, bins = best_fit(np.array([3, 7, 2, 5, 3, 1]), 10)
    # 7 opens bin 0 (3 left), 5 opens bin 1 (5 left), 3 fills bin 0, 3 goes to bin 1 (2 left), 2 fills it, 1 opens 2.
    assert (order.tolist(), bins.tolist()) == ([1, 3, 0, 4, 2, 5], [0, 1, 0, 1, 1, 2])
    order, bins = best_fit(np.array([4] * 7), 10)
    assert (order.tolist(), bins.tolist()) == (list(range(7)), [0, 0, 1, 1, 2, 2, 3])
    order, bins = best_fit(np.array([70_000, 1, 65_536, 30_000, 4_464, 99_999]), 100_000)  # beyond sixteen bits
    assert (order.tolist(), bins.tolist()) == ([5, 0, 2, 3, 4, 1], [0, 1, 2, 1, 2, 0])
    index = build_index(np.array([3, 6, 2]), seq_len=4, mode="concat")
    assert rows_of(index) == [[(0, 0, 3, 3), (1, 3, 1, 1)], [(1, 4, 4, 4)], [(1, 8, 1, 1), (2, 9, 2, 1)]]


@pytest.mark.parametrize("n", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_fill_is_near_perfect_and_nothing_is_cut_that_fits(n):
    lengths = np.random.default_rng(0).lognormal(np.log(490), 1.2, n).astype(np.int64) + 1
    index = build_index(lengths, seq_len=4096, mode="bfd")
    assert int(index.length.sum(dtype=np.int64)) == int(lengths.sum())
    assert int(lengths.sum()) / index.n_positions > 0.9999
    assert np.array_equal(np.bincount(index.document, minlength=lengths.size), -(-lengths // 4096))
    assert np.add.reduceat(index.length, index.row_offsets[:-1], dtype=np.int64).max() <= 4096


@each_mode
def test_made_once_saved_and_opened(store, mode, monkeypatch):
    made = pack(store, seq_len=64, mode=mode)
    assert made.folder == store.path / "packs" / f"{mode}-64"
    fingerprint = store.manifest.fingerprint
    built = build_index(store.lengths, seq_len=64, mode=mode, store_fingerprint=fingerprint)
    monkeypatch.setattr("lt_data.packing.packs.write_pack", None)
    for index in (made, open_pack(store, seq_len=64, mode=mode), pack(store, seq_len=64, mode=mode)):
        assert (index.fingerprint, rows_of(index)) == (built.fingerprint, rows_of(built))
    again = pickle.loads(pickle.dumps(made))
    assert (again.folder, again.fingerprint) == (made.folder, made.fingerprint)
    assert verify_packs(store) == 1


def test_fingerprints_differ_where_anything_differs():
    lengths = np.array([3, 9, 4])
    made = [
        build_index(values, seq_len=seq_len, mode=mode, store_fingerprint=store)
        for values, seq_len, mode, store in (
            (lengths, 8, "bfd", "a"),
            (lengths, 8, "bfd", "b"),
            (lengths, 9, "bfd", "a"),
            (lengths, 8, "concat", "a"),
            (lengths[::-1], 8, "bfd", "a"),
        )
    ]
    assert len({index.fingerprint for index in made}) == len(made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len = 0"),
        ({"seq_len": 2**31}, f"seq_len = {2**31}"),
        ({"seq_len": 8, "mode": "best"}, "mode = 'best': one of bfd, concat"),
    ],
)
def test_wrong_options(store, options, message):
    for call in (pack, open_pack):
        with pytest.raises(DataError, match=message):
            call(store, **options)


def test_a_pack_that_is_missing_or_of_another_store_names_the_command(store, tmp_path):
    with pytest.raises(DataError, match=rf"lt data pack {store.path} --seq-len 32 --mode concat"):
        open_pack(store, seq_len=32, mode="concat")
    split(store, holdout="50%", train=tmp_path / "train", validation=tmp_path / "rest")
    train, rest = (TokenStore(tmp_path / name, packs=tmp_path / "packs") for name in ("train", "rest"))
    pack(train, seq_len=64)
    shutil.copytree(train.pack_folder(), rest.pack_folder())
    for call in (open_pack, pack):
        with pytest.raises(DataError, match=r"bfd-64 belongs to another store; make it again with: .* --overwrite"):
            call(rest, seq_len=64)
    assert pack(rest, seq_len=64, overwrite=True).store_fingerprint == rest.manifest.fingerprint
    (rest.pack_folder("bfd-64")).rename(rest.pack_folder("concat-64"))
    with pytest.raises(DataError, match="concat-64 is bfd-64, not concat-64"):
        open_pack(rest, seq_len=64, mode="concat")
    (train.pack_folder("bfd-64") / "notes.txt").touch()
    with pytest.raises(DataError, match=r"bfd-64 holds notes\.txt beside the pack"):
        pack(train, seq_len=64, overwrite=True)
    (store.path / "packs").symlink_to(train.pack_folder())
    with pytest.raises(DataError, match="a symbolic link leads out of"):
        pack(store, seq_len=64)


@pytest.mark.parametrize("name", ARRAYS)
def test_broken_arrays(store, name):
    pack(store, seq_len=64)
    path = store.path / "packs/bfd-64" / f"{name}.npy"
    content = path.read_bytes()
    for broken in (content[:-8], b"", b"no array", content.replace(b"'<", b"'>"), b"\x93NUMPY\x01\x00\xff\xff{"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"{name}\.npy"):
            open_pack(store, seq_len=64)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert open_pack(store, seq_len=64).n_rows  # opening reads sizes only
    with pytest.raises(DataError, match="do not match its header"):
        verify_packs(store)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot open .*{name}\.npy"):
        open_pack(store, seq_len=64)


def test_packs_of_several_stores_share_a_folder(store, tmp_path):
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    packs = tmp_path / "packs"
    opened = TokenStore(store.path, packs=packs)
    index = pack(opened, seq_len=64)
    assert index.folder == packs / store.manifest.fingerprint[:16] / "bfd-64"
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before
    assert open_pack(pickle.loads(pickle.dumps(opened)), seq_len=64).fingerprint == index.fingerprint
    array = index.folder / "start.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"\1")
    assert len(verify(opened)) == 1
    with pytest.raises(DataError, match=f"no pack bfd-32 in {packs}; .* --packs {packs}$"):
        open_pack(opened, seq_len=32)
