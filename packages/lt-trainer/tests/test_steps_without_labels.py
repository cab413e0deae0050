"""A step without any label: nothing changes, schedule and data go on, and no loss is recorded."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lt_data import DataError, TokenStore, pack, prepare
from lt_test_helpers.runs import check, events, start
from lt_trainer.config.recipe import load
from lt_trainer.observability.figures import draw_figures
from lt_trainer.observability.report import write_report
from lt_trainer.observability.run_history import RunHistory
from lt_trainer.observability.sinks import scalars
from lt_trainer.observability.watch import render
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.training.check import CheckError
from lt_trainer.training.loop import TrainingError

STEPS, ROWS, SEQ_LEN = 6, 8, 8
WITHOUT_LABELS = (1, 3, 4)


@pytest.fixture
def base(recipe_base, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """A loader of the user's own; `labeled` of the module says which of its steps have labels."""

    def make(**facts: Any) -> list[dict[str, np.ndarray]]:
        ids = np.random.default_rng(1).integers(0, 50, (STEPS, ROWS, SEQ_LEN + 1))
        is_without = np.isin(np.arange(STEPS) + 1, module.without)[:, None, None]
        labels = np.where(is_without, -100, ids[..., 1:])
        return [{"input_ids": ids[step, :, :-1], "labels": labels[step]} for step in range(STEPS)]

    module = SimpleNamespace(make=make, without=WITHOUT_LABELS)
    monkeypatch.setitem(sys.modules, "own_rows", module)
    recipe_base["model"]["vocab_size"] = 50
    recipe_base["data"] = {"loader": "own_rows:make", "seq_len": SEQ_LEN}
    recipe_base["schedule"] |= {"max_steps": STEPS}
    return recipe_base


def test_changes_nothing_and_counts_as_nothing(base, fake_engine, capsys) -> None:
    assert start(base, "fault_tolerance.max_skipped_steps=1") == 0
    (engine,) = fake_engine.opened
    records = read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert engine.lrs == [record["learning_rate"] for record in records if record["step"] not in WITHOUT_LABELS]
    assert engine.steps == 3
    for record in records:
        empty = record["step"] in WITHOUT_LABELS
        assert (record["loss"] is None, record["grad_norm"] is None, record["valid_tokens"] == 0) == (empty,) * 3
        assert ("mfu" in record, "train/loss" in scalars(record)) == (not empty,) * 2
    assert events(base, "step_skipped", "rollback") == []
    assert [event["step"] for event in events(base, "step_without_labels")] == [1, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert sum("step 3 has no labels: nothing was trained" in line for line in lines) == 1
    assert "step=3 loss=null" in "\n".join(lines)


def test_is_left_out_of_means_and_pictures(base, fake_engine, tmp_path) -> None:
    assert start(base, "schedule.max_steps=4") == 0
    run = RunHistory(Path(base["run"]["dir"]))
    loss = run.train[1]["loss"]
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(render(run))
    assert f" {loss:.4f} " in console.export_text()
    for figure in draw_figures([run]).values():
        assert figure.axes[0].lines[0].get_xdata().tolist() in ([2.0], [1.0, 2.0, 3.0, 4.0])
    write_report([run.path], tmp_path / "report.html")
    assert f"{loss:.4f}, mean of 1 records" in (tmp_path / "report.html").read_text()


def test_none_at_all_is_refused(base, fake_engine, little_data, tmp_path, capsys) -> None:
    sys.modules["own_rows"].without = range(1, 20)
    with pytest.raises(TrainingError, match="no step up to 6 had a label, so the weights are the initial ones"):
        start(base)
    with pytest.raises(TrainingError, match="no step up to 6 had a label"):
        start(base, "checkpoint.interval=2", "data.loader_resume=replay", "run.dir={dir}-2".format(**base["run"]))
    with pytest.raises(TrainingError, match="no step up to 6 had a label"):  # resumed after step 4
        start(base, "checkpoint.interval=2", "data.loader_resume=replay", "run.dir={dir}-2".format(**base["run"]))
    with pytest.raises(CheckError, match="steps 1 to 20 have no labels"):
        check(load(base=base, overrides=["run.engine=fake", f"run.dir={tmp_path / 'other'}"]), environ={})
    sys.modules["own_rows"].without = (1, 2, 4)
    check(load(base=base, overrides=["run.engine=fake", f"run.dir={tmp_path / 'other'}"]), environ={})
    assert "check: step 3 in" in capsys.readouterr().out
    folder = tmp_path / "ids"
    folder.mkdir()
    tokenizer = TokenStore(little_data / "train").tokenizer()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in "ab" * 40))

    prepare([folder], tokenizer=tokenizer, out=tmp_path / "store", bos=False, eos=False)
    with pytest.raises(DataError, match=r"no position has a label, since no document of .* has two tokens"):
        pack(TokenStore(tmp_path / "store"), seq_len=SEQ_LEN)
