"""The page of guarantees: every promise names tests, and every test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/.-]+\.py)::(\w+)`", PAGE)))


def test_every_promise_names_a_test() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith(("| promise", "| fault"))]
    assert len(rows) > 25
    assert [row for row in rows if "::" not in row.rpartition(" | ")[2]] == []


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for path, name in NAMED:
        source = ROOT / path
        tree = ast.parse(source.read_text(encoding="utf-8")) if source.exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert missing == []
