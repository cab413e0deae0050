import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    ReadItem,
    Shard,
    begin_save,
    commit_save,
    copy_plan,
    direct_io,
    integrity,
    readahead,
    verify,
    write_rank_files,
)
from lt_ckpt import checkpoint as checkpoint_module
from lt_ckpt.copy_plan import StoredSlice, plan_copies, run_copies
from lt_ckpt.dtypes import ITEM_BYTES


def split(draw, box, depth):
    """Cuts a box into random smaller ones, along any dimension, unevenly."""
    offset, shape = box
    dims = [d for d, n in enumerate(shape) if n > 1]
    if not dims or depth == 0 or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, shape[dim] - 1))
    left = (offset, (*shape[:dim], cut, *shape[dim + 1 :]))
    right = (
        (*offset[:dim], offset[dim] + cut, *offset[dim + 1 :]),
        (*shape[:dim], shape[dim] - cut, *shape[dim + 1 :]),
    )
    return split(draw, left, depth - 1) + split(draw, right, depth - 1)


@st.composite
def cases(draw):
    """Tensors with random shardings over ranks, and random slices to read."""
    world = draw(st.integers(1, 4))
    tensors = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        whole = ((0,) * len(shape), shape)
        pieces = [(box, draw(st.integers(0, world - 1))) for box in split(draw, whole, 3)]
        wants = []
        for _ in range(draw(st.integers(0, 3))):
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            wants.append((offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))))
        tensors.append((f"t{i}", draw(st.sampled_from(["weights", "exp_avg"])), dtype, shape, pieces, [whole, *wants]))
    return world, tensors, draw(st.integers(1, 64)), draw(st.integers(1, 64)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_sharding_is_read_back_by_any_slicing(memory, case):
    world, tensors, stage_bytes, run_bytes, big = case
    root = Path(tempfile.mkdtemp(dir=memory))
    rng = np.random.default_rng(0)
    arrays, per_rank = {}, {rank: [] for rank in range(world)}
    for name, group, dtype, shape, pieces, _ in tensors:
        array = rng.integers(0, 256, (*shape, ITEM_BYTES[dtype]), dtype=np.uint8)
        arrays[group, name] = array
        for (offset, size), rank in pieces:
            part = array[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            data = np.ascontiguousarray(part).reshape(-1)
            per_rank[rank].append(
                Shard(group=group, name=name, dtype=dtype, global_shape=shape, offset=offset, shape=size, data=data)
            )
    wants = [
        ReadItem(group=group, name=name, offset=offset, shape=shape)
        for name, group, _, _, _, boxes in tensors
        for offset, shape in boxes
    ]
    with pytest.MonkeyPatch.context() as patch:  # small limits, so that every way of copying is taken
        patch.setattr(copy_plan, "STAGING_BYTES", stage_bytes)
        patch.setattr(copy_plan, "MIN_RUN_BYTES", run_bytes)
        if big:
            patch.setattr(direct_io, "MIN_DIRECT_BYTES", 1)
            patch.setattr(direct_io, "BLOCK_BYTES", 256)
            patch.setattr(readahead, "BLOCK_BYTES", 128)
            patch.setattr(direct_io, "ALIGN", 16)
            patch.setattr(checkpoint_module, "MIN_DEFERRED_READ_BYTES", run_bytes)
            patch.setattr(checkpoint_module, "MIN_READ_AHEAD_BYTES", 1)
            patch.setattr(integrity, "MIN_READ_AHEAD_BYTES", 1)
        tmp = begin_save(root, step=1, world_size=world)
        for rank in reversed(range(world)):
            write_rank_files(tmp, rank=rank, shards=iter(per_rank[rank]))
        checkpoint = Checkpoint.open(commit_save(tmp, world_size=world, metadata=CheckpointMetadata(step=1)))
        assert verify(checkpoint.path).is_ok
        got = checkpoint.read_many(wants)
        into = [np.full_like(data, 255) for data in got]
        checkpoint.read_into(wants, into)
    assert all((a == b).all() for a, b in zip(got, into, strict=True))
    for want, data in zip(wants, got, strict=True):
        assert want.offset is not None
        assert want.shape is not None
        box = tuple(slice(o, o + n) for o, n in zip(want.offset, want.shape, strict=True))
        assert data.tobytes() == arrays[want.group, want.name][box].tobytes()


def test_copies_read_each_file_forwards_and_only_what_is_wanted():
    stored = [
        StoredSlice(file="b", byte_offset=100, offset=(0, 0), shape=(4, 8)),
        StoredSlice(file="a", byte_offset=50, offset=(4, 0), shape=(4, 8)),
    ]
    copies = plan_copies([(((2, 0), (4, 8)), stored, 2, "t"), (((0, 0), (1, 8)), stored, 2, "t")])
    assert [(copy.file, copy.first_byte, copy.shape) for copy in copies] == [
        ("a", 50, (2, 8)),
        ("b", 100, (1, 8)),
        ("b", 100 + 2 * 8 * 2, (2, 8)),
    ]
    reads = []
    targets = [np.empty(64, np.uint8), np.empty(16, np.uint8)]
    run_copies(copies, targets, lambda file, position, buffer: reads.append((file, position, len(buffer))))
    assert reads == [("a", 50, 32), ("b", 100, 16), ("b", 132, 32)]


def test_long_runs_are_read_without_what_lies_between_them():
    row = 4 * copy_plan.MIN_RUN_BYTES
    stored = [StoredSlice(file="f", byte_offset=0, offset=(0, 0), shape=(3, row))]
    copies = plan_copies([(((0, row // 2), (3, row // 2)), stored, 1, "t")])
    reads = []
    run_copies(copies, [np.empty(3 * row // 2, np.uint8)], lambda file, at, buffer: reads.append((at, len(buffer))))
    assert reads == [(row // 2 + i * row, row // 2) for i in range(3)]


def test_short_runs_are_read_as_rows_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr(copy_plan, "STAGING_BYTES", 1024)
    file = np.random.default_rng(1).integers(0, 256, 64 * 256, dtype=np.uint8)
    stored = [StoredSlice(file="f", byte_offset=0, offset=(0, 0), shape=(64, 256))]
    target, sizes = np.empty(64 * 3, np.uint8), []

    def read_at(_, position, buffer):
        sizes.append(len(buffer))
        buffer[:] = file[position : position + len(buffer)].data

    run_copies(plan_copies([(((0, 7), (64, 3)), stored, 1, "t")]), [target], read_at)
    assert (target.reshape(64, 3) == file.reshape(64, 256)[:, 7:10]).all()
    assert max(sizes) <= 1024
    assert sum(sizes) == file.size


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_matrix_whose_transpose_is_in_the_file_is_read_by_any_slicing(data):
    n, m = (data.draw(st.integers(1, 9)) for _ in "nm")
    file = np.random.default_rng(0).integers(0, 2**16, n * m, dtype=np.uint16)
    array = file.reshape(m, n).T  # the matrix; the file has its columns one after the other
    top, left = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, m - 1))
    rows, columns = data.draw(st.integers(1, n - top)), data.draw(st.integers(1, m - left))
    tensor = array[top : top + rows, left : left + columns]
    stored = StoredSlice(
        file="f",
        byte_offset=0,
        offset=(0, 0),
        shape=(rows, columns),
        array_shape=(n, m),
        array_offset=(top, left),
        transposed=True,
    )
    start, first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    shape = data.draw(st.integers(1, rows - start)), data.draw(st.integers(1, columns - first))
    target, raw = np.zeros(2 * shape[0] * shape[1], np.uint8), file.view(np.uint8)

    def read_at(_, position, buffer):
        assert position + len(buffer) <= raw.size
        buffer[:] = raw[position : position + len(buffer)].data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_plan, "STAGING_BYTES", data.draw(st.integers(1, 64)))
        run_copies(plan_copies([(((start, first), shape), [stored], 2, "t")]), [target], read_at)
    wanted = tensor[start : start + shape[0], first : first + shape[1]]
    assert target.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_a_hole_is_an_error_before_anything_is_read():
    stored = [StoredSlice(file="f", byte_offset=0, offset=(0,), shape=(3,))]
    with pytest.raises(CheckpointError, match="t: 2 of the 3 requested elements at offset"):
        plan_copies([(((1,), (3,)), stored, 4, "t")])


def test_columns_of_a_wide_tensor_match_numpy(tmp_path):
    array = np.arange(300 * 400, dtype="<f4").reshape(300, 400)
    shards = [
        Shard(
            group="weights",
            name="w",
            dtype="F32",
            global_shape=(300, 400),
            offset=(0, 100 * rank),
            shape=(300, 100),
            data=np.ascontiguousarray(array[:, 100 * rank : 100 * rank + 100]).reshape(-1).view(np.uint8),
        )
        for rank in range(4)
    ]
    tmp = begin_save(tmp_path, step=0, world_size=4)
    for rank, shard in enumerate(shards):
        write_rank_files(tmp, rank=rank, shards=[shard])
    checkpoint = Checkpoint.open(commit_save(tmp, world_size=4, metadata=CheckpointMetadata(step=0)))
    got = checkpoint.read("weights", "w", offset=(17, 50), shape=(200, 333)).view("<f4").reshape(200, 333)
    assert (got == array[17:217, 50:383]).all()
    assert checkpoint.read("weights", "w", offset=(299, 398)).size == math.prod((1, 2)) * 4
    for bad in ({"offset": (0, 399), "shape": (1, 2)}, {"offset": (0,)}, {"shape": (300,)}, {"offset": (301, 0)}):
        with pytest.raises(CheckpointError, match="does not lie"):
            checkpoint.read("weights", "w", **bad)


def test_targets_must_fit(tmp_path, toy):
    checkpoint = Checkpoint.open(toy.save(tmp_path, 1))
    want = ReadItem(group="weights", name="norm")
    good = np.zeros(12, np.uint8)
    checkpoint.read_into([want], [good])
    assert good.tobytes() == toy.state(1)["weights", "norm"][1].tobytes()
    for wrong in (
        np.zeros(11, np.uint8),
        np.zeros(3, np.float32),
        np.zeros((2, 6), np.uint8),
        np.zeros(24, np.uint8)[::2],
    ):
        with pytest.raises(CheckpointError, match=r"weights/norm: needs a target of 12 contiguous bytes"):
            checkpoint.read_into([want], [wrong])


def test_big_tensors_are_read_ahead_in_one_pass(fast_path, monkeypatch):
    """Neighbors in a file are read together, with no byte read twice but those of a shared block."""
    monkeypatch.setattr(checkpoint_module, "MIN_READ_AHEAD_BYTES", 2**20)
    data = [np.random.default_rng(i).integers(0, 256, 600_000 + i, dtype=np.uint8) for i in range(4)]
    tmp = begin_save(fast_path, step=1, world_size=1)
    shards = [
        Shard(group="weights", name=f"{i}", dtype="U8", global_shape=d.shape, offset=(0,), shape=d.shape, data=d)
        for i, d in enumerate(data)
    ]
    write_rank_files(tmp, rank=0, shards=shards)
    checkpoint = Checkpoint.open(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=1)))
    real, reads = os.preadv, []

    def preadv(descriptor, buffers, position):
        reads.append(len(buffers[0]))
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    got = checkpoint.read_many([ReadItem(group="weights", name=f"{i}") for i in range(4)])
    assert [(a == b).all() for a, b in zip(got, data, strict=True)] == [True] * 4
    assert len(reads) == -(-sum(reads) // readahead.BLOCK_BYTES) == 2
    assert sum(reads) <= sum(d.nbytes for d in data) + 2 * direct_io.ALIGN
