import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_ckpt import (
    Checkpoint,
    CheckpointMetadata,
    ReadItem,
    Shard,
    begin_save,
    commit_save,
    files,
    verify,
    write_rank_files,
)
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
    return world, tensors, draw(st.integers(1, 64))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_sharding_is_read_back_by_any_slicing(memory, case):
    world, tensors, block_bytes = case
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
    with pytest.MonkeyPatch.context() as patch:  # small limits, so that slices are hashed in many blocks
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
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
