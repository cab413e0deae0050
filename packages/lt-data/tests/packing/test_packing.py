import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, PackIndex, TokenStore, open_pack, pack, prepare
from lt_data.packing.groups import PackMode
from lt_data.packing.pack_index import build_index
from lt_data.packing.packs import verify_packs

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def slices(index: PackIndex) -> list[list[tuple[int, int, int, int]]]:
    """(document, start, length, labels) of each slice of each row."""
    columns = (index.document, index.start, index.length, index.labels)
    flat = list(zip(*(column.tolist() for column in columns), strict=True))
    return [flat[a:b] for a, b in zip(index.row_offsets[:-1], index.row_offsets[1:], strict=True)]


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 24))
def test_every_token_stands_in_exactly_one_row(mode: str, lengths: list[int], seq_len: int) -> None:
    index = build_index(np.array(lengths), seq_len=seq_len, mode=mode)
    offsets = np.cumsum([0, *lengths])
    seen = np.zeros(offsets[-1], int)
    for row in slices(index):
        assert row
        assert sum(length for _, _, length, _ in row) <= seq_len
        for document, start, length, _ in row:
            assert length >= 1
            assert offsets[document] <= start
            assert start + length <= offsets[document + 1]
            seen[start : start + length] += 1
    assert seen.tolist() == [1] * int(offsets[-1])


@given(LENGTHS, st.integers(1, 24))
def test_best_fit_cuts_only_what_is_too_long_and_labels_all_but_the_last(lengths: list[int], seq_len: int) -> None:
    index = build_index(np.array(lengths), seq_len=seq_len, mode="bfd")
    ends = np.cumsum(lengths)
    for document, start, length, labels in (piece for row in slices(index) for piece in row):
        ends_document = start + length == ends[document]
        assert labels == length - ends_document
        assert ends_document or length == seq_len  # all pieces but the last are whole rows
        assert lengths[document] > seq_len or length == lengths[document]


@given(LENGTHS, st.integers(1, 24))
def test_concat_is_the_joined_documents_cut(lengths: list[int], seq_len: int) -> None:
    index = build_index(np.array(lengths), seq_len=seq_len, mode="concat")
    total = sum(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    assert index.n_rows == -(-total // seq_len)
    for r, row in enumerate(slices(index)):
        expected = np.arange(r * seq_len, min((r + 1) * seq_len, total))
        assert np.concatenate([np.arange(start, start + n) for _, start, n, _ in row]).tolist() == expected.tolist()
        assert np.concatenate([[document] * n for document, _, n, _ in row]).tolist() == owner[expected].tolist()
    assert int(index.valid.sum()) == total - 1


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 24))
def test_valid_is_the_sum_of_labels(mode: str, lengths: list[int], seq_len: int) -> None:
    index = build_index(np.array(lengths), seq_len=seq_len, mode=mode)
    assert index.valid.tolist() == [sum(labels for _, _, _, labels in row) for row in slices(index)]
    assert (index.n_rows, index.n_slices) == (index.row_offsets.size - 1, int(index.row_offsets[-1]))


@pytest.mark.parametrize("mode", ["bfd", "concat", "buckets"])
@given(LENGTHS)
def test_the_most_slices_of_a_row_are_known(mode: PackMode, lengths: list[int]) -> None:
    index = build_index(np.array(lengths), seq_len=16, mode=mode, min_seq_len=4 if mode == "buckets" else None)
    assert index.max_slices_per_row == max(len(row) for row in slices(index))
    for length, rows in index.buckets or ():
        bucket = index.bucket(length)
        assert not rows or bucket.max_slices_per_row >= np.diff(bucket.row_offsets).max()
        assert length == 4 or bucket.max_slices_per_row == 1


def test_exact_best_fit_rows() -> None:
    index = build_index(np.array([3, 11, 2, 5]), seq_len=8, mode="bfd")
    # 11 = 8 + 3. Longest first: piece 8 | 5, then 3 (document 0, the first of the threes) fills it | 3, 2.
    assert slices(index) == [[(1, 3, 8, 8)], [(3, 16, 5, 4), (0, 0, 3, 2)], [(1, 11, 3, 2), (2, 14, 2, 1)]]
    assert index.valid.tolist() == [8, 6, 3]
    types = {name: getattr(index, name).dtype.str for name in ("row_offsets", "document", "start", "length", "valid")}
    assert types == {"row_offsets": "<i8", "document": "<u4", "start": "<i8", "length": "<i4", "valid": "<i4"}


