"""What decides whether a stage is done, on values and small files."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_launch.policy import PIECE, WHOLE, Place, fingerprint, key, write_table

SPEC: dict[str, Any] = {"argv": ["a"], "env": {}, "inputs": [], "outputs": [], "cwd": ""}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "stages" / "train" / "spec.json")


@pytest.mark.parametrize(
    "change", [{"argv": ["b"]}, {"env": {"A": "1"}}, {"recipe": "x"}, {"image": "x"}, {"setup": ["x"]}, {"array": 2}]
)
def test_what_is_run_is_part_of_the_key(place: Place, change: dict[str, Any]) -> None:
    assert key(SPEC, place) == key(json.loads(json.dumps(SPEC)), place)
    assert key(SPEC | change, place) != key(SPEC, place)


@pytest.mark.parametrize("change", [{"nodes": 2}, {"grace_s": 1}, {"restart": {"max_restarts": 1}}, {"name": "x"}])
def test_where_and_how_long_it_runs_is_not(place: Place, change: dict[str, Any]) -> None:
    assert key(SPEC | change, place) == key(SPEC, place)


def test_a_stage_before_that_was_something_else_is_another_key(place: Place) -> None:
    """Also where no file is named that the one makes and the other reads."""
    spec = SPEC | {"after": [{"name": "a", "array": 0}, {"name": "b", "array": 2}]}
    found = {key(spec, place)}
    for name in ("a", "b.0", "b.1"):
        write_table(place.folder.parent / name / "done.json", {"key": name})
        found.add(key(spec, place))
    assert len(found) == 4


def test_elements_of_an_array_have_keys_of_their_own(place: Place) -> None:
    others = {key(SPEC, Place(place.stage / "spec.json", index)) for index in (None, 0, 1)}
    assert len(others) == 3


def test_a_fingerprint_is_the_content(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_text("x")
    first = fingerprint(tmp_path / "d")
    (tmp_path / "d" / "e" / "f").write_text("y")
    assert fingerprint(tmp_path / "d") != first
    (tmp_path / "d" / "e" / "f").write_text("x")
    assert fingerprint(tmp_path / "d") == first
    (tmp_path / "d" / "e" / "f").rename(tmp_path / "d" / "e" / "g")
    assert fingerprint(tmp_path / "d") != first
    assert fingerprint(tmp_path / "gone") == "missing"


@pytest.mark.parametrize("place_in_file", ["first", "last", "length"])
def test_a_large_file_is_told_by_its_ends_its_size_and_its_time(tmp_path: Path, place_in_file: str) -> None:
    import os

    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(WHOLE + PIECE)
    os.utime(path, (1, 1))
    first = fingerprint(path)
    with open(path, "r+b") as file:
        file.seek({"first": 0, "last": WHOLE + PIECE - 1, "length": WHOLE + PIECE}[place_in_file])
        file.write(b"\0" if place_in_file == "length" else b"x")
    os.utime(path, (1, 1))
    assert fingerprint(path) != first
