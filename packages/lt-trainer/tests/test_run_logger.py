"""Run logger: fields of records, rates of the last interval, time by part, energy, what a terminal shows."""

import errno
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lt_model import ModelConfig
from lt_model.config import LayerKind
from lt_test_helpers.runs import run
from lt_trainer.checkpointing.checkpoints import Checkpoints
from lt_trainer.config.recipe import load
from lt_trainer.data.batches import StreamBatches
from lt_trainer.engine import STEP_PARTS, Device, Stopwatch, Topology
from lt_trainer.errors import RecipeError
from lt_trainer.observability.run_display import HEADER
from lt_trainer.observability.run_logger import ComputeCost, RunLogger
from lt_trainer.run_directory.jsonl import RankLog, format_record, read_jsonl
from lt_trainer.run_directory.records import StepRecord
from lt_trainer.run_directory.run_dir import RunDir


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class FakeMonitor:
    has_gpus = True

    def __init__(self, joules: float | None) -> None:
        self.value = joules
        self.energy_joules, self.scalars = lambda: self.value, dict


def step(number: int, rows: int, document_length: float = 10.0) -> StepRecord:
    values = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "valid_tokens": 9}
    return StepRecord(step=number, rows=rows, document_length=document_length, **values)  # type: ignore[arg-type]


@contextmanager
def logger(folder: Path, clock: Clock, *, monitor: Any = None, last_step: int = 0, **cost: Any) -> Iterator[RunLogger]:
    """A logger of two devices, whose run has just been restored."""
    device = Device(name="d", kind="cpu", count=2, peak_flops=1000.0, peak_source="made up")
    work = ComputeCost(**({"micro_batch_size": 4, "seq_len": 10, "flops_per_token": 3.0} | cost))
    with (
        RunDir.open(folder) as run_dir,
        RankLog(folder, 0) as log,
        RunLogger(run_dir, log, device, work, last_step=last_step, monitor=monitor, clock=clock) as made,
    ):
        with made.pause("restoring"):
            clock.now += 1000.0
        yield made


