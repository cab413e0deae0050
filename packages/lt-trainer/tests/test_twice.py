"""What only goes wrong the second time: two rollbacks, resumes and runs, on one fake rank.

`packages/lt-trainer-gpu/tests/test_twice_on_ranks.py` has the same on tensor-parallel and pipeline-parallel ranks.
"""

import importlib
import signal
from pathlib import Path

import pytest

from lt_ckpt import find_latest_valid, list_steps
from lt_test_helpers.runs import events, losses, start
from lt_trainer.config.section import flatten
from lt_trainer.resilience.stop_signals import STOP_SIGNALS
from lt_trainer.toml import dump

TOLERANT = "fault_tolerance.max_skipped_steps=1"


# ---- rollbacks ----


def test_two_rollbacks_skip_two_ranges_also_with_stops_between_and_behind_them(
    recipe_base, fake_engine, tmp_path
) -> None:
    """Steps 8 and 9 go back to 6; then steps 14 and 15 go back to 12."""
    fake_engine.poison = lambda call, batch: call in (8, 9, 17, 18)
    assert start(recipe_base, TOLERANT) == 0
    (engine,) = fake_engine.opened
    assert [(one["step"], one["rows"]) for one in events(recipe_base, "rollback")] == [(6, [48, 72]), (12, [120, 144])]
    found, _ = find_latest_valid(Path(recipe_base["run"]["dir"]) / "checkpoints")
    assert found is not None
    assert (found.manifest.data["skipped"], found.manifest.data["row"]) == ([[48, 72], [120, 144]], 20 * 8 + 24 + 24)
    assert engine.steps == 20
    assert engine.lrs[9:15] == engine.lrs[6:9] + engine.lrs[12:15]  # by the step, whatever the way there
    whole = losses(recipe_base)
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, TOLERANT, stop_after_step=12) == 75
    fake_engine.poison = lambda call, batch: call in (2, 3)
    assert start(recipe_base, TOLERANT, stop_after_step=18) == 75
    fake_engine.poison = lambda call, batch: False
    assert start(recipe_base, TOLERANT) == 0
    assert [one["step"] for one in events(recipe_base, "rollback")] == [6, 12]
    resumed = losses(recipe_base)
    assert [resumed[step] for step in range(16, 21)] == [whole[step] for step in range(16, 21)]


# ---- resumes ----


@pytest.mark.parametrize("stops", [(5, 9), (6, 12), (1, 2, 3), (19,)])
@pytest.mark.parametrize("background", [False, True])
def test_any_number_of_resumes_equal_the_run_in_one_go(
    recipe_base, fake_engine, tmp_path, stops: tuple[int, ...], background: bool
) -> None:
    """All in one process: each is a second run there, too."""
    recipe_base["checkpoint"] |= {"async_save": background}
    assert start(recipe_base) == 0
    whole = losses(recipe_base)
    last = fake_engine.opened[-1].weights
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    for step in stops:
        assert start(recipe_base, stop_after_step=step) == 75
    assert start(recipe_base) == 0
    assert losses(recipe_base) == whole
    assert fake_engine.opened[-1].weights.tolist() == last.tolist()
    assert [one["step"] for one in events(recipe_base, "resume")] == list(stops)
    assert [one["step"] for one in events(recipe_base, "completed")] == [20]
    assert start(recipe_base) == 0  # nothing is left to do, and nothing is done again
    assert losses(recipe_base) == whole


# ---- commands in one process ----


@pytest.mark.parametrize(("module", "words"), [("lt_trainer", ["run"]), ("lt_launch", ["train", "run"])])
def test_a_second_command_in_one_process_stops_as_the_first(
    module: str, words: list[str], recipe_base, fake_engine, tmp_path: Path
) -> None:
    """Stop signals of the first are forgotten, those of the second are recorded, and the caller's handlers are back."""
    main = importlib.import_module(f"{pytest.importorskip(module).__name__}.__main__").main
    recipe = tmp_path / "run.toml"
    recipe_base["run"] |= {"engine": "fake"}
    recipe.write_text(dump(flatten(recipe_base)))
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    codes = [main([*words, str(recipe), "--stop-after-step", str(step)]) for step in (3, 6, 9)]
    assert codes == [75, 75, 75]
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert [step for step, _ in list_steps(Path(recipe_base["run"]["dir"]) / "checkpoints")] == [9, 6, 3]
    assert main([*words, str(recipe)]) == 0
    assert [one["step"] for one in events(recipe_base, "completed")] == [20]
