"""docs/reference/recipe.toml has every field of a recipe with its default, as `lt train show` says."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lt_launch.__main__ import main
from lt_trainer.config.recipe import is_default

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recipe.toml"


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def test_the_page_has_every_field_with_its_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[data]\nsynthetic = true\n[model]\nvocab_size = 64\n")
    page = flatten(tomllib.loads(PAGE.read_text(encoding="utf-8")))
    fields: set[str] = set()
    for engine in ("gpu", "neuron"):
        assert main(["train", "show", str(tmp_path / "run.toml"), "--set", f"run.engine={engine}", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        values = flatten(shown["recipe"])
        fields |= set(shown["origins"])
        defaults = {name: values.get(name) for name, origin in shown["origins"].items() if is_default(origin)}
        assert {name: page.get(name) for name in defaults} == defaults
    assert set(page) == fields
