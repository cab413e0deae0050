"""The loop and all around it with a fake engine: order of data, stop, resume, what is written, and every refusal."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointError, find_latest_valid, list_steps
from lt_data import RowReader, Stream, Tokenizer, TokenStore, open_pack
from lt_model import ModelConfig, flops_per_token
from lt_model.costs import attention_flops_per_token
from lt_test_helpers.runs import losses, start
from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.recipe import load
from lt_trainer.engine import Topology
from lt_trainer.errors import RecipeError
from lt_trainer.observability.run_logger import RunLogger
from lt_trainer.resilience.stop_signals import STOP_SIGNALS, StopSignals
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.training.loop import TrainingError


def test_trains_every_row_in_the_streams_order(recipe_base, fake_engine, little_data) -> None:
    """Of the stream, or of the pack without shuffling."""
    store = TokenStore(little_data / "train")
    reader = RowReader(store, open_pack(store, seq_len=32))
    stream = Stream(reader, global_batch_size=8, seed=0)
    in_order = np.arange(20 * 8, dtype=np.int64) % reader.n_rows
    for i, ids in enumerate((stream.global_rows(stream.state, 20 * 8), in_order)):
        recipe_base["run"]["dir"] += "-2"
        assert start(recipe_base, *(["data.shuffle=false"] if i else [])) == 0
        assert fake_engine.opened[i].rows == [row.tobytes() for row in reader.read_rows(ids).input_ids]
        assert fake_engine.opened[i].closed


def test_the_environment_of_the_run_has_what_the_engine_sets(recipe_base, fake_engine, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored afterwards
    fake_engine.env = lambda recipe: {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert start(recipe_base) == 0
    written = json.loads((Path(recipe_base["run"]["dir"]) / "environment.json").read_text())
    assert written["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_stop_and_resume_equal_the_uninterrupted_run(recipe_base, fake_engine, tmp_path) -> None:
    assert start(recipe_base) == 0
    whole = losses(recipe_base)
    assert sorted(whole) == list(range(1, 21))

    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, stop_after_step=9) == 75
    assert losses(recipe_base) == {step: whole[step] for step in range(1, 10)}

    assert start(recipe_base) == 0
    assert losses(recipe_base) == whole
    events = read_jsonl(tmp_path / "stopped" / "events.jsonl")
    kinds = [e["event"] for e in events if e["event"] != "note"]
    first, second = ["start", "data", "checkpoint", "checkpoint", "stop"], ["start", "data", "resume"]
    assert kinds == [*first, *second, *["checkpoint"] * 3, "completed"]
    found = [(e["step"], e["row"], e["batch"]["global_batch_size"]) for e in events if e["event"] == "data"]
    assert found == [(0, 0, 8), (9, 72, 8)]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [6, 9, 12, 18, 20]
    assert [e["signal"] for e in events if e["event"] == "stop"] == ["SIGTERM"]


@pytest.fixture
def hangup() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGHUP does, which nohup may have set to nothing for the tests themselves."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_finishes_the_step_and_saves(recipe_base, fake_engine, hangup, number) -> None:
    hangup(signal.SIG_DFL)
    fake_engine.on_step = lambda step: os.kill(os.getpid(), number) if step == 5 else None
    before = signal.getsignal(number)
    assert start(recipe_base) == 75
    assert signal.getsignal(number) is before
    found, rejected = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found is not None
    assert found.step == 5
    assert not rejected


def test_what_nohup_ignores_stays_ignored(recipe_base, fake_engine, hangup) -> None:
    hangup(signal.SIG_IGN)
    fake_engine.on_step = lambda step: os.kill(os.getpid(), signal.SIGHUP) if step == 5 else None
    assert start(recipe_base) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_when_nothing_is_left_to_do_is_not_a_stop(recipe_base, fake_engine) -> None:
    fake_engine.on_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 20 else None
    assert start(recipe_base) == 0
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert start(recipe_base, stop=stop) == 0
        assert stop.received == signal.SIGUSR1
        assert start(recipe_base, "schedule.max_steps=30", stop=stop) == 75, "here is something left to do"


def test_a_run_outside_of_the_main_thread_leaves_the_signals_alone(recipe_base, fake_engine, capsys) -> None:
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor() as threads:
        assert threads.submit(start, recipe_base).result() == 0
        assert "not in the main thread: stop signals do not save" in capsys.readouterr().out
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            longer = threads.submit(start, recipe_base, "schedule.max_steps=30", stop=stop)
            assert longer.result() == 75
            assert "not in the main thread" not in capsys.readouterr().out
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_reads_the_device_only_where_something_is_due(recipe_base, fake_engine) -> None:
    assert start(recipe_base, "metrics.log_interval=4") == 0
    (engine,) = fake_engine.opened
    assert engine.reads == [4, 2, 2, 4, 4, 2, 2]  # after steps 4, 6, 8, 12, 16, 18, 20: logging steps and saves
    assert sorted(losses(recipe_base)) == [4, 6, 8, 12, 16, 18, 20]


def test_metrics_have_the_names_and_values_of_the_run(recipe_base, fake_engine, capsys) -> None:
    lengths: list[np.ndarray] = []
    fake_engine.poison = lambda call, batch: lengths.append(np.diff(batch.cu_seqlens)) is not None
    assert start(recipe_base) == 0
    records = read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl")
    last = [r for r in records if "loss" in r][-1]
    schedule, peak = load(base=recipe_base).recipe.schedule, 1.6e-3
    lrs = [learning_rate(step, schedule, peak) for step in range(20)]
    assert fake_engine.opened[0].lrs == lrs
    assert [r["learning_rate"] for r in records if "loss" in r] == lrs
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found is not None
    model = ModelConfig.from_dict(found.manifest.model)
    assert last["flops_per_sec"] == pytest.approx(last["tokens_per_sec"] * flops_per_token(model, 32, "full"))
    assert last["memory_gib"] == 3
    assert last["samples_per_sec"] == pytest.approx(4 * last["batches_per_sec"])
    assert last["tokens_per_sec"] == pytest.approx(32 * last["samples_per_sec"])
    assert last["mfu"] == pytest.approx(last["flops_per_sec"] / 1e12)
    length = np.square(lengths[-1]).sum() / lengths[-1].sum()  # of the document of a position, on average
    full, within = (attention_flops_per_token(model, positions, "full") for positions in (32, length))
    saved = (full - within) / flops_per_token(model, 32, "full")
    assert last["mfu_documents"] == pytest.approx(last["mfu"] * (1 - saved))
    assert [r["step"] for r in records if "val_loss" in r] == [20]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    assert len(lines) == 21
    assert "12 x layers x width x seq_len" in json.dumps(read_jsonl(Path(recipe_base["run"]["dir"]) / "events.jsonl"))
    manifest = found.manifest
    assert (manifest.step, manifest.data["step"], manifest.data["row"]) == (20, 20, 160)
    assert (manifest.recipe["optimizer"]["lr"], manifest.model["vocab_size"]) == (1.6e-3, 300)
    assert set(Checkpoint.open(found.path).tokenizer_files()) >= {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("dp_size", [2, 4])
def test_rows_of_all_ranks_count_once(recipe_base, fake_engine, monkeypatch, dp_size) -> None:
    """Tensor-parallel peers (twice as many ranks here) read the same rows."""
    real, logged = fake_engine.open, []

    def opened(*args):
        engine = real(*args)
        engine.topology = Topology(rank=0, world_size=2 * dp_size, dp_rank=0, dp_size=dp_size)
        engine.on_step = lambda call: 1 // (4 - call)
        return engine

    monkeypatch.setattr(fake_engine, "open", opened)
    monkeypatch.setattr(RunLogger, "log_steps", lambda self, records, *rest: logged.extend(records))
    with pytest.raises(ZeroDivisionError):  # before a save, to which the other ranks would not come
        start(recipe_base, "batch.micro_batch_size=1")
    assert [(record.step, record.rows) for record in logged] == [(i, 8) for i in (1, 2, 3)]


def test_validation_counts_every_position_once_and_not_at_a_stop(recipe_base, fake_engine, little_data) -> None:
    """Whoever sends the signal waits; a last step is validated though a signal came in it."""
    sets = ["metrics.validation_interval=4", "metrics.validation_tokens=-1"]
    assert start(recipe_base, *sets, stop_after_step=8) == 75
    assert start(recipe_base, *sets, stop_after_step=20) == 0
    store = TokenStore(little_data / "validation")
    valid = int(RowReader(store, open_pack(store, seq_len=32)).valid.sum())
    found = [r for r in read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl") if "val_loss" in r]
    assert [(r["step"], r["val_tokens"]) for r in found] == [(step, valid) for step in (4, 12, 16, 20)]


def test_goes_on_when_max_steps_grows_and_says_what_changed(recipe_base, fake_engine, capsys) -> None:
    assert start(recipe_base) == start(recipe_base) == 0
    assert fake_engine.opened[1].rows == [], "nothing is left to do"
    assert start(recipe_base, "schedule.max_steps=24") == 0
    assert "schedule.max_steps was 20, is 24" in capsys.readouterr().out
    assert max(losses(recipe_base)) == 24


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["run.seed=1"], RecipeError, "seed"),
        (["data.store={validation}"], RecipeError, r"store: \w+ before, \w+ now"),
        (["checkpoint.resume=false"], RecipeError, "already has checkpoints"),
        (["model.n_layers=3"], RecipeError, r"another model \(n_layers: 2 there, 3 here\)"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused(recipe_base, fake_engine, overrides, error, words) -> None:
    assert start(recipe_base, stop_after_step=3) == 75
    folder = Path(recipe_base["run"]["dir"])
    recorded = {name: (folder / name).read_text() for name in ("recipe.json", "recipe.toml")}
    with pytest.raises(error, match=words):
        start(recipe_base, *(text.format(**recipe_base["data"]) for text in overrides))
    assert {name: (folder / name).read_text() for name in recorded} == recorded


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("model.vocab_size=32000", RecipeError, r"vocab_size = 32000 \(--set\): the data's tokenizer has 300 ids"),
        ("data.tokenizer=meta/other", RecipeError, r'data.tokenizer = "meta/other" \(--set\)'),
        ("data.seq_len=64", RecipeError, "--seq-len 64"),
        ("data.document_mask=true", RecipeError, r"data.document_mask = true \(--set\): the fake engine does not"),
    ],
)
def test_what_no_run_can_begin_with_is_refused_before_anything_is_written(
    recipe_base, fake_engine, override, error, words
) -> None:
    if "document_mask" in override:
        fake_engine.capabilities = frozenset()
    with pytest.raises(error, match=words):
        start(recipe_base, override)
    assert not Path(recipe_base["run"]["dir"]).exists()


def test_the_tokenizer_may_be_a_path(recipe_base, fake_engine, little_data, tmp_path) -> None:
    tokenizer = TokenStore(little_data / "train").tokenizer()
    tokenizer.save(tmp_path / "elsewhere")
    assert start(recipe_base, f"data.tokenizer={tmp_path / 'elsewhere'}", "schedule.max_steps=2") == 0
    other = Tokenizer.train(["another text"], vocab_size=260)
    other.save(tmp_path / "other")
    with pytest.raises(RecipeError, match=rf"{tokenizer.sha256}\), not with that of this path .*{other.sha256}"):
        start(recipe_base, f"data.tokenizer={tmp_path / 'other'}")
    with pytest.raises(RecipeError, match=r'data.tokenizer = ".*" \(--set\): no tokenizer at .*tokenizer.json'):
        start(recipe_base, f"data.tokenizer={tmp_path}")


def test_the_records_of_a_run_name_the_tokenizer_of_its_store(recipe_base, fake_engine, little_data) -> None:
    """Where the store is only validated on, a tokenizer has no effect; each written recipe can be loaded again."""
    name = TokenStore(little_data / "train").manifest.tokenizer.name
    for training in ({}, {"store": "", "synthetic": True}):
        recipe_base["data"] |= training
        recipe_base["model"]["vocab_size"] = 300
        recipe_base["run"]["dir"] += "-2"
        assert start(recipe_base, "schedule.max_steps=2") == 0
        out = Path(recipe_base["run"]["dir"])
        text = (out / "recipe.toml").read_text()
        assert (f'tokenizer = "{name}"' in text, "mindbeam" in text) == (not training, False)
        written = load(out / "recipe.toml").recipe
        saved = Checkpoint.open(list_steps(out / "checkpoints")[0][1]).manifest.recipe
        wanted = DataOptions().tokenizer if training else name
        assert written.data.tokenizer == saved["data"]["tokenizer"] == wanted


def test_a_save_that_fails_leaves_the_older_checkpoint(recipe_base, fake_engine) -> None:
    def block(step: int) -> None:
        if step == 10:
            folder = Path(recipe_base["run"]["dir"]) / "checkpoints"
            folder.rename(folder.with_name("kept"))
            folder.write_text("in the way")

    fake_engine.on_step = block
    with pytest.raises(CheckpointError):
        start(recipe_base)
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "kept")
    assert found is not None
    assert found.step == 6


def test_run_loads_no_torch(recipe_base, tmp_path) -> None:
    """The loop and all that it stands on, in a fresh interpreter in which importing torch is an error."""
    script = textwrap.dedent(
        """
        import sys
        sys.modules["torch"] = None
        import lt_trainer.checkpointing.checkpoints, lt_trainer.cli.commands
        import lt_trainer.observability.run_logger, lt_trainer.training.loop, lt_trainer.training.check
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_every_line_is_in_the_ranks_log_and_so_is_the_error(recipe_base, fake_engine, capsys) -> None:
    fake_engine.poison = lambda call, batch: call >= 8
    with pytest.raises(TrainingError):
        start(recipe_base, "fault_tolerance.max_skipped_steps=2", "fault_tolerance.max_rollbacks=0")
    log = (Path(recipe_base["run"]["dir"]) / "logs" / "rank00000.log").read_text().splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in log[: len(printed)]] == printed
    assert "TrainingError: 3 steps up to step 10 had a non-finite loss" in "\n".join(log[len(printed) :])
