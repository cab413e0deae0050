"""Saves in the background of training: the same checkpoints, no failure lost, and no exit before the save in flight."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointError
from lt_test_helpers.runs import losses, run
from lt_trainer.checkpointing import checkpoints as saver_module
from lt_trainer.config.recipe import load
from lt_trainer.control import Control
from lt_trainer.errors import RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl

SOON_S = 60
BACKGROUND = "checkpoint.async_save=true"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lt-ckpt")] == []


def start(base, *overrides: str, **options) -> int:
    return run(load(base=base, overrides=["run.engine=fake", BACKGROUND, *overrides]), environ={}, **options)


def out(base) -> Path:
    return Path(base["run"]["dir"])


def steps_saved(base) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out(base) / "checkpoints").iterdir() if path.name[0] != ".")


def unfinished(base) -> list[str]:
    return [path.name for path in (out(base) / "checkpoints").iterdir() if path.name[0] == "."]


def events(base, *kinds: str) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in read_jsonl(out(base) / "events.jsonl") if e["event"] in kinds]


@contextmanager
def disk_that_waits(monkeypatch) -> Iterator[SimpleNamespace]:
    """What background threads write does not reach the disk before `go_on`; `error` is what the disk says then."""
    disk, real = SimpleNamespace(go_on=threading.Event(), error=0), os.fsync

    def fsync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert disk.go_on.wait(SOON_S)
            if disk.error:
                raise OSError(disk.error, os.strerror(disk.error))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            yield disk
        finally:
            disk.go_on.set()


def threads_end() -> None:
    """Wait until no save is being written."""
    deadline = time.monotonic() + SOON_S
    while any(thread.name == "lt-ckpt-save" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def at_call(number: int, action: Callable[[], object]) -> Callable[[int], None]:
    def on_step(call: int) -> None:
        if call == number:
            action()

    return on_step


def available(monkeypatch, n_bytes: int) -> None:
    """This machine has so much memory available."""
    memory = SimpleNamespace(available=n_bytes)
    monkeypatch.setattr(saver_module, "psutil", SimpleNamespace(virtual_memory=lambda: memory))


def soon(disk: SimpleNamespace) -> None:
    """The disk goes on a moment later, when the main thread waits for it."""
    timer = threading.Timer(0.2, disk.go_on.set)
    timer.daemon = True
    timer.start()


def test_the_same_losses_and_the_same_checkpoints(recipe_base, fake_engine, tmp_path) -> None:
    assert start(recipe_base, "checkpoint.async_save=false", "checkpoint.keep_last=9") == 0
    wanted, foreground = losses(recipe_base), out(recipe_base) / "checkpoints"
    recipe_base["run"]["dir"] = str(tmp_path / "background")
    assert start(recipe_base, "checkpoint.keep_last=9") == 0
    assert losses(recipe_base) == wanted
    assert steps_saved(recipe_base) == [6, 12, 18, 20]
    assert unfinished(recipe_base) == []
    for step in (6, 12, 18, 20):
        ours, theirs = (
            Checkpoint.open(folder / f"step-{step:08}") for folder in (out(recipe_base) / "checkpoints", foreground)
        )
        assert ours.read("weights", "w").tobytes() == theirs.read("weights", "w").tobytes()
        assert ours.manifest.tensors == theirs.manifest.tensors
        assert ours.manifest.scalars == theirs.manifest.scalars
        assert ours.manifest.data == theirs.manifest.data
        assert ours.tokenizer_files() == theirs.tokenizer_files()


def test_training_goes_on_meanwhile_and_what_is_committed_is_told(recipe_base, fake_engine, monkeypatch) -> None:
    """The save after step 6 takes until step 9; the weights of step 6 are what it holds."""
    seen = []

    def look() -> None:
        seen.append((steps_saved(recipe_base), len(unfinished(recipe_base)), events(recipe_base, "checkpoint")))
        disk.go_on.set()
        threads_end()

    fake_engine.on_step = at_call(9, look)
    with disk_that_waits(monkeypatch) as disk:
        assert start(recipe_base, "checkpoint.keep_last=9") == 0
    assert seen == [([], 1, [])]
    assert events(recipe_base, "checkpoint") == [("checkpoint", step) for step in (6, 12, 18, 20)]
    saved = Checkpoint.open(out(recipe_base) / "checkpoints" / "step-00000006")
    assert saved.manifest.scalars == {"optimizer_step": 6}
    assert float(np.abs(saved.read("weights", "w").view(np.float64)).sum()) == losses(recipe_base)[6]


def test_retention_after_each_save(recipe_base, fake_engine) -> None:
    held = []
    fake_engine.on_step = lambda call: (threads_end(), held.append(steps_saved(recipe_base)))
    assert start(recipe_base, "checkpoint.interval=2", "checkpoint.keep_last=2", "checkpoint.keep_every=8") == 0
    assert held[::2] == [[], [2], [2, 4], [4, 6], [6, 8], [8, 10], [8, 10, 12], [8, 12, 14], [8, 14, 16], [8, 16, 18]]
    assert steps_saved(recipe_base) == [8, 16, 18, 20]


@pytest.mark.parametrize("stops", [False, True])
def test_a_failure_ends_the_run_at_the_next_step(recipe_base, fake_engine, monkeypatch, stops) -> None:
    def fill() -> None:
        disk.error = errno.ENOSPC
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)
            soon(disk)
        else:
            disk.go_on.set()
            threads_end()

    fake_engine.on_step = at_call(8, fill)
    message = r"step-00000006-\w+: writing the files of rank 0 failed: No space left on device"
    with disk_that_waits(monkeypatch) as disk, pytest.raises(CheckpointError, match=message):
        start(recipe_base)
    assert max(losses(recipe_base)) == (8 if stops else 7)  # at once, the step under way is not read any more
    assert fake_engine.opened[-1].calls == 8
    assert steps_saved(recipe_base) == unfinished(recipe_base) == []
    fake_engine.on_step = lambda call: None
    assert start(recipe_base) == 0


def test_a_commit_that_fails_ends_the_run_too(recipe_base, fake_engine, monkeypatch) -> None:
    """Somebody has put a folder with that step's name there, and it is a valid checkpoint."""
    assert start(recipe_base, "schedule.max_steps=6", "schedule.warmup_steps=2") == 0
    there = out(recipe_base) / "checkpoints" / "step-00000006"
    there.rename(out(recipe_base) / "checkpoints" / "kept")
    fake_engine.on_step = at_call(5, lambda: there.with_name("kept").rename(there))
    with pytest.raises(CheckpointError, match="a valid checkpoint of this step already exists"):
        start(recipe_base, "checkpoint.interval=6")
    assert unfinished(recipe_base) == []
    fake_engine.on_step = lambda call: None
    assert start(recipe_base) == 0


