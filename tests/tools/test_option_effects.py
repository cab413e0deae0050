"""The table of options and their effects: complete, current, and with tests that exist."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import option_effects
import pytest
from option_effects import find_problems, has_test, read_effects
from option_schema import Option, read_options

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def options() -> list[Option]:
    return read_options()


def test_every_option_has_an_effect_that_a_test_shows(options: list[Option]) -> None:
    assert find_problems(options=options) == []


def test_an_option_without_an_entry_is_noticed(options: list[Option]) -> None:
    new = replace(options[0], name="optimizer.brand_new")
    (problem,) = find_problems(options=[*options, new])
    assert problem.startswith("optimizer.brand_new has no entry")


def test_an_entry_without_an_option_or_a_test_is_noticed(options: list[Option], tmp_path: Path) -> None:
    for name in (option_effects.TABLE, option_effects.PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / option_effects.TABLE).write_text(
        '[run]\nseed = "tests/no_such_file.py::test_a"\ndir = { test = "", inert = "storage only" }\n'
        'engine = { test = "a::b", inert = "so" }\ngone = "a::b"\n'
    )
    of_run = [option for option in options if option.group == "run" and option.name != "run.gc_interval"]
    assert sorted(find_problems(tmp_path, of_run)) == [
        "run.dir: only an option whose hardware is absent may have no test",
        "run.engine: inert = 'so' is none of hardware absent, speed only, storage only",
        "run.engine: there is no test a::b",
        "run.seed: there is no test tests/no_such_file.py::test_a",
        "tools/option_effects.toml: there is no option run.gone",
    ]


def test_a_test_is_known_by_its_function_and_parameter() -> None:
    here = "tests/tools/test_option_effects.py::test_a_test_is_known_by_its_function_and_parameter"
    assert has_test(ROOT, here)
    assert has_test(ROOT, f"{here}[options]")
    assert not has_test(ROOT, f"{here}[{'x' * 3}y]")
    assert not has_test(ROOT, here.replace("known", "unknown"))


def test_every_case_below_tests_options_is_named() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/options"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ids = [line for line in done.stdout.splitlines() if line.startswith("tests/options/") and line.endswith("]")]
    cases = {node for node in ids if "::test_an_ignored_" not in node}
    named = {effect.test for effect in read_effects().values() if effect.test.startswith("tests/options/")}
    assert cases == named