def records(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


# ---- rows, rates, recomputation ----


def test_rates_are_those_of_the_rows_since_the_last_record_without_pauses(tmp_path: Path) -> None:
    """A slow start, which compiles, is in no later rate.

    Of 3 FLOPs per token, 2 are attention over 10 positions; positions see 4 and 8 of them on average.
    """
    clock = Clock()
    with logger(tmp_path, clock, attention_flops=lambda seen: 0.2 * seen, recomputed_flops_per_token=1.0) as one:
        clock.now += 5.0
        one.log_steps([step(1, 8, 4.0), step(2, 24, 8.0)], 0, {})
        for _ in range(2):
            clock.now += 0.25
            with one.pause("a save"):
                clock.now += 100.0
                with one.pause("a validation within it"):
                    clock.now += 30.0
        one.log_steps([step(4, 32)], 0, {})
    first, second = records(tmp_path)
    amounts = {"samples_per_sec": 32, "batches_per_sec": 32 / 4, "tokens_per_sec": 320, "flops_per_sec": 3 * 320}
    amounts |= {"mfu": 3 * 0.32, "hfu": 4 * 0.32, "mfu_documents": 0.08 * (1 + 0.8) + 0.24 * (1 + 1.6)}
    assert {name: first[name] * 5 * 2 for name in amounts} == pytest.approx(amounts)
    assert second["samples_per_sec"] == 32 / 0.5 / 2


def test_flops_within_documents_know_the_window() -> None:
    """Of 4 positions in rows of 16: a document of 2 tokens has half of its attention, one of 8 all of it."""
    model = ModelConfig(vocab_size=64, family="mistral", layers=(LayerKind(sliding=True),), sliding_window=4)
    recipe = load(base={"data": {"store": "unused", "seq_len": 16}}).recipe
    for length, seen in ((2.0, 2), (8.0, 4)):
        *_, flops, _, within = ComputeCost.of_recipe(recipe, model, 0.0).amounts([step(1, 3, length)])
        assert flops - within == 3 * 16 * 12 * model.n_layers * model.hidden_size * (4 - seen)


def test_the_seeds_names_come_first_and_the_line_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with logger(tmp_path, clock, monitor=FakeMonitor(0.0)) as one:
        clock.now += 5.0
        one.log_steps([step(1, 32)], 3 * 2**30, dict.fromkeys(STEP_PARTS, 0.5))
        one.log_validation(1, "", 40.0, 20, 0)
    record, validation = records(tmp_path)
    first = "step loss learning_rate grad_norm batches_per_sec samples_per_sec tokens_per_sec flops_per_sec mfu"
    assert list(record)[:12] == [*first.split(), "memory_gib", "valid_tokens", "elapsed_s"]
    assert list(validation) == ["step", "val_loss", "val_tokens", "elapsed_s", "val_perplexity"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    assert lines == [format_record(record), format_record(validation)]


# ---- a terminal ----


@contextmanager
def terminal() -> Iterator[list[str]]:
    """Standard output is a terminal; at the end its lines are in the list, without escapes."""
    pytest.importorskip("rich")
    screen, slave = pty.openpty()
    content, lines = list[bytes](), list[str]()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(screen, 4096):
                content.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(slave, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "stdout", stream)
        yield lines
    reader.join()
    os.close(screen)
    lines += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(content).decode()).splitlines()


def test_a_terminal_gets_an_aligned_line_per_record(tmp_path: Path) -> None:
    """Left are 16 steps of 2 s, and a pause of 3 s for each four."""
    clock = Clock()
    with terminal() as lines, logger(tmp_path, clock, last_step=20) as one:
        clock.now += 8.0
        with one.pause("validation"):
            clock.now += 3.0
        one.log_steps([step(number, 8) for number in range(1, 5)], 3 * 2**30, {})
        one.log_validation(4, "", 40.0, 20, 100)
        one.log_message("hello")
    at = lines.index(HEADER)
    line = "           4/20    2.0000  1.00e-01    1.000        20   6.0%   3.0 GiB   0:00:44"
    assert [text for text in lines[at + 1 :] if text] == [
        line,
        "     validation    2.0000  perplexity 7.389, 0.577 bits per byte",
        "# hello",
    ]
    assert len(line) == len(HEADER)
    assert any("validation" in text for text in lines[:at])
    assert not any("step=" in text for text in lines)
    assert (tmp_path / "logs" / "rank00000.log").read_text().count("step=4 loss=2") == 1


def test_losing_the_terminal_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with logger(tmp_path, Clock()) as one, monkeypatch.context() as patch:
        patch.setattr("builtins.print", broken)
        patch.setattr(os, "dup2", lambda source, target: None)
        one.log_message("first")
        one.log_message("second")
    events = read_jsonl(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["stdout_lost", "note", "note"]
    assert "second" in (tmp_path / "logs" / "rank00000.log").read_text()


def test_where_there_is_no_terminal_a_long_pause_says_every_ten_seconds_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with logger(tmp_path, clock) as one, one.pause("evaluation"):
        for done in range(1, 11):
            clock.now += 4.0
            one.show_progress(done, 10, of="lt_copy\n")
    told = [line for line in capsys.readouterr().out.splitlines() if "evaluation of" in line]
    assert [line.partition(": ")[2] for line in told] == [
        "3 of 10 batches, 0.25 batches/s, about 28 s left",
        "6 of 10 batches, 0.25 batches/s, about 16 s left",
        "9 of 10 batches, 0.25 batches/s, about 4 s left",
    ]
    assert (tmp_path / "events.jsonl").read_text() == ""
    assert (tmp_path / "logs" / "rank00000.log").read_text().count("# evaluation of lt_copy") == 3


# ---- energy ----


@pytest.mark.parametrize(
    ("joules", "per_token"), [((1000.0, 1640.0, 1720.0), [2.0, 0.25]), ((None, None, 500.0, 820.0), [None, None, 1.0])]
)
def test_energy_is_per_token_since_the_last_record_and_in_kwh_since_the_first_start(
    tmp_path: Path, joules: Any, per_token: Any
) -> None:
    """Energy that is counted late begins with the first look."""
    monitor = FakeMonitor(joules[0])
    with logger(tmp_path, Clock(), monitor=monitor) as one:
        for number, monitor.value in enumerate(joules[1:], start=1):
            one.log_steps([step(number, 32)], 0, {})
    found = records(tmp_path)
    assert [record.get("joules_per_token") for record in found] == per_token
    counted = [one or 0 for one in joules[1:]]
    assert [record.get("energy_kwh", 0.0) * 3.6e6 for record in found] == pytest.approx(counted)


# ---- where the time goes ----


def test_the_parts_of_a_run_are_told_apart_and_only_training_counts_in_rates(
    recipe_base, fake_engine, monkeypatch
) -> None:
    """Batches take 2 s, steps 3 s, validations 5 s, saves 7 s, a restore 1000 s of a clock that nothing else moves."""
    clock = Clock()

    def taking(seconds: float, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            return function(*args, **kwargs)

        return call

    def on_step(call: int) -> None:
        engine = fake_engine.opened[-1]
        if call == 1:
            engine.validate, engine.state = taking(5.0, engine.validate), taking(7.0, engine.state)
            engine.topology = Topology(rank=0, world_size=1, dp_rank=0, dp_size=2)
        clock.now += 3.0

    fake_engine.on_step = on_step
    monkeypatch.setattr(StreamBatches, "next_batch", taking(2.0, StreamBatches.next_batch))
    monkeypatch.setattr(Checkpoints, "data_state", taking(1000.0, Checkpoints.data_state))
    monkeypatch.setattr("lt_trainer.training.run.RunLogger", partial(RunLogger, clock=clock))
    monkeypatch.setattr(Stopwatch.__init__, "__defaults__", (clock,))
    recipe_base["schedule"] |= {"max_steps": 8}
    recipe_base["metrics"] |= {"log_interval": 2, "validation_interval": 4}
    recipe_base["checkpoint"] |= {"interval": 4}
    start = partial(run, load(base=recipe_base, overrides=["run.engine=fake"]), environ={})
    assert start(stop_after_step=6) == 75
    assert start() == 0
    found = [r for r in records(Path(recipe_base["run"]["dir"])) if "loss" in r]
    parts = ("data_s", "forward_backward_s", "checkpoint_s", "validation_s", "rest_s")
    assert {record["step"]: [record[name] for name in parts] for record in found} == {
        2: [4.0, 6.0, 0.0, 0.0, 0.0],
        4: [4.0, 6.0, 0.0, 0.0, 0.0],
        6: [4.0, 6.0, 7.0, 5.0, 0.0],
        8: [4.0, 6.0, 1000.0, 0.0, 0.0],
    }
    assert {record["tokens_per_sec"] for record in found} == {2 * 8 * 32 / 5.0}, "another rank has as many rows"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("capable", "overrides", "message"),
    [
        (False, ["profile_steps=2"], r"metrics.profile_steps = 2 \(--set\), .*: the fake engine does not support this"),
        (False, ["memory_snapshot_on_oom=true"], r"metrics.memory_snapshot_on_oom = true .*does not support this"),
        (True, ["profile_steps=10"], r"the run ends before step 20; .*"),
        (True, ["profile_steps=1", "profile_ranks=0,1"], r"ranks must be between 0 and 0"),
        (True, ["memory_snapshot_step=20"], r"before step 20; change or remove metrics.memory_snapshot_step"),
    ],
)
def test_views_that_cannot_be_had_are_refused(recipe_base, fake_engine, capable, overrides, message) -> None:
    fake_engine.capabilities |= {"profile", "memory_snapshot"} if capable else set()
    sets = ["run.engine=fake", "schedule.max_steps=19", *(f"metrics.{one}" for one in overrides)]
    with pytest.raises(RecipeError, match=message):
        run(load(base=recipe_base, overrides=sets), environ={})
