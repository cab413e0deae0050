"""Packs of several groups of documents: what a group is, and the same files for any number of workers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, PackIndex, TokenStore
from lt_data.packing.groups import PackMode, iter_groups
from lt_data.packing.pack_index import build_index
from lt_data.packing.pack_writer import StoreLengths
from lt_data.packing.packs import write_pack

MODES: list[PackMode] = ["bfd", "concat", "buckets"]
ARRAYS = ("row_offsets", "document", "start", "length", "labels", "valid")
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)
SEQ_LEN, MIN_SEQ_LEN = 16, 4


def build(lengths: np.ndarray, mode: PackMode, **options: int) -> PackIndex:
    return build_index(
        lengths, seq_len=SEQ_LEN, mode=mode, min_seq_len=MIN_SEQ_LEN if mode == "buckets" else None, **options
    )


def rows_of(index: PackIndex) -> list[list[tuple[int, int, int, int]]]:
    """Rows as (document, start, length, labels) of their slices."""
    columns = zip(*(getattr(index, name).tolist() for name in ARRAYS[1:5]), strict=True)
    slices = list(columns)
    return [slices[a:b] for a, b in zip(index.row_offsets[:-1].tolist(), index.row_offsets[1:].tolist(), strict=True)]


def rows_by_length(index: PackIndex) -> dict[int, list[list[tuple[int, int, int, int]]]]:
    rows, found = iter(rows_of(index)), {}
    for length, count in index.buckets or ((SEQ_LEN, index.n_rows),):
        found[length] = [next(rows) for _ in range(count)]
    return found


@pytest.mark.parametrize("mode", MODES)
@given(sizes=SIZES, per_group=st.integers(1, 70))
def test_a_group_is_packed_as_a_store_of_its_own(mode: PackMode, sizes: list[int], per_group: int) -> None:
    """By the definition: pack each range of documents alone, move it to its place, put equal lengths together."""
    lengths = np.array(sizes)
    expected: dict[int, list[list[tuple[int, int, int, int]]]] = {}
    for first in range(0, len(sizes), per_group):
        alone = rows_by_length(build(lengths[first : first + per_group], mode))
        first_token, is_last = int(lengths[:first].sum()), first + per_group >= len(sizes)
        for length, rows in alone.items():
            moved = [[(d + first, start + first_token, n, labels) for d, start, n, labels in row] for row in rows]
            if mode == "concat" and not is_last:
                d, start, n, labels = moved[-1][-1]
                moved[-1][-1] = (d, start, n, labels + 1)  # its last token is followed by the next group's first
            expected.setdefault(length, []).extend(moved)
    index = build(lengths, mode, documents_per_group=per_group)
    assert rows_by_length(index) == expected
    assert index.valid.tolist() == [sum(labels for *_, labels in row) for row in rows_of(index)]
    assert index.documents_per_group == (per_group if per_group < len(sizes) else None)


@pytest.mark.parametrize("mode", MODES)
@given(sizes=SIZES, per_group=st.integers(1, 70))
def test_every_token_stands_in_exactly_one_row(mode: PackMode, sizes: list[int], per_group: int) -> None:
    index = build(np.array(sizes), mode, documents_per_group=per_group)
    covered = np.concatenate([np.arange(a, a + n) for a, n in zip(index.start, index.length, strict=True)])
    assert np.array_equal(np.sort(covered), np.arange(sum(sizes)))
    ends = np.cumsum(sizes)[index.document]
    assert ((index.start + index.length <= ends) & (index.start >= ends - np.array(sizes)[index.document])).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_files_are_the_same_for_any_number_of_workers(mode: PackMode, workers: int, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 500)
    expected = build(lengths, mode, documents_per_group=64)
    options = {"seq_len": SEQ_LEN, "mode": mode, "min_seq_len": MIN_SEQ_LEN if mode == "buckets" else None}
    write_pack(lengths, tmp_path / "pack", documents_per_group=64, workers=workers, **options)
    expected.save(tmp_path / "expected")
    written, wanted = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("pack", "expected"))
    assert written == wanted
    index = PackIndex.load(tmp_path / "pack")
    index.verify()
    assert index.documents_per_group == 64


def test_up_to_one_group_nothing_changes(tmp_path: Path) -> None:
    lengths = np.arange(1, 65)
    for name, per_group in (("one", 64), ("more", 65)):
        write_pack(lengths, tmp_path / name, seq_len=SEQ_LEN, mode="bfd", documents_per_group=per_group)
    contents = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "more")]
    assert contents[0] == contents[1]
    assert b"documents_per_group" not in contents[0]["pack.json"]
    assert build(lengths, "bfd").fingerprint == PackIndex.load(tmp_path / "one").fingerprint


def test_lengths_of_a_store_are_read_by_ranges(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([5, 7, 300, 2, 900, 11, 1], shard_documents=2)
    assert len(store.manifest.shards) > 2
    lengths = StoreLengths(store)
    for first in range(8):
        for last in range(first, 10):
            assert lengths[first:last].tolist() == store.lengths[first:last].tolist()
    groups = list(iter_groups(lengths, 3))
    assert [(g.first_document, g.first_token, g.ends_store) for g in groups] == [
        (0, 0, False),
        (3, 312, False),
        (6, 1225, True),
    ]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_data import storage

    written = 0

    def write(file: object, content: bytes | memoryview) -> None:
        nonlocal written
        written += len(content)
        if written > 9000:
            raise OSError(28, "No space left on device")
        file.write(content)  # pyright: ignore[reportAttributeAccessIssue]

    for module in ("lt_data.storage", "lt_data.packing.pack_writer"):
        monkeypatch.setattr(f"{module}.write", write)
    with pytest.raises(DataError, match=r"cannot write .*No space left"):
        write_pack(np.full(600, 9), tmp_path / "pack", seq_len=16, mode="bfd", documents_per_group=50)
    assert list(tmp_path.iterdir()) == []
    assert storage.write is write
