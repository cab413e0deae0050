"""The page of guarantees: every promise has a test, every mark names a promise, and the page is what both say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import guarantees  # noqa: E402

TABLE = """
[saving]
title = "Saving"

[saving.promises]
atomic = "Whole or not there."
hashed = "Every byte."
"""
TEST = """
import pytest


@pytest.mark.guarantee("atomic")
def test_power_cut() -> None: ...


@pytest.mark.slow
@pytest.mark.guarantee("hashed", "atomic")
def test_all_bits() -> None: ...


def test_other() -> None: ...
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two promises, two tests, a page that is up to date."""
    for folder in ("tools", "docs", "tests", "packages/lt-ckpt/tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / guarantees.PROMISES).write_text(TABLE)
    (tmp_path / "packages/lt-ckpt/tests/test_save.py").write_text(TEST)
    page = tmp_path / guarantees.PAGE
    page.write_text(f"# By hand\n\n{guarantees.BEGIN}\n{guarantees.END}\n")
    page.write_text(guarantees.render_page(tmp_path))
    assert guarantees.find_problems(tmp_path) == []
    return tmp_path


def test_the_page_here() -> None:
    assert guarantees.find_problems() == []
    assert len(guarantees.read_promises()) > 100


def test_a_promise_stands_with_its_tests(small: Path) -> None:
    both = (
        "[lt-ckpt/test_save.py::test_power_cut](../packages/lt-ckpt/tests/test_save.py), "
        "[lt-ckpt/test_save.py::test_all_bits](../packages/lt-ckpt/tests/test_save.py) *(slow)*"
    )
    text = (small / guarantees.PAGE).read_text()
    assert text.startswith("# By hand\n")
    assert f"| **atomic**: Whole or not there. | {both} |" in text


def test_what_is_missing_is_named(small: Path) -> None:
    source = small / "packages/lt-ckpt/tests/test_save.py"
    source.write_text(TEST.replace('"hashed", "atomic"', '"hashd"'))
    assert guarantees.find_problems(small) == [
        "packages/lt-ckpt/tests/test_save.py::test_all_bits: no promise 'hashd' in tools/guarantees.toml",
        'hashed: no test has @pytest.mark.guarantee("hashed")',
        "docs/guarantees.md is not up to date: uv run python tools/guarantees.py --write",
    ]
    source.write_text(TEST.replace('"atomic")\ndef', ")\ndef").replace(', "atomic"', ""))
    assert any("guarantee() needs ids" in one for one in guarantees.find_problems(small))


def test_a_change_of_the_table_is_noticed(small: Path) -> None:
    (small / guarantees.PROMISES).write_text(TABLE.replace("Every byte.", "Each byte."))
    assert guarantees.find_problems(small) == [
        "docs/guarantees.md is not up to date: uv run python tools/guarantees.py --write"
    ]
