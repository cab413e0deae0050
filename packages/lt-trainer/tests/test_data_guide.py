"""docs/guides/data.md: each recipe in it loads, and its loader trains."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from lt_test_helpers.runs import start
from lt_trainer.config.recipe import from_dict, load, to_dict
from lt_trainer.run_directory.jsonl import read_jsonl

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "data.md"


def test_the_recipes_load() -> None:
    blocks = re.findall(r"\n\n((?:(?: {4}.*)?\n)+)", GUIDE.read_text(encoding="utf-8"))
    recipes = [load(base=tomllib.loads(block)).recipe for block in blocks if re.match(r" {4}\[", block)]
    assert len(recipes) == 4
    assert all(from_dict(to_dict(recipe)) == recipe for recipe in recipes)


def test_the_loader_trains_and_goes_on(recipe_base, fake_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (source,) = (block for block in blocks if "class Rows" in block)
    module = ModuleType("my_rows")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rows", module)
    recipe_base["model"]["vocab_size"] = 300
    recipe_base["data"] = {"loader": "my_rows:make", "seq_len": 32}
    assert start(recipe_base, stop_after_step=7) == 75
    assert start(recipe_base) == 0
    rows = [row for engine in fake_engine.opened for row in engine.rows]
    assert len(rows) == len(set(rows)) == 160
    found = read_jsonl(Path(recipe_base["run"]["dir"]) / "metrics.jsonl")
    assert {record["valid_tokens"] for record in found} == {8 * 32}
