"""Sections with user-chosen names: from every source to values with origins, and back to text."""

import json
from pathlib import Path

import pytest

from lt_trainer.config.recipe import from_dict, load, to_dict, to_toml
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RecipeError

STORE = {"data": {"store": "stores/train"}}


def test_every_source_reaches_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nstore = "a"\n[data.validation_sets.web]\nstore = "b"\n[data.validation_sets.code]\nstore = "c"\n'
    )
    resolved = load(path, overrides=["data.validation_sets.books-2.store=d", "data.validation_sets.code.store=e"])
    found = {name: entry.store for name, entry in resolved.recipe.data.validation_sets.items()}
    assert list(found.items()) == [("books-2", "d"), ("code", "e"), ("web", "b")]
    assert resolved.origins["data.validation_sets.web.store"] == f"{path}:4"
    assert resolved.origins["data.validation_sets.code.store"] == "--set"


def test_there_and_back(tmp_path: Path) -> None:
    recipe = load(base=STORE, overrides=["data.validation_sets.web.store=b", "data.validation_sets.a_1.store=c"]).recipe
    assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe, load(base=STORE).origins))
    assert load(path).recipe == recipe
    assert load(base={"data": {"store": "a", "validation_sets": {}}}).recipe.data.validation_sets == {}
    assert Recipe().data.validation_sets == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.validation_sets.web.stroe=b"],
            "data.validation_sets.web.stroe = 'b' (--set): unknown field; did you mean data.validation_sets.web.store?",
        ),
        (
            ["data.validation_sets.web.store="],
            "data.validation_sets.web.store = '' (--set): must not be empty; set it to a token store",
        ),
        (["data.validation_sets.web=b"], "data.validation_sets.web = 'b' (--set): not a value but a section"),
        (
            ["data.validation_sets.we b.store=b"],
            "data.validation_sets = 'we b': invalid name: must have letters, digits, '_' and '-' "
            "and start with a letter or digit",
        ),
    ],
)
def test_refusals_name_the_section(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=STORE, overrides=overrides)
    assert str(caught.value).startswith(message)


def test_an_empty_section_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.validation_sets\.web = \{\} \(base\): empty section"):
        load(base={"data": {"store": "a", "validation_sets": {"web": {}}}})
