"""What the strict reader of JSON refuses, and the dataclasses it makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from lt_data import DataError
from lt_data.strict_json import load_object, loads, parse


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    size: int = 0

    def __post_init__(self) -> None:
        if self.size < 0:
            raise DataError(f"size = {self.size}: not negative")


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    items: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    rate: float = 0.0
    on: bool = False
    inner: Inner | None = None
    free: Mapping[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested more than 64 deep"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "nested more than 64 deep"),
        (b'{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"\xff{}", "can't decode byte 0xff"),
        (b"{} {}", "Extra data"),
        (b"1" * 10_000, "Exceeds the limit"),
        (b"[]", "holds a list, not an object"),
        (b"null", "holds null, not an object"),
    ],
)
def test_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"^file: .*{message}.*; save it again$"):
        load_object(content, "file", "save it again")


def test_accepted() -> None:
    deep = b"[" * 64 + b"]" * 64
    assert str(loads(deep, "file", "")).encode() == deep
    assert load_object('{"a": [1, 2.5, null, true, "\\ud800"]}', "f", "") == {"a": [1, 2.5, None, True, "\ud800"]}


def test_a_dataclass_is_made() -> None:
    values = {
        "kind": "b",
        "items": [{"name": "x", "size": 3}, {"name": "y"}],
        "pair": [4, "z"],
        "by_name": {"k": {"name": "w"}},
        "rate": 2,
        "inner": None,
        "free": {"any": [{"thing": None}]},
    }
    assert parse(Outer, values, "file", "r") == Outer(
        kind="b",
        items=(Inner(name="x", size=3), Inner(name="y")),
        pair=(4, "z"),
        by_name={"k": Inner(name="w")},
        rate=2,
        free={"any": [{"thing": None}]},
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "the value is a list, not an object"),
        ({}, "no field kind"),
        ({"kind": "a", "other": 1}, "unknown field other"),
        ({"kind": "c"}, "kind is a string, not one of 'a', 'b'"),
        ({"kind": ["a"]}, "kind is a list, not one of 'a', 'b'"),
        ({"kind": "a", "on": 1}, "on is an integer, not true or false"),
        ({"kind": "a", "items": {"0": 1}}, "items is an object, not a list"),
        ({"kind": "a", "items": [{"name": "x"}, {"name": None}]}, r"items\[1\]\.name is null, not a string"),
        ({"kind": "a", "items": [{"name": "x", "size": True}]}, r"items\[0\]\.size is true or false, not an integer"),
        ({"kind": "a", "items": [{"name": "x", "size": 1.0}]}, r"items\[0\]\.size is a number, not an integer"),
        ({"kind": "a", "items": [{"name": "x", "size": -1}]}, r"size = -1: not negative"),
        ({"kind": "a", "pair": [1]}, "pair is a list, not a list of 2"),
        ({"kind": "a", "by_name": {"k": {}}}, r"no field by_name\['k'\]\.name"),
        ({"kind": "a", "inner": "x"}, "inner is a string, not an object"),
        ({"kind": "a", "rate": "1"}, "rate is a string, not a number"),
        ({"kind": "a", "free": []}, "free is a list, not an object"),
    ],
)
def test_other_values_are_named(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^file: {message}; save it again$"):
        parse(Outer, values, "file", "save it again")
