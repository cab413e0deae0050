"""Run lengths in words: epochs and percentages, as steps with their origin."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import TokenStore, open_pack
from lt_trainer.config.recipe import from_dict, load, to_dict, to_toml
from lt_trainer.config.run_length import steps_from_fraction
from lt_trainer.errors import RecipeError

BASE = {"data": {"store": "elsewhere"}, "schedule": {"kind": "constant"}}


@given(st.integers(1, 10**6), st.integers(0, 10000))
def test_a_share_is_the_nearest_number_of_updates(max_steps: int, basis_points: int) -> None:
    share = Fraction(basis_points, 10000)
    found = steps_from_fraction(share, max_steps)
    exact = share * max_steps
    assert abs(found - exact) <= Fraction(1, 2) or (found == 1 and 0 < exact < 1)
    assert (found == 0) == (basis_points == 0)


def test_a_share_of_the_run() -> None:
    resolved = load(base=BASE, overrides=["schedule.max_steps=31800", "schedule.warmup_steps=1%"])
    assert resolved.recipe.schedule.warmup_steps == 318
    assert resolved.origins["schedule.warmup_steps"] == "--set: 1 % of 31,800"
    assert resolved.is_given("schedule.warmup_steps")
    half = load(base=BASE, hyperparameters={"WARMUP_STEPS": '"0.5 %"'}).recipe
    assert half.schedule.warmup_steps == 50  # of 10,000
    assert from_dict(to_dict(half)) == half
    for text in ("max_steps=1%", "warmup_steps=2 epochs", "max_steps=2 epochs more"):
        with pytest.raises(RecipeError, match=r'schedule\.\w+ = ".*" \(--set\): must be a number of steps'):
            load(base=BASE, overrides=[f"schedule.{text}"])


def test_epochs_are_counted_in_the_pack(little_data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    store = little_data / "train"
    rows = open_pack(TokenStore(store), seq_len=32).n_rows
    batch = 4 if 3 * rows % 4 else 5
    assert 3 * rows % batch  # else nothing is left over, and the test shows less
    recipe.write_text(
        f'[data]\nstore = "{store}"\nseq_len = 32\n[schedule]\nmax_steps = "3 epochs"\nwarmup_steps = "10%"\n'
        f"[batch]\nglobal_batch_size = {batch}\nmicro_batch_size = 1\n"
    )
    resolved = load(recipe)
    steps, left = divmod(3 * rows, batch)
    assert resolved.recipe.schedule.max_steps == steps
    assert resolved.recipe.schedule.warmup_steps == steps_from_fraction(Fraction(1, 10), steps)
    assert resolved.origins["schedule.max_steps"] == (
        f"{recipe}: 3 epochs of {rows} rows, {batch} per step; {left} rows left over"
    )
    written = tmp_path / "again.toml"
    written.write_text(to_toml(resolved.recipe, resolved.origins))
    assert load(written).recipe == resolved.recipe
    half = load(recipe, overrides=["schedule.max_steps=0.5 epochs"])
    assert half.recipe.schedule.max_steps == rows // 2 // batch


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("data.store=gone", 'data.store = "gone" (--set): epochs are counted in the store, which does not exist here'),
        ("batch.ramp.start=1 batch.ramp.steps=2", "a constant batch size"),
        ("batch.global_batch_size=100000000", "are less than one step"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(little_data: Path, overrides: str, told: str) -> None:
    data = {"store": str(little_data / "train"), "seq_len": 32}
    base = {"data": data, "batch": {"global_batch_size": 4, "micro_batch_size": 1}}
    with pytest.raises(RecipeError, match=re.escape(told)):
        load(base=base, overrides=["schedule.max_steps=2 epochs", *overrides.split()])
