"""The codec: exact coercions by declared type, in both forms, and the messages of what does not fit."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from lt_trainer.config.fields import (
    build,
    check_types,
    coerce,
    flatten,
    leaf_values,
    leaves,
    option,
    section_names,
    suggest,
)
from lt_trainer.errors import RecipeError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = option(3, "how deep", unit="m", hyperparameter="DEPTH")
    names: tuple[str, ...] = option((), "names")


@dataclass(frozen=True, kw_only=True)
class Outer:
    rate: float = option(0.5, "how fast")
    inner: Inner = field(default_factory=Inner)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "outer")


TEXT = [
    ("1e-3", float, 0.001),
    (".5", float, 0.5),
    ("1.", float, 1.0),
    ("1_000", float, 1000.0),
    ("7", float, 7.0),
    (" 7 ", int, 7),
    ("1_000", int, 1000),
    ("-3", int, -3),
    ("true", bool, True),
    ("True", bool, True),
    ("1", bool, True),
    ("false", bool, False),
    ("False", bool, False),
    ("0", bool, False),
    ("abc", str, "abc"),
    ('"abc"', str, "abc"),
    ('"1e-3"', float, 0.001),
    ('"', str, '"'),
    ("none", int | None, None),
    ("4", int | None, 4),
    ("bfd", Literal["bfd", "concat"], "bfd"),
    ("2", Literal[1, 2], 2),
    ("blue", Colour, Colour.BLUE),
    ("1, 2,3", tuple[int, ...], (1, 2, 3)),
    ("[a,b]", tuple[str, ...], ("a", "b")),
    ("", tuple[int, ...], ()),
]


@pytest.mark.parametrize(("given", "hint", "wanted"), TEXT)
def test_text_is_parsed_by_the_declared_type(given: str, hint: Any, wanted: Any) -> None:
    found = coerce(given, hint, name="a.b", text=True)
    assert found == wanted
    assert type(found) is type(wanted)


TYPED = [
    (3, int, 3),
    (3, float, 3.0),
    (0.25, float, 0.25),
    (True, bool, True),
    ("x", str, "x"),
    (None, int | None, None),
    ([1, 2], tuple[float, ...], (1.0, 2.0)),
    ("concat", Literal["bfd", "concat"], "concat"),
    ("red", Colour, Colour.RED),
    (Colour.RED, Colour, Colour.RED),
]


@pytest.mark.parametrize(("given", "hint", "wanted"), TYPED)
def test_typed_values_are_checked_and_widened(given: Any, hint: Any, wanted: Any) -> None:
    found = coerce(given, hint, name="a.b")
    assert found == wanted
    assert type(found) is type(wanted)


REFUSED = [
    (True, int, False, "expected an integer"),
    (1.5, int, False, "expected an integer"),
    (1.0, int, False, "expected an integer"),
    ("3", int, False, "expected an integer"),
    ("1.5", int, True, "expected an integer"),
    ("1e3", int, True, "expected an integer"),
    (True, float, False, "expected a number"),
    ("1e-3", float, False, "expected a number"),
    ("fast", float, True, "expected a number"),
    ("nan", float, True, "expected a finite number"),
    ("inf", float, True, "expected a finite number"),
    (float("inf"), float, False, "expected a finite number"),
    (10**400, float, False, "expected a finite number"),
    (1, bool, False, "expected true or false"),
    ("yes", bool, True, "expected true or false"),
    (3, str, False, "expected a string"),
    ("\ud800", str, False, "not valid Unicode"),
    ("x", tuple[str, ...], False, "expected a list"),
    (None, int, False, "expected an integer"),
    (True, Literal[1, 2], False, "not one of the choices"),
]


@pytest.mark.parametrize(("given", "hint", "text", "problem"), REFUSED)
def test_what_does_not_fit_is_refused(given: Any, hint: Any, text: bool, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        coerce(given, hint, name="a.b", source="run.toml:3", text=text)
    message = str(caught.value)
    assert message.startswith(f"a.b = {given!r} (run.toml:3): {problem}; ")
    assert caught.value.exit_code == 64


def test_a_near_choice_is_suggested() -> None:
    with pytest.raises(RecipeError) as caught:
        coerce("bdf", Literal["bfd", "concat"], name="data.packing", source="--set", text=True)
    assert str(caught.value) == (
        "data.packing = 'bdf' (--set): not one of the choices; use one of 'bfd', 'concat' (did you mean 'bfd'?)"
    )


def test_leaves_carry_the_metadata_and_skip_open_tables() -> None:
    found = leaves(Outer)
    assert list(found) == ["rate", "inner.depth", "inner.names"]
    assert (found["inner.depth"].default, found["inner.depth"].unit, found["inner.depth"].hyperparameter) == (
        3,
        "m",
        "DEPTH",
    )
    assert section_names(found) == {"inner"}
    assert list(leaves(Inner, "x.")) == ["x.depth", "x.names"]


def test_flatten_keeps_empty_tables() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": {}, "e": [1]}) == {"a.b": 1, "a.c": {}, "d": {}, "e": [1]}


def test_build_and_values_of_are_inverse() -> None:
    made = build(Outer, {"rate": 2, "inner.names": ["x"], "other.rate": 9}, extra={"k": 1})
    assert made == Outer(rate=2.0, inner=Inner(names=["x"]), extra={"k": 1})  # pyright: ignore[reportArgumentType]
    assert isinstance(made.rate, float)
    assert leaf_values(made) == {"rate": 2.0, "inner.depth": 3, "inner.names": ["x"]}
    assert build(Outer, {"s.rate": 4.0}, "s.").rate == 4.0


def test_check_types_names_section_and_field() -> None:
    with pytest.raises(RecipeError, match=r"^outer\.rate = 'x': expected a number; "):
        Outer(rate="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RecipeError, match=r"^outer\.inner = 3: expected Inner$"):
        Outer(inner=3)  # pyright: ignore[reportArgumentType]


def test_suggest_ignores_case_and_stays_silent_when_nothing_is_near() -> None:
    assert suggest("learning_rat", ["LEARNING_RATE", "BETA1"]) == "LEARNING_RATE"
    assert suggest("zzz", ["LEARNING_RATE"]) == ""


def test_located_adds_only_the_sources_of_its_own_fields() -> None:
    error = RecipeError("too big", values={"a.b": 3, "a.c": 4}, remedy="make it smaller")
    located = error.with_origins({"a.b": "run.toml:2", "x.y": "--set"})
    assert str(located) == "a.b = 3 (run.toml:2), a.c = 4: too big; make it smaller"
    assert located.origins == {"a.b": "run.toml:2"}
