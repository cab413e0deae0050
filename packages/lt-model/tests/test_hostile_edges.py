"""What a stranger put in the place of a config.json, and numbers that no model has: refused at once, in a line."""

import json
import random
from pathlib import Path

import pytest

from lt_model import config_to_hf, preset
from lt_model.__main__ import main
from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    PLACES,
    assert_harmless,
    assert_refused,
    mutate,
    run_command,
    unusable_paths,
)


@pytest.mark.parametrize("kind", PLACES | CONTENTS)
def test_a_config_of_another_kind(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / ANSI.replace("/", "")
    folder.mkdir()
    (PLACES | CONTENTS)[kind](folder / "config.json")
    for path in (folder, folder / "config.json"):
        assert_refused(run_command(main, "show", path))


def test_a_path_that_may_not_be_looked_at(tmp_path: Path) -> None:
    with unusable_paths(tmp_path) as paths:
        for name, path in paths.items():
            outcome = run_command(main, "show", path)
            assert_refused(outcome)
            assert ("File name too long" if name == "too long" else "Permission denied") in outcome.err


@pytest.mark.parametrize("number", ["0", "-1", str(2**31), str(10**400), "9" * 5000])
@pytest.mark.parametrize("option", ["--seq-len", "--micro-batch-size"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_lengths_and_batches_that_no_model_has(option: str, number: str, form: list[str]) -> None:
    if (option, number) == ("--seq-len", "0"):
        number = "-2"  # 0 is the model's length
    assert_refused(run_command(main, "show", "tiny-2m", option, number, *form))


@pytest.mark.parametrize("name", [ANSI, "\ud800", "x" * 5000, "", "../" * 3000])
def test_names_that_no_preset_has(name: str) -> None:
    assert_refused(run_command(main, "show", name))


def test_values_of_a_config_changed_at_random(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    whole = config_to_hf(preset("llama3-8b"))
    whole |= {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": whole["rope_theta"]}}
    rng, path = random.Random(0), tmp_path / "config.json"
    codes = set()
    for _ in range(100):
        value = whole
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate(rng, value)
        path.write_text(json.dumps(value))
        outcome = run_command(main, "show", path)
        assert_harmless(outcome)
        codes.add(outcome.code)
    assert codes == {0, 64}
