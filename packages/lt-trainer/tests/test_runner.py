"""The loop and all around it with a fake engine: order of data, stop, resume, what is written, and every refusal."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointError, find_latest_valid, list_steps
from lt_data import DataError, TokenStore
from lt_model import LlamaConfig, flops_per_token
from lt_test_helpers.runs import run
from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.recipe import load
from lt_trainer.engine import HostStopwatch
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.resilience.stop_signals import STOP_SIGNALS, StopSignals
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.training.loop import TrainingError


def start(base, overrides=(), **options) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def losses(base) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl") if "loss" in r}


def test_trains_every_row_in_the_streams_order(recipe_base, fake_engine, little_data) -> None:
    from lt_data import RowReader, Stream, open_pack

    assert start(recipe_base) == 0
    (engine,) = fake_engine.opened
    store = TokenStore.open(little_data / "train")
    reader = RowReader(store, open_pack(store, seq_len=32))
    stream = Stream(reader, global_batch_size=8, seed=0)
    wanted = reader.read_rows(stream.global_rows(stream.state, 20 * 8)).input_ids
    assert engine.rows == [row.tobytes() for row in wanted]
    assert engine.closed


def test_without_a_given_environment_the_world_is_that_of_the_process(recipe_base, fake_engine, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), stop_after_step=1) == 75
    assert fake_engine.opened[-1].topology.world_size == 1


def test_of_the_time_before_the_first_step_the_restore_alone_counts_as_checkpoint(
    recipe_base, fake_engine, monkeypatch
) -> None:
    parts, begin = [], HostStopwatch.begin

    def watched(stopwatch: HostStopwatch, part: str) -> None:
        parts.append(part)
        begin(stopwatch, part)

    monkeypatch.setattr(HostStopwatch, "begin", watched)
    assert start(recipe_base, stop_after_step=9) == 75
    parts.clear()
    assert start(recipe_base) == 0
    assert parts[: parts.index("data")] == ["checkpoint", "rest"]


def test_the_environment_of_the_run_has_what_the_engine_sets(recipe_base, fake_engine, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored afterwards
    fake_engine.env = lambda recipe: {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert start(recipe_base) == 0
    written = json.loads((Path(recipe_base["run"]["dir"]) / "environment.json").read_text())
    assert written["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_without_shuffling_rows_come_in_the_order_of_the_pack(recipe_base, fake_engine, little_data) -> None:
    from lt_data import RowReader, TokenStore, open_pack

    assert start(recipe_base, ["data.shuffle=false"]) == 0
    store = TokenStore.open(little_data / "train")
    reader = RowReader(store, open_pack(store, seq_len=32))
    rows = reader.read_rows(np.arange(20 * 8, dtype=np.int64) % reader.n_rows).input_ids
    assert fake_engine.opened[-1].rows == [row.tobytes() for row in rows]


def test_stop_and_resume_equal_the_uninterrupted_run(recipe_base, fake_engine, tmp_path) -> None:
    assert start(recipe_base) == 0
    whole = losses(recipe_base)
    assert sorted(whole) == list(range(1, 21))

    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, stop_after_step=9, verify_resume_steps=4) == 75
    assert losses(recipe_base) == {step: whole[step] for step in range(1, 10)}
    shadow = read_jsonl(tmp_path / "stopped" / "resume_check.jsonl")
    assert [(r["step"], r["loss"]) for r in shadow] == [(step, whole[step]) for step in range(10, 14)]

    assert start(recipe_base) == 0
    assert losses(recipe_base) == whole
    events = read_jsonl(tmp_path / "stopped" / "events.jsonl")
    kinds = [e["event"] for e in events if e["event"] != "note"]
    first, second = ["start", "data", "checkpoint", "checkpoint", "stop"], ["start", "data", "resume"]
    assert kinds == [*first, *second, *["checkpoint"] * 3, "completed"]
    assert [(e["step"], e["row"], e["global_batch_size"]) for e in events if e["event"] == "data"] == [
        (0, 0, 8),
        (9, 72, 8),
    ]
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


def test_a_signal_in_the_last_step_is_not_a_stop(recipe_base, fake_engine) -> None:
    fake_engine.on_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 20 else None
    assert start(recipe_base) == 0


def test_a_signal_to_a_finished_run_that_is_started_again_is_not_a_stop(recipe_base, fake_engine) -> None:
    assert start(recipe_base) == 0
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert start(recipe_base, stop=stop) == 0
        assert stop.received == signal.SIGUSR1
        assert start(recipe_base, ["schedule.max_steps=30"], stop=stop) == 75, "here is something left to do"


def test_reads_the_device_only_where_something_is_due(recipe_base, fake_engine) -> None:
    assert start(recipe_base, overrides=["metrics.log_interval=4"]) == 0
    (engine,) = fake_engine.opened
    assert engine.reads == [4, 2, 2, 4, 4, 2, 2]  # after steps 4, 6, 8, 12, 16, 18, 20: logging steps and saves
    assert sorted(losses(recipe_base)) == [4, 6, 8, 12, 16, 18, 20]


def test_metrics_have_the_names_and_values_of_the_run(recipe_base, fake_engine, capsys) -> None:
    assert start(recipe_base) == 0
    records = read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl")
    last = [r for r in records if "loss" in r][-1]
    schedule, peak = load(base=recipe_base).recipe.schedule, 1.6e-3
    lrs = [learning_rate(step, schedule, peak) for step in range(20)]
    assert fake_engine.opened[0].lrs == lrs
    assert [r["learning_rate"] for r in records if "loss" in r] == lrs
    model = LlamaConfig.from_dict(find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")[0].manifest.model)
    assert last["flops_per_sec"] == pytest.approx(last["tokens_per_sec"] * flops_per_token(model, 32, "full"))
    assert last["memory_gib"] == 3
    assert last["samples_per_sec"] == pytest.approx(4 * last["batches_per_sec"])
    assert last["tokens_per_sec"] == pytest.approx(32 * last["samples_per_sec"])
    assert last["mfu"] == pytest.approx(last["flops_per_sec"] / 1e12)
    (validation,) = [r for r in records if "val_loss" in r]
    assert validation["step"] == 20
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    assert len(lines) == 21
    assert "12 x layers x width x seq_len" in json.dumps(read_jsonl(Path(recipe_base["run"]["dir"]) / "events.jsonl"))


def test_validation_counts_every_position_once(recipe_base, fake_engine, little_data) -> None:
    from lt_data import RowReader, TokenStore, open_pack

    assert start(recipe_base, overrides=["metrics.validation_interval=8"]) == 0
    store = TokenStore.open(little_data / "validation")
    valid = int(RowReader(store, open_pack(store, seq_len=32)).valid.sum())
    found = [r for r in read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl") if "val_loss" in r]
    assert [r["step"] for r in found] == [8, 16, 20]
    assert {r["val_tokens"] for r in found} == {valid}


def test_the_step_of_a_stop_is_saved_and_not_validated(recipe_base, fake_engine) -> None:
    """Whoever sends the signal waits; a last step is validated though a signal came in it."""
    assert start(recipe_base, overrides=["metrics.validation_interval=4"], stop_after_step=8) == 75
    assert start(recipe_base, overrides=["metrics.validation_interval=4"], stop_after_step=20) == 0
    records = read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl")
    assert [r["step"] for r in records if "val_loss" in r] == [4, 12, 16, 20]


def test_checkpoint_carries_recipe_model_tokenizer_and_data_position(recipe_base, fake_engine) -> None:
    assert start(recipe_base) == 0
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found is not None
    manifest = Checkpoint.open(found.path).manifest
    assert manifest.step == 20
    assert manifest.recipe["optimizer"]["lr"] == 1.6e-3
    assert manifest.model["vocab_size"] == 300
    assert manifest.data["row"] == 160
    assert manifest.data["step"] == 20
    assert set(found.tokenizer_files()) >= {"tokenizer.json", "tokenizer_config.json"}


def test_keeps_the_last_checkpoints(recipe_base, fake_engine) -> None:
    assert (
        start(recipe_base, overrides=["checkpoint.interval=2", "checkpoint.keep_last=2", "checkpoint.keep_every=8"])
        == 0
    )
    names = sorted(path.name for path in (Path(recipe_base["run"]["dir"]) / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000016", "step-00000018", "step-00000020"]


def test_a_finished_run_has_nothing_left_to_do(recipe_base, fake_engine) -> None:
    assert start(recipe_base) == 0
    assert start(recipe_base) == 0
    assert fake_engine.opened[1].rows == []


def test_goes_on_when_max_steps_grows_and_says_what_changed(recipe_base, fake_engine, capsys) -> None:
    assert start(recipe_base) == 0
    assert start(recipe_base, overrides=["schedule.max_steps=24"]) == 0
    assert "schedule.max_steps was 20, is 24" in capsys.readouterr().out
    assert max(losses(recipe_base)) == 24


def test_falls_back_to_an_older_checkpoint_and_says_so(recipe_base, fake_engine, capsys) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    newest = Path(recipe_base["run"]["dir"]) / "checkpoints" / "step-00000009"
    (file,) = newest.glob("weights-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert start(recipe_base) == 0
    out = capsys.readouterr().out
    assert "step-00000009 is not used" in out
    assert "resuming after step 6" in out


def test_refuses_a_checkpoint_of_another_model(recipe_base, fake_engine) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    with pytest.raises(RecipeError, match=r"another model \(n_layers: 2 there, 3 here\)"):
        start(recipe_base, overrides=["model.n_layers=3"])


def test_refuses_other_data_or_another_seed(recipe_base, fake_engine) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    with pytest.raises(DataError, match="seed"):
        start(recipe_base, overrides=["run.seed=1"])
    with pytest.raises(DataError, match=r"store: \w+ before, \w+ now"):
        start(recipe_base, overrides=[f"data.store={recipe_base['data']['validation']}"])


def test_refuses_to_start_from_nothing_over_checkpoints(recipe_base, fake_engine) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    with pytest.raises(RecipeError, match="already has checkpoints"):
        start(recipe_base, overrides=["checkpoint.resume=false"])


def test_refuses_a_vocabulary_that_does_not_fit(recipe_base, fake_engine) -> None:
    with pytest.raises(RecipeError, match=r"model.vocab_size = 32000 \(--set\): the tokenizer of .* has 300 ids"):
        start(recipe_base, overrides=["model.vocab_size=32000"])
    assert not Path(recipe_base["run"]["dir"]).exists()


def test_refuses_another_tokenizer_than_the_stores(recipe_base, fake_engine) -> None:
    with pytest.raises(RecipeError, match=r"data.tokenizer = 'meta/other' \(--set\)"):
        start(recipe_base, overrides=["data.tokenizer=meta/other"])


def test_the_records_of_a_run_name_the_tokenizer_of_its_store(recipe_base, fake_engine, little_data) -> None:
    """Where the store is only validated on, a tokenizer has no effect; each written recipe can be loaded again."""
    name = TokenStore.open(little_data / "train").manifest.tokenizer.name
    for training in ({}, {"store": "", "synthetic": True}):
        recipe_base["data"] |= training
        recipe_base["model"]["vocab_size"] = 300
        recipe_base["run"]["dir"] += "-2"
        assert start(recipe_base, overrides=["schedule.max_steps=2"]) == 0
        out = Path(recipe_base["run"]["dir"])
        written = load(out / "recipe.toml").recipe
        saved = Checkpoint.open(list_steps(out / "checkpoints")[0][1]).manifest.recipe
        wanted = DataOptions().tokenizer if training else name
        assert written.data.tokenizer == saved["data"]["tokenizer"] == wanted


def test_refuses_what_the_engine_cannot_do(recipe_base, fake_engine) -> None:
    fake_engine.capabilities = frozenset()
    with pytest.raises(RecipeError, match=r"data.document_mask = True \(default\): the fake engine does not"):
        start(recipe_base)
    assert start(recipe_base, overrides=["data.document_mask=false"]) == 0


def test_refuses_a_missing_pack_with_the_command_that_makes_it(recipe_base, fake_engine) -> None:
    with pytest.raises(DataError, match="--seq-len 64"):
        start(recipe_base, overrides=["data.seq_len=64"])


def test_refuses_a_folder_that_is_not_a_run(recipe_base, fake_engine) -> None:
    out = Path(recipe_base["run"]["dir"])
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirError, match="not a run directory"):
        start(recipe_base)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


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
        start(recipe_base, overrides=["fault_tolerance.max_skipped_steps=2", "fault_tolerance.max_rollbacks=0"])
    log = (Path(recipe_base["run"]["dir"]) / "logs" / "rank00000.log").read_text().splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in log[: len(printed)]] == printed
    assert "TrainingError: 3 steps up to step 10 had a non-finite loss" in "\n".join(log[len(printed) :])
