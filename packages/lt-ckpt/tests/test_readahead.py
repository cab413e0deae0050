"""Big reads: the right bytes in the right buffers, wherever they lie, and errors that name the file."""

import errno
import fcntl
import os
import random
import threading
from contextlib import closing

import pytest

from lt_ckpt import CheckpointError, direct_io, readahead
from lt_ckpt.readahead import FileRange, ReadRange, read_ahead, read_ranges

BLOCK = 2 * direct_io.ALIGN


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(readahead, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct_io, "_unsupported_devices", {})
    monkeypatch.setattr(direct_io, "_free_blocks", [])
    before = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    yield
    after = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert after == before, "a thread or a descriptor is left"


@pytest.fixture(params=["as it is", "refused", "refused late", "no O_DIRECT", "in parts"])
def reading(request, monkeypatch):
    real_fcntl, real_preadv, late = fcntl.fcntl, os.preadv, []

    def refuse(descriptor, command, *value):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(descriptor, command, *value)

    def refuse_late(descriptor, buffers, position):
        if not late:
            late.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(descriptor, buffers, position)

    def in_parts(descriptor, buffers, position):
        (buffer,) = buffers
        return real_preadv(descriptor, [buffer[: 4096 if len(buffer) > 4096 else len(buffer)]], position)

    match request.param:
        case "refused":
            monkeypatch.setattr(fcntl, "fcntl", refuse)
        case "refused late":
            monkeypatch.setattr(os, "preadv", refuse_late)
        case "no O_DIRECT":
            monkeypatch.delattr(os, "O_DIRECT", raising=False)
        case "in parts":
            monkeypatch.setattr(os, "preadv", in_parts)
    return request.param


@pytest.mark.parametrize("seed", range(6))
def test_any_runs_of_any_files(tmp_path, reading, seed):
    rng = random.Random(seed)
    data = [rng.randbytes(rng.randrange(1, 9 * BLOCK)) for _ in range(3)]
    for i, d in enumerate(data):
        (tmp_path / f"{i}").write_bytes(d)
    runs, wanted = [], []
    for _ in range(rng.randrange(1, 30)):
        i = rng.randrange(3)
        begin = rng.randrange(len(data[i]))
        end = min(len(data[i]), begin + rng.choice([0, 1, 100, 4096, BLOCK, 3 * BLOCK]))
        runs.append(ReadRange(tmp_path / f"{i}", begin, memoryview(bytearray(end - begin))))
        wanted.append(data[i][begin:end])
    read_ranges(runs)
    assert [bytes(run.buffer) for run in runs] == wanted


def test_the_disk_is_asked_for_aligned_blocks(tmp_path, monkeypatch):
    data = random.Random(0).randbytes(7 * BLOCK + 5)
    (tmp_path / "x").write_bytes(data)
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    takes_it = direct_io.enable_direct_io(descriptor)
    os.close(descriptor)
    if not takes_it:
        pytest.skip("no file system with O_DIRECT here: real direct reads did not run")
    real, asked = os.preadv, []

    def preadv(descriptor, buffers, position):
        asked.append((fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0, position, len(buffers[0])))
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = memoryview(bytearray(5 * BLOCK))
    read_ranges([ReadRange(tmp_path / "x", 2 * BLOCK + 5, buffer)])
    assert buffer == data[2 * BLOCK + 5 :]
    assert sorted(asked) == [*((True, i * BLOCK, BLOCK) for i in range(2, 7)), (True, 7 * BLOCK, direct_io.ALIGN)]
    assert direct_io._unsupported_devices == {}


@pytest.mark.parametrize("seed", range(3))
def test_stretches_come_in_order(tmp_path, reading, seed):
    rng = random.Random(seed)
    data = rng.randbytes(9 * BLOCK + 77)
    (tmp_path / "x").write_bytes(data)
    stretches = [FileRange(tmp_path / "x", rng.randrange(5 * BLOCK), rng.randrange(4 * BLOCK)) for _ in range(5)]
    found = [b""] * 5
    last = -1
    with closing(read_ahead(stretches)) as blocks:
        for index, position, view in blocks:
            assert index >= last
            assert position == stretches[index].byte_offset + len(found[index])
            found[index] += view
            last = index
    assert found == [data[s.byte_offset : s.byte_offset + s.n_bytes] for s in stretches]


def test_a_block_is_the_callers_until_the_next_one(tmp_path):
    data = random.Random(0).randbytes(12 * BLOCK)
    (tmp_path / "x").write_bytes(data)
    with closing(read_ahead([FileRange(tmp_path / "x", 0, len(data))])) as blocks:
        for _, position, view in blocks:
            others = [direct_io.acquire_block(BLOCK) for _ in range(len(direct_io._free_blocks))]
            for block in others:
                block[:] = 0
                direct_io.release_block(block)
            assert view == data[position : position + len(view)]


def test_reads_run_ahead_but_not_far(tmp_path, monkeypatch):
    n_blocks, begun = 20, []
    (tmp_path / "x").write_bytes(bytes(n_blocks * BLOCK))
    real = os.preadv
    all_there = threading.Barrier(readahead.READER_THREADS)

    def preadv(descriptor, buffers, position):
        begun.append(position)
        if position < readahead.READER_THREADS * BLOCK:
            all_there.wait(60)  # only passed when so many are in flight at once
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    with closing(read_ahead([FileRange(tmp_path / "x", 0, n_blocks * BLOCK)])) as blocks:
        for number, _ in enumerate(blocks):
            assert max(begun) <= (number + readahead.READER_THREADS) * BLOCK
    assert sorted(begun) == [i * BLOCK for i in range(n_blocks)]


@pytest.mark.parametrize("n_bytes", [0, 5, 4096, 5000, BLOCK, 3 * BLOCK, 3 * BLOCK + 1])
def test_a_file_that_ends_too_early(tmp_path, reading, n_bytes):
    (tmp_path / "x").write_bytes(bytes(n_bytes))
    buffer = memoryview(bytearray(5 * BLOCK))
    with pytest.raises(CheckpointError, match=rf"x: ends at byte {n_bytes}, at least \d+ are missing; .* truncated"):
        read_ranges([ReadRange(tmp_path / "x", 0, buffer)])


def test_errors_name_the_file(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(20 * BLOCK))
    runs = [ReadRange(tmp_path / name, 0, memoryview(bytearray(20 * BLOCK))) for name in ("x", "y")]
    with pytest.raises(CheckpointError, match="/y: reading failed: No such file"):
        read_ranges(runs)

    def fail(descriptor, buffers, position):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="/x: reading failed: Input/output error"):
        read_ranges(runs[:1])


def test_a_reader_may_stop_at_any_time(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(20 * BLOCK))
    stretches = [FileRange(tmp_path / name, 0, 20 * BLOCK) for name in "ab"]
    for stop_after in (0, 1, 19, 20, 21, 39):
        with closing(read_ahead(stretches)) as blocks:
            for number, _ in enumerate(blocks):
                if number == stop_after:
                    break