def test_exact_concat_rows() -> None:
    index = build_index(np.array([3, 6, 2]), seq_len=4, mode="concat")
    assert slices(index) == [[(0, 0, 3, 3), (1, 3, 1, 1)], [(1, 4, 4, 4)], [(1, 8, 1, 1), (2, 9, 2, 1)]]
    assert index.valid.tolist() == [4, 4, 2]


def test_fill_is_near_perfect_and_nothing_is_cut_that_fits() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(490), 1.2, 200_000).astype(np.int64) + 1
    index = build_index(lengths, seq_len=4096, mode="bfd")
    assert int(lengths.sum()) / (index.n_rows * 4096) > 0.9999
    assert index.n_rows - build_index(lengths, seq_len=4096, mode="concat").n_rows <= 5
    pieces = np.bincount(index.document, minlength=lengths.size)
    assert np.array_equal(pieces, -(-lengths // 4096))


@pytest.mark.slow
def test_ten_million_documents() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(490), 1.2, 10_000_000).astype(np.int64) + 1
    index = build_index(lengths, seq_len=4096, mode="bfd")
    assert int(index.length.sum(dtype=np.int64)) == int(lengths.sum())
    assert int(lengths.sum()) / (index.n_rows * 4096) > 0.9999
    assert np.array_equal(np.bincount(index.document, minlength=lengths.size), -(-lengths // 4096))
    assert index.length.max() <= 4096
    assert np.add.reduceat(index.length.astype(np.int64), index.row_offsets[:-1]).max() <= 4096


@pytest.mark.parametrize("mode", ["bfd", "concat"])
def test_saved_and_opened(store: TokenStore, mode: str) -> None:
    made = pack(store, seq_len=64, mode=mode)
    folder = store.path / "packs" / f"{mode}-64"
    header = json.loads((folder / "pack.json").read_text(encoding="utf-8"))
    assert (header["format"], header["version"], header["mode"], header["seq_len"]) == ("lt-data-pack", 1, mode, 64)
    assert header["store_fingerprint"] == store.manifest.fingerprint
    opened = open_pack(store, seq_len=64, mode=mode)
    opened.verify()
    built = build_index(store.lengths, seq_len=64, mode=mode, store_fingerprint=store.manifest.fingerprint)
    assert built.fingerprint == opened.fingerprint == made.fingerprint
    assert slices(built) == slices(opened)


def test_fingerprints_differ_where_anything_differs(counting_store: Callable[..., TokenStore]) -> None:
    lengths = np.array([3, 9, 4])
    made = [
        build_index(lengths, seq_len=8, mode="bfd", store_fingerprint="a"),
        build_index(lengths, seq_len=8, mode="bfd", store_fingerprint="b"),
        build_index(lengths, seq_len=9, mode="bfd", store_fingerprint="a"),
        build_index(lengths, seq_len=8, mode="concat", store_fingerprint="a"),
        build_index(lengths[::-1], seq_len=8, mode="bfd", store_fingerprint="a"),
    ]
    assert len({index.fingerprint for index in made}) == len(made)


def test_made_once(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(store, seq_len=64)
    monkeypatch.setattr("lt_data.packing.packs.build_index", None)
    assert pack(store, seq_len=64).fingerprint == first.fingerprint


def test_names(store: TokenStore) -> None:
    pack(store, seq_len=64, name="mine")
    assert open_pack(store, seq_len=64, name="mine").mode == "bfd"
    with pytest.raises(DataError, match=r"mine is bfd-64, not concat-64; make it again with: .*--mode concat"):
        pack(store, seq_len=64, mode="concat", name="mine")
    assert pack(store, seq_len=64, mode="concat", name="mine", overwrite=True).mode == "concat"
    for name in ("", "..", "a/b"):
        with pytest.raises(DataError, match="give a folder name"):
            pack(store, seq_len=64, name=name)


@pytest.mark.parametrize("seq_len", [0, -4, 2**31])
def test_bad_seq_len(store: TokenStore, seq_len: int) -> None:
    with pytest.raises(DataError, match=f"seq_len = {seq_len}"):
        pack(store, seq_len=seq_len)


def test_bad_mode(store: TokenStore) -> None:
    with pytest.raises(DataError, match="mode = 'best': one of bfd, concat, buckets"):
        pack(store, seq_len=8, mode="best")  # pyright: ignore[reportArgumentType]


def test_missing_pack_names_the_command(store: TokenStore) -> None:
    with pytest.raises(DataError, match=rf"lt data pack {store.path} --seq-len 32 --mode concat"):
        open_pack(store, seq_len=32, mode="concat")


def test_pack_of_another_store_is_refused(store: TokenStore, tmp_path: Path, documents: list) -> None:
    other_path = tmp_path / "other"
    prepare(documents[:5], tokenizer=store.tokenizer(), out=other_path)
    other = TokenStore(other_path)
    pack(other, seq_len=64)
    (other_path / "packs").rename(store.path / "packs")
    for make in (open_pack, pack):
        with pytest.raises(DataError, match=r"bfd-64 belongs to another store; make it again with: .* --overwrite"):
            make(store, seq_len=64)
    assert pack(store, seq_len=64, overwrite=True).store_fingerprint == store.manifest.fingerprint


def test_overwriting_touches_only_packs(store: TokenStore) -> None:
    folder = store.path / "packs" / "bfd-64"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("x", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"pack\.json"):
            pack(store, seq_len=64, overwrite=overwrite)
    pack(store, seq_len=32)
    (store.path / "packs/bfd-32/mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"holds mine\.txt beside the pack"):
        pack(store, seq_len=32, overwrite=True)
    assert (folder / "mine.txt").exists()


@pytest.mark.parametrize("name", ["row_offsets", "document", "start", "length", "labels", "valid"])
def test_broken_arrays(store: TokenStore, name: str) -> None:
    pack(store, seq_len=64)
    path = store.path / "packs/bfd-64" / f"{name}.npy"
    content = path.read_bytes()
    for broken in (content[:-8], b"", b"no array"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"{name}\.npy"):
            open_pack(store, seq_len=64)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot open .*{name}\.npy"):
        open_pack(store, seq_len=64)
    changed = bytearray(content)
    changed[-1] ^= 1
    path.write_bytes(changed)
    assert open_pack(store, seq_len=64).n_rows  # opening reads sizes only
    with pytest.raises(DataError, match="do not match its fingerprint"):
        verify_packs(store)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"[" * 100_000,
        b'{"format": "lt-data-pack", "version": 9}',
        b'{"format": "lt-data-pack", "version": 1, "seq_len": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_broken_description(store: TokenStore, content: bytes) -> None:
    pack(store, seq_len=64)
    (store.path / "packs/bfd-64/pack.json").write_bytes(content)
    with pytest.raises(DataError, match=r"pack\.json"):
        open_pack(store, seq_len=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": "64"}, "seq_len is a string, not an integer"),
        ({"seq_len": 0}, "seq_len = 0"),
        ({"mode": "../x"}, "mode is a string, not one of 'bfd', 'concat', 'buckets'"),
        ({"mode": "buckets"}, "buckets belong to the mode"),
        ({"arrays": {"start": {"dtype": "<i8", "shape": [1]}}}, "its arrays are start, not row_offsets"),
        ({"max_slices_per_row": True}, "max_slices_per_row is true or false"),
        ({"fingerprint": None}, "fingerprint is null, not a string"),
    ],
)
def test_other_fields_of_a_description(store: TokenStore, change: dict[str, object], message: str) -> None:
    pack(store, seq_len=64)
    path = store.path / "packs/bfd-64/pack.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change), encoding="utf-8")
    with pytest.raises(DataError, match=rf"pack\.json: {message}.*; make the pack again"):
        open_pack(store, seq_len=64)


def test_a_wrong_number_of_slices_is_found(store: TokenStore) -> None:
    pack(store, seq_len=64)
    path = store.path / "packs/bfd-64/pack.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"max_slices_per_row": header["max_slices_per_row"] + 1}))
    with pytest.raises(DataError, match=r"pack\.json"):
        verify_packs(store)


def test_verify_counts_packs(store: TokenStore) -> None:
    assert verify_packs(store) == 0
    pack(store, seq_len=64)
    pack(store, seq_len=64, mode="concat")
    assert verify_packs(store) == 2
