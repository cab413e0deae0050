"""SECURITY.md names the tests that hold each of its statements: they are there, and they have tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_statement_has_its_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.split("## What is not trusted")[1].split("## What is trusted")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        names = re.findall(r"`(packages/[\w/.-]+\.py)`", row)
        assert names or "| the same" in row, row
        for name in names:
            assert "def test_" in (ROOT / name).read_text(encoding="utf-8"), name
