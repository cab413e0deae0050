"""Non-finite steps: skipped, counted, and after too many a rollback past the rows that led to them."""

import math
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import find_latest_valid
from lt_data import RowReader, Stream, TokenStore, open_pack
from lt_test_helpers.runs import events, losses, start
from lt_trainer.data.step_parts import StreamStep
from lt_trainer.training.loop import TrainingError


def global_rows(little_data: Path, first: int, last: int) -> list[bytes]:
    """The rows at these positions of the global sequence."""
    store = TokenStore(little_data / "train")
    reader = RowReader(store, open_pack(store, seq_len=32))
    stream = Stream(reader, global_batch_size=8, seed=0)
    ids = stream.global_rows(stream.state, last)[first:]
    return [row.tobytes() for row in reader.read_rows(ids).input_ids]


def trained_rows(engine) -> list[list[bytes]]:
    return [engine.rows[i : i + 8] for i in range(0, len(engine.rows), 8)]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_a_few_are_skipped_and_said(recipe_base, fake_engine, capsys, bad) -> None:
    fake_engine.poison, fake_engine.poisoned = (lambda call, batch: call in (4, 9)), bad
    assert start(recipe_base) == 0
    (engine,) = fake_engine.opened
    assert (engine.calls, engine.steps) == (20, 18)
    said = [(e["step"], e["loss"], e["grad_norm"]) for e in events(recipe_base, "step_skipped")]
    assert repr(said) == repr([(step, *bad) for step in (4, 9)])
    assert events(recipe_base, "rollback") == []
    assert "step 4 was skipped: loss" in capsys.readouterr().out
    assert find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")[0].step == 20


def test_too_many_lead_back_to_the_checkpoint_past_the_rows(recipe_base, fake_engine, little_data, capsys) -> None:
    """With bound 2, steps 8, 9 and 10 are skipped, then the run goes back to step 6."""
    fake_engine.poison = lambda call, batch: call in (8, 9, 10)
    assert start(recipe_base, "fault_tolerance.max_skipped_steps=2") == 0
    (engine,) = fake_engine.opened
    expected = [global_rows(little_data, i, i + 8) for i in range(0, 80, 8)]  # steps 1 to 10
    expected += [global_rows(little_data, i, i + 8) for i in range(80, 80 + 8 * 14, 8)]  # steps 7 to 20 behind them
    assert trained_rows(engine) == expected
    (rewind,) = events(recipe_base, "rollback")
    assert (rewind["step"], rewind["from_step"], rewind["rows"]) == (6, 10, [48, 80])
    assert [(e["step"], e["row"], e["skipped"]) for e in events(recipe_base, "data")] == [
        (0, 0, []),
        (6, 80, [[48, 80]]),
    ]
    assert engine.lrs[10] == engine.lrs[6]  # the learning rate follows the step, the data follow the row
    assert engine.steps == 20
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found.manifest.data["skipped"] == [[48, 80]]
    assert found.manifest.data["row"] == 20 * 8 + 32
    assert "skipping the rows at positions 48 to 79" in capsys.readouterr().out


def test_going_back_restores_the_weights(recipe_base, fake_engine, little_data, tmp_path) -> None:
    """From the checkpoint on, the run equals one that never read the rows between."""
    fake_engine.poison = lambda call, batch: call in (8, 9, 10)
    assert start(recipe_base, "fault_tolerance.max_skipped_steps=2") == 0
    found = losses(recipe_base)
    (engine,) = fake_engine.opened
    weights = engine.weights
    fake_engine.poison = lambda call, batch: False
    recipe_base["run"]["dir"] = str(tmp_path / "clean")
    assert start(recipe_base, stop_after_step=6) == 75
    clean = fake_engine.opened[-1]
    store = TokenStore(little_data / "train")
    stream = Stream(RowReader(store, open_pack(store, seq_len=32)), global_batch_size=8, seed=0)
    for _ in range(6):
        stream.next()
    stream.skip(4 * 8)
    for step in range(7, 21):
        loss, _ = clean.step(StreamStep(stream.next(), 4, read_ahead=False), engine.lrs[step + 3])
        assert loss == found[step]
    assert (clean.weights == weights).all()


@pytest.mark.parametrize(
    ("bad", "words", "rewinds"),
    [
        (lambda call, batch: call > 7, "3 steps up to step 9 .* after 2 rollbacks.*Lower optimizer.lr", [80, 104]),
        (lambda call, batch: True, "3 steps up to step 3 .* and there is no checkpoint yet: training has div", []),
    ],
)
def test_it_ends_when_going_back_does_not_help(recipe_base, fake_engine, bad, words, rewinds) -> None:
    fake_engine.poison = bad
    with pytest.raises(TrainingError, match=words) as caught:
        start(recipe_base, "fault_tolerance.max_skipped_steps=2", "fault_tolerance.max_rollbacks=2")
    assert [e["rows"] for e in events(recipe_base, "rollback")] == [[48, end] for end in rewinds]
    assert caught.value.exit_code == 64
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert (found.step if found else 0) == (6 if rewinds else 0)


def test_saves_between_skips_do_not_make_them_endless(recipe_base, fake_engine) -> None:
    """With a save every two steps no stretch has more than two skipped steps, and still they add up."""
    fake_engine.poison = lambda call, batch: call > 6
    sets = ["fault_tolerance.max_skipped_steps=5", "checkpoint.interval=2", "fault_tolerance.max_rollbacks=1"]
    with pytest.raises(TrainingError):
        start(recipe_base, *sets)
    assert len(events(recipe_base, "rollback")) == 1


def test_a_clean_stretch_between_two_saves_counts_anew(recipe_base, fake_engine) -> None:
    fake_engine.poison = lambda call, batch: call in (1, 2, 10, 11, 19)
    assert start(recipe_base, "fault_tolerance.max_skipped_steps=2", "checkpoint.interval=4") == 0
    assert len(events(recipe_base, "step_skipped")) == 5
    assert events(recipe_base, "rollback") == []


def test_a_stop_among_skipped_steps_saves_good_weights(recipe_base, fake_engine) -> None:
    fake_engine.poison = lambda call, batch: call > 7
    sets = ["fault_tolerance.max_skipped_steps=2", "metrics.log_interval=5"]
    assert start(recipe_base, *sets, stop_after_step=9) == 75
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found.step == 9
    assert np.isfinite(found.read("weights", "w").view(np.float64)).all()
    assert found.manifest.scalars["optimizer_step"] == 7
