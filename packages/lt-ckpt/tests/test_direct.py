"""Big files past the page cache: the same bytes, whatever the file system says to it."""

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading

import pytest

from lt_ckpt import direct_io
from lt_ckpt.direct_io import DirectFileWriter, direct_io_unsupported_reason, enable_direct_io

BLOCK = 8 * direct_io.ALIGN


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct_io, "MIN_DIRECT_BYTES", 2 * direct_io.ALIGN)
    monkeypatch.setattr(direct_io, "_unsupported_devices", {})
    monkeypatch.setattr(direct_io, "COALESCE_BYTES", 3 * direct_io.ALIGN)
    monkeypatch.setattr(direct_io, "WRITER_THREADS", 1)  # one order of writes
    monkeypatch.setattr(direct_io, "_free_blocks", [])
    monkeypatch.setattr(direct_io, "_writer_pool", direct_io._WriterPool())
    before = threading.active_count()
    yield
    assert threading.active_count() == before, "a thread is left"
    for given, number in (
        (direct_io._writer_pool.free_blocks, direct_io.MAX_BLOCKS),
        (direct_io._writer_pool.block_owners, direct_io.MAX_BLOCK_OWNERS),
    ):
        assert [given.acquire(blocking=False) for _ in range(number + 1)] == [True] * number + [False]


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system that takes O_DIRECT and means it."""
    (tmp_path / "probe").write_bytes(bytes(8192))
    descriptor = os.open(tmp_path / "probe", os.O_RDONLY)
    try:
        if not enable_direct_io(descriptor):
            pytest.skip("no file system with O_DIRECT here: real direct writes did not run")
        try:
            os.preadv(descriptor, [bytearray(100)], 1)
        except OSError:
            return tmp_path
    finally:
        os.close(descriptor)
    pytest.skip("the temporary folder's file system takes unaligned O_DIRECT: real direct writes did not run")


def write(path, data, cuts):
    file = DirectFileWriter(path, len(data))
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            file.write(data[begin:end])
        file.sync()
    finally:
        file.close()


@pytest.fixture
def log(monkeypatch):
    """What went into files: (call, direct or not, bytes, position)."""
    found = []
    real_write, real_pwrite = os.write, os.pwrite

    def is_direct(descriptor):
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))

    def write(descriptor, data):
        found.append(("write", is_direct(descriptor), len(data), None))
        return real_write(descriptor, data)

    def pwrite(descriptor, data, position):
        found.append(("pwrite", is_direct(descriptor), len(data), position))
        return real_pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return found


@pytest.mark.parametrize("extra", [0, 1, 4095, 4096, 4097, BLOCK - 1])
def test_blocks_go_directly_and_the_tail_behind_them(disk, log, extra):
    data = random.Random(extra).randbytes(3 * BLOCK + extra)
    write(disk / "x", data, [])
    assert (disk / "x").read_bytes() == data
    assert direct_io._unsupported_devices == {}
    aligned, tail = extra - extra % 4096, extra % 4096
    wanted = [("pwrite", True, BLOCK, i * BLOCK) for i in range(3)]
    wanted += [("pwrite", True, aligned, 3 * BLOCK)] if aligned else []
    wanted += [("pwrite", False, tail, 3 * BLOCK + aligned)] if tail else []
    assert log == wanted


@pytest.mark.parametrize("holders", [8, 0])
@pytest.mark.parametrize("seed", range(10))
def test_bytes_come_in_any_parts(disk, seed, holders, monkeypatch):
    monkeypatch.setattr(direct_io, "WRITER_THREADS", 3)
    monkeypatch.setattr(direct_io, "MAX_BLOCK_OWNERS", holders)
    monkeypatch.setattr(direct_io, "_writer_pool", direct_io._WriterPool())
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(1, 6 * BLOCK))
    write(disk / "x", data, sorted(rng.choices(range(len(data) + 1), k=rng.randrange(12))))
    assert (disk / "x").read_bytes() == data


def test_the_system_may_take_them_in_parts_too(disk, monkeypatch):
    """Halves that are aligned, and in the end one that is not: the rest then goes through the page cache."""
    real, sizes = os.pwrite, []

    def half(descriptor, view, position):
        sizes.append(len(view))
        return real(descriptor, view[: 4096 if len(view) == 8192 else len(view) // 2] or view, position)

    monkeypatch.setattr(os, "pwrite", half)
    data = random.Random(0).randbytes(4 * BLOCK + 5)

    write(disk / "x", data, [])
    assert (disk / "x").read_bytes() == data
    assert sizes[:3] == [BLOCK, BLOCK // 2, BLOCK // 4]


def test_small_files_have_no_thread(tmp_path, log):
    data = bytes(range(256)) * 31
    write(tmp_path / "x", data, [10])
    assert (tmp_path / "x").read_bytes() == data
    assert log == [("write", False, 10, None), ("write", False, len(data) - 10, None)]


def test_a_file_system_that_refuses_is_asked_once(tmp_path, log, monkeypatch):
    real, asked = fcntl.fcntl, []

    def refuse(descriptor, command, *value):
        if command == fcntl.F_SETFL:
            asked.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, *value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = random.Random(0).randbytes(2 * BLOCK + 3)
    for name in "ab":
        write(tmp_path / name, data, [BLOCK])
        assert (tmp_path / name).read_bytes() == data
    assert len(asked) == 1
    assert {(call, is_direct) for call, is_direct, _, _ in log} == {("write", False)}
    assert direct_io_unsupported_reason(tmp_path / "a") == "its file system refuses O_DIRECT (Invalid argument)"


def test_a_file_system_that_refuses_late(tmp_path, monkeypatch):
    """Some say yes and then refuse the write itself."""
    monkeypatch.setattr(
        direct_io,
        "enable_direct_io",
        lambda descriptor: os.fstat(descriptor).st_dev not in direct_io._unsupported_devices,
    )
    real, refused = os.pwrite, []

    def pwrite(descriptor, view, position):
        if not refused:
            refused.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = random.Random(0).randbytes(2 * BLOCK + 3)
    for name in "ab":
        write(tmp_path / name, data, [])
        assert (tmp_path / name).read_bytes() == data
    assert refused == [0]
    assert "refuses O_DIRECT" in direct_io_unsupported_reason(tmp_path / "a")


def test_a_system_without_direct_writes(tmp_path, log, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    data = random.Random(0).randbytes(2 * BLOCK + 3)
    file = DirectFileWriter(tmp_path / "x", len(data))
    file.write(data)
    file.sync()
    file.close()
    assert (tmp_path / "x").read_bytes() == data
    assert direct_io_unsupported_reason(tmp_path / "x") == f"{os.uname().sysname} has no O_DIRECT"


def test_another_error_is_no_refusal(tmp_path, monkeypatch):
    file = DirectFileWriter(tmp_path / "x", 2 * BLOCK)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match="Input/output"):
        file.write(bytes(2 * BLOCK))
    file.close()
    assert direct_io._unsupported_devices == {}


def test_a_failed_write_is_raised_and_nothing_is_written_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "enable_direct_io", lambda descriptor: True)
    monkeypatch.setattr(direct_io, "disable_direct_io", lambda descriptor: None)
    calls = []

    def full(descriptor, view, position):
        calls.append(position)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    file = DirectFileWriter(tmp_path / "x", 100 * BLOCK)
    with pytest.raises(OSError, match="No space"):
        file.write(bytes(90 * BLOCK))
    with pytest.raises(OSError, match="No space"):  # it stays so
        file.write(bytes(BLOCK * 4))
    file.close()
    assert calls == [0]
    file = DirectFileWriter(tmp_path / "y", BLOCK)
    with pytest.raises(OSError, match="No space"):  # at the last byte at the latest
        file.write(bytes(BLOCK))
    file.close()


def test_a_file_that_is_given_up_is_not_written_on(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "enable_direct_io", lambda descriptor: True)
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow(descriptor, view, position):
        calls.append(position)
        begun.set()
        assert go_on.wait(60)
        return len(view)

    monkeypatch.setattr(os, "pwrite", slow)
    file = DirectFileWriter(tmp_path / "x", 10 * BLOCK)
    file.write(bytes(3 * BLOCK))
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    file.close()
    assert len(calls) < 3
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_memory_is_bounded_however_many_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "WRITER_THREADS", 3)
    monkeypatch.setattr(direct_io, "enable_direct_io", lambda descriptor: True)
    monkeypatch.setattr(direct_io, "disable_direct_io", lambda descriptor: None)
    taken = []
    real = direct_io.acquire_block
    monkeypatch.setattr(direct_io, "acquire_block", lambda n_bytes: taken.append(real(n_bytes)) or taken[-1])
    data = [random.Random(i).randbytes(5 * BLOCK + i) for i in range(40)]
    opened = [DirectFileWriter(tmp_path / f"{i}", len(d)) for i, d in enumerate(data)]
    for file, d in zip(opened, data, strict=True):
        file.write(d[:100])  # their headers: nothing is taken for these
    assert taken == []
    for begin in range(100, 6 * BLOCK, 1000):
        for file, d in zip(opened, data, strict=True):
            if d[begin : begin + 1000]:
                file.write(d[begin : begin + 1000])
    for file in opened:
        file.sync()
        file.close()
    assert [(tmp_path / f"{i}").read_bytes() == d for i, d in enumerate(data)] == [True] * 40
    assert len({id(block) for block in taken}) <= direct_io.MAX_BLOCKS
    assert len(direct_io._free_blocks) <= direct_io.MAX_BLOCKS


def test_blocks_are_aligned_and_used_again():
    block = direct_io.acquire_block(BLOCK)
    assert (block.dtype, len(block), block.ctypes.data % direct_io.HUGE_PAGE_BYTES) == ("uint8", BLOCK, 0)
    direct_io.release_block(block)
    assert direct_io.acquire_block(2 * BLOCK) is not block
    assert direct_io.acquire_block(BLOCK) is block
    assert direct_io.acquire_block(BLOCK) is not block


def test_a_finished_file_makes_room_for_the_next(disk, log):
    """Files that are all open at once, but are filled one after the other, are all written directly."""
    data = [random.Random(i).randbytes(2 * BLOCK) for i in range(5)]
    opened = [DirectFileWriter(disk / f"{i}", len(d)) for i, d in enumerate(data)]
    for file, d in zip(opened, data, strict=True):
        file.write(d[:8])
    for file, d in zip(opened, data, strict=True):
        file.write(d[8:])
    for file in opened:
        file.sync()
        file.close()
    assert [(disk / f"{i}").read_bytes() == d for i, d in enumerate(data)] == [True] * 5
    assert {(call, is_direct) for call, is_direct, _, _ in log} == {("pwrite", True)}


def test_all_bytes_must_come_and_no_more(tmp_path):
    for n_bytes in (10, 3 * BLOCK):
        file = DirectFileWriter(tmp_path / f"{n_bytes}", n_bytes)
        file.write(bytes(5))
        with pytest.raises(AssertionError):
            file.sync()
        with pytest.raises(AssertionError):
            file.write(bytes(n_bytes))
        file.close()


def test_a_forked_process_has_blocks_of_its_own():
    code = """
import os
from lt_ckpt import direct_io
block = direct_io.acquire_block(4096)
block[:4] = 1
direct_io.release_block(block)
pid = os.fork()
if pid == 0:
    direct_io.acquire_block(4096)[:4] = 2
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert block[:4].tolist() == [1] * 4, block[:4]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
