"""Writing TOML that tomllib reads back, and finding lines."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.config.fields import flatten
from lt_trainer.config.toml import dump, format_value, line_numbers

text = st.text(st.characters(exclude_categories=["Cs"]))
scalar = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | text
key = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1)


@given(scalar | st.lists(scalar))
def test_values_survive(value: Any) -> None:
    assert tomllib.loads(f"x = {format_value(value)}") == {"x": value}


@given(st.dictionaries(key, st.dictionaries(key, scalar | st.lists(scalar | st.dictionaries(key, scalar)), min_size=1)))
def test_documents_survive(table: dict[str, Any]) -> None:
    assert tomllib.loads(dump(flatten(table))) == table


def test_dump_is_exactly_this() -> None:
    values = {"a.x": 1, "a.y": None, "b.c.z": "t", "a.w": (1.5, True)}
    assert dump(values, {"a.x": "default"}) == '[a]\nx = 1  # default\nw = [1.5, true]\n\n[b.c]\nz = "t"\n'


def test_line_numbers() -> None:
    document = """# a recipe
[model]
hidden_size = 512 # wide

[ model.rope_scaling ]  # stretched
factor = 8
[data]
"store" = "x = y"
mask.kind = 1
# seq_len = 3
[data2]
scaling = { factor = 3 }
"""
    assert line_numbers(document) == {
        "model": 2,
        "model.hidden_size": 3,
        "model.rope_scaling": 5,
        "model.rope_scaling.factor": 6,
        "data": 7,
        "data.store": 8,
        "data.mask.kind": 9,
        "data2": 11,
        "data2.scaling": 12,
    }


def test_what_no_recipe_holds_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        format_value(object())
