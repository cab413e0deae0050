"""YAML that is written is read back to equal values by a real reader."""

import pytest

from lt_trainer.release.yaml_text import to_yaml

VALUES = {
    "text": "a: b # c\n- d \"e\" 'f' é {x}",
    "words": ["yes", "no", "null", "1.0", "- x", ""],
    "numbers": [1, 2.5, 1e-05, -3],
    "nothing": None,
    "flags": [True, False],
    "empty": {"list": [], "mapping": {}},
    "nested": [{"a": 1, "b": [{"c": [1, [2, 3]]}]}, [], {}],
    "odd key: #": {"yes": 1},
}


def test_values_come_back_equal() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(to_yaml(VALUES)) == VALUES
