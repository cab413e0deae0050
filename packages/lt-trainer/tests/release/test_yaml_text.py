"""YAML that is written is read back to equal values by a real reader."""

import pytest

from lt_trainer.release.yaml_text import to_yaml

VALUES = {
    "text": "a: b # c\n- d \"e\" 'f' é {x}",
    "words": ["yes", "no", "null", "1.0", "- x", ""],
    "numbers": [1, 2.5, 1e-05, -3],
    "others": "\x00\x1b\x7f\x85\x9b\u2028\u2029\ufeff\ufffe\u202e\U000e0001\n---\n\t\r",
    "\x85\u2028": "\\u0085",
    "nothing": None,
    "flags": [True, False],
    "empty": {"list": [], "mapping": {}},
    "nested": [{"a": 1, "b": [{"c": [1, [2, 3]]}]}, [], {}],
    "odd key: #": {"yes": 1},
}


def test_values_come_back_equal() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(to_yaml(VALUES)) == VALUES
