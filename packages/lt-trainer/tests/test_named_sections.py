"""Sections whose names a person chooses: from every source to values with their origins, and back to text."""

import json
from pathlib import Path

import pytest

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe, from_dict, load, to_dict, to_toml

STORE = {"data": {"store": "stores/train"}}


def test_every_source_reaches_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nstore = "a"\n[data.validation_sets.web]\nstore = "b"\n[data.validation_sets.code]\nstore = "c"\n'
    )
    resolved = load(path, sets=["data.validation_sets.books-2.store=d", "data.validation_sets.code.store=e"])
    found = {name: entry.store for name, entry in resolved.recipe.data.validation_sets.items()}
    assert list(found.items()) == [("books-2", "d"), ("code", "e"), ("web", "b")]
    assert resolved.origins["data.validation_sets.web.store"] == f"{path}:4"
    assert resolved.origins["data.validation_sets.code.store"] == "--set"


def test_there_and_back(tmp_path: Path) -> None:
    recipe = load(base=STORE, sets=["data.validation_sets.web.store=b", "data.validation_sets.a_1.store=c"]).recipe
    assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe, load(base=STORE).origins))
    assert load(path).recipe == recipe
    assert load(base={"data": {"store": "a", "validation_sets": {}}}).recipe.data.validation_sets == {}
    assert Recipe().data.validation_sets == {}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["data.validation_sets.web.stroe=b"],
            "data.validation_sets.web.stroe = 'b' (--set): unknown field; did you mean data.validation_sets.web.store?",
        ),
        (
            ["data.validation_sets.web.store="],
            "data.validation_sets.web.store = '' (--set): this section needs data; set it to a store",
        ),
        (["data.validation_sets.web=b"], "data.validation_sets.web = 'b' (--set): this is a section, not a value"),
        (
            ["data.validation_sets.we b.store=b"],
            "data.validation_sets = 'we b': not a name: letters, digits, '_' and '-', the first a letter or a digit",
        ),
    ],
)
def test_refusals_name_the_section(sets: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=STORE, sets=sets)
    assert str(caught.value).startswith(message)


def test_an_empty_section_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.validation_sets\.web = \{\} \(base\): an empty section"):
        load(base={"data": {"store": "a", "validation_sets": {"web": {}}}})
