"""The tables of docs/guides/recipe.md are what the dataclasses say, and every section has one."""

from dataclasses import dataclass
from typing import Literal

import pytest
import recipe_page
from members import ROOT, ToolError

from lt_trainer.config.fields import leaves, option
from lt_trainer.config.hyperparameters import hyperparameter_leaves


def test_the_page_is_what_the_sources_say() -> None:
    """If this fails: tools/recipe_page.py --write."""
    text = (ROOT / recipe_page.PAGE).read_text(encoding="utf-8")
    assert recipe_page.fill_tables(text, recipe_page.section_fields()) == text


def test_every_hyperparameter_stands_in_a_table() -> None:
    text = (ROOT / recipe_page.PAGE).read_text(encoding="utf-8")
    assert len(hyperparameter_leaves()) == 20
    for name, leaf in hyperparameter_leaves().items():
        (row,) = [line for line in text.splitlines() if line.endswith(f"| `{name}` |")]
        assert row.startswith(f"| `{leaf.name}` |")


@dataclass(frozen=True, kw_only=True)
class Example:
    rate: float = option(1e-3, "a | b", unit="s", hyperparameter="RATE")
    kind: Literal["x", "y"] = option("x", "which one")
    ranks: tuple[int, ...] = option((0, 8), "some")
    on: bool = option(False, "whether")


def test_a_table() -> None:
    assert recipe_page.format_table(list(leaves(Example, "s.").values())).splitlines()[2:] == [
        "| `s.rate` | `0.001` | a \\| b (s) | `RATE` |",
        '| `s.kind` | `"x"` | which one. One of `"x"`, `"y"` |  |',
        "| `s.ranks` | `[0, 8]` | some |  |",
        "| `s.on` | `false` | whether |  |",
    ]


def test_a_section_without_a_table_and_a_table_without_a_section_are_errors() -> None:
    found = {"s": list(leaves(Example, "s.").values())}
    filled = recipe_page.fill_tables("a\n<!-- fields: s -->\n<!-- /fields -->\nb\n", found)
    assert recipe_page.fill_tables(filled, found) == filled
    assert filled.count("| `s.") == 4
    for text in ("nothing\n", "<!-- fields: t -->\n<!-- /fields -->\n", filled + filled):
        with pytest.raises(ToolError, match="the sections are s"):
            recipe_page.fill_tables(text, found)
