"""Dataclasses made of JSON by their annotations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lt_data import DataError
from lt_data.strict_json import load_object, parse


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    items: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    rate: float = 0.0
    inner: Inner | None = None


def test_a_dataclass_is_made():
    values = {"kind": "b", "items": [{"name": "x", "size": 3}], "pair": [4, "z"], "by_name": {"k": {"name": "w"}}}
    made = Outer(kind="b", items=(Inner(name="x", size=3),), pair=(4, "z"), by_name={"k": Inner(name="w")}, rate=2)
    assert parse(Outer, {**values, "rate": 2, "inner": None}, "file", "r") == made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no field kind"),
        ({"kind": "a", "other": 1}, "unknown field other"),
        ({"kind": "c"}, "kind is a string, not one of 'a', 'b'"),
        ({"kind": "a", "items": [{"name": "x"}, {"name": None}]}, r"items\[1\]\.name is null, not a string"),
        ({"kind": "a", "items": [{"name": "x", "size": True}]}, r"items\[0\]\.size is true or false, not an integer"),
        ({"kind": "a", "pair": [1]}, "pair is a list, not a list of 2"),
        ({"kind": "a", "by_name": {"k": {}}}, r"no field by_name\['k'\]\.name"),
    ],
)
def test_other_values_are_named(values, message):
    with pytest.raises(DataError, match=rf"^file: {message}; save it again$"):
        parse(Outer, values, "file", "save it again")
    for content in (b"[" * 100_000, b"\xff{}", b"{} {}", b"[]"):
        with pytest.raises(DataError, match=r"^file: (not JSON|holds a list, not an object).*; save it again$"):
            load_object(content, "file", "save it again")