def test_a_stop_and_the_end_wait_for_the_save_in_flight(recipe_base, fake_engine, monkeypatch) -> None:
    fake_engine.on_step = at_call(8, lambda: (os.kill(os.getpid(), signal.SIGTERM), soon(disk)))
    with disk_that_waits(monkeypatch) as disk:
        assert start(recipe_base) == 75
    assert events(recipe_base, "checkpoint", "stop") == [("checkpoint", 6), ("checkpoint", 8), ("stop", 8)]
    fake_engine.on_step = at_call(12, lambda: soon(disk))
    with disk_that_waits(monkeypatch) as disk:
        assert start(recipe_base, "checkpoint.interval=19") == 0
    assert events(recipe_base, "checkpoint", "completed")[2:] == [
        ("checkpoint", 19),
        ("checkpoint", 20),
        ("completed", 20),
    ]


def test_a_way_back_waits_for_the_save_in_flight(recipe_base, fake_engine, monkeypatch) -> None:
    """Else there would be nothing to go back to."""
    fake_engine.poison = lambda call, batch: call in (8, 9, 10)
    fake_engine.on_step = at_call(10, lambda: soon(disk))
    with disk_that_waits(monkeypatch) as disk:
        assert start(recipe_base, "fault_tolerance.max_skipped_steps=2") == 0
    assert events(recipe_base, "rollback") == [("rollback", 6)]
    assert events(recipe_base, "checkpoint")[0] == ("checkpoint", 6)


class Broken(Exception):
    """An error of the engine."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_waits_for_the_save_in_flight_and_is_told_first(recipe_base, fake_engine, monkeypatch, fails) -> None:
    def break_down() -> None:
        disk.error = errno.ENOSPC if fails else 0
        soon(disk)
        raise Broken("lost the device")

    fake_engine.on_step = at_call(8, break_down)
    with disk_that_waits(monkeypatch) as disk, pytest.raises(Broken) as caught:
        start(recipe_base)
    if fails:
        (note,) = caught.value.__notes__
        assert note.startswith("the save in flight, of step 6, failed: ")
        assert "No space left on device" in note
        assert "No space left on device" in (out(recipe_base) / "logs" / "rank00000.log").read_text()
        return
    assert steps_saved(recipe_base) == [6]
    assert events(recipe_base, "checkpoint") == [("checkpoint", 6)]


def test_too_little_memory_is_refused_before_the_first_step(recipe_base, fake_engine, monkeypatch) -> None:
    """Eight ranks of a node share its memory: each alone would fit."""

    def no_memory(n_bytes: int):
        raise MemoryError("CUDA cannot lock 128 bytes of host memory (error 2)")

    remedy = ".*set checkpoint.async_save to false"
    monkeypatch.setattr(Control, "all_gather", lambda self, value: [value] * 8)
    available(monkeypatch, 8 * 128 - 1)
    with pytest.raises(RecipeError, match=r"async_save = true.*: 8 rank\(s\) need 0\.00 GiB on .*" + remedy):
        start(recipe_base)
    assert fake_engine.opened[-1].calls == 0
    available(monkeypatch, 8 * 128)
    assert start(recipe_base) == start(recipe_base, "checkpoint.async_save=false") == 0
    real = fake_engine.open
    monkeypatch.setattr(fake_engine, "open", lambda *args: change(real(*args)))

    def change(engine):
        engine.allocate_host_memory = no_memory
        return engine

    with pytest.raises(RecipeError, match=r"copy of the state: CUDA cannot lock 128 bytes" + remedy):
        start(recipe_base)
