"""Tables of docs/guides/recipe.md, made from the dataclasses of the recipe and of the engines' options.

    python tools/recipe_page.py            # fails where the page does not match the sources
    python tools/recipe_page.py --write

A table is between `<!-- fields: SECTION -->` and `<!-- /fields -->`; the text around it is written by hand. Every
section of the recipe has exactly one table. Under a second, without torch.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Mapping

from members import ROOT, ToolError

from lt_trainer import Recipe
from lt_trainer.config import Leaf, leaves, named_section_tables
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_neuron.options import NeuronOptions

__all__ = ["fill_tables", "format_table", "section_fields"]

PAGE = "docs/guides/recipe.md"
BLOCK = re.compile(r"(<!-- fields: ([\w.]+) -->\n).*?(<!-- /fields -->)", re.S)
ENTRIES = {"data.mixture": "NAME", "data.validation_sets": "NAME", "data.bucket_weights": "LENGTH"}
"""Tables whose sections have names of the user's choice, and what stands for such a name."""
ENGINES = {"engine.gpu": GpuOptions, "engine.neuron": NeuronOptions}


def section_fields() -> dict[str, list[Leaf]]:
    """Return the fields of every top-level section and of every engine, in source order."""
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves(Recipe).values():
        found.setdefault(leaf.name.partition(".")[0], []).append(leaf)
    for name, cls in named_section_tables(Recipe).items():
        placed = leaves(cls, f"{name}.{ENTRIES[name]}.").values()
        found[name.partition(".")[0]].extend(placed)
    for name, options in ENGINES.items():
        found[name] = list(leaves(options, f"{name}.").values())
    return found


def format_table(fields: list[Leaf]) -> str:
    """Return the table of one section as Markdown."""
    lines = ["| field | default | meaning | hyperparameter |", "|---|---|---|---|"]
    for leaf in fields:
        choices = _choices(leaf.hint)
        meaning = leaf.help.replace("|", "\\|")
        meaning += f" ({leaf.unit})" if leaf.unit else ""
        meaning += f". One of {', '.join(f'`{_toml(one)}`' for one in choices)}" if choices else ""
        name = f"`{leaf.hyperparameter}`" if leaf.hyperparameter else ""
        lines.append(f"| `{leaf.name}` | `{_toml(leaf.default)}` | {meaning} | {name} |")
    return "\n".join(lines) + "\n"


def fill_tables(text: str, found: Mapping[str, list[Leaf]]) -> str:
    """Return a page with its tables replaced.

    Raises:
        ToolError: a section has no table or two, or there is a table of an unknown section.
    """
    named = [match[2] for match in BLOCK.finditer(text)]
    if sorted(named) != sorted(found):
        raise ToolError(f"{PAGE} has tables of {', '.join(named) or 'nothing'}; the sections are {', '.join(found)}")
    return BLOCK.sub(lambda match: f"{match[1]}{format_table(found[match[2]])}{match[3]}", text)


def _choices(hint: object) -> tuple[object, ...]:
    """Return the allowed values of a field, if they are enumerated."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return typing.get_args(hint)
    return _choices(typing.get_args(hint)[0]) if origin is tuple else ()


def _toml(value: object) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def main(arguments: list[str]) -> int:
    """Check or write the page; return 1 if it does not match the sources."""
    path = ROOT / PAGE
    text = path.read_text(encoding="utf-8")
    now = fill_tables(text, section_fields())
    if arguments == ["--write"]:
        path.write_text(now, encoding="utf-8")
        return 0
    if arguments:
        raise ToolError(f"unknown arguments {' '.join(arguments)}; the only option is --write")
    if text != now:
        print(f"{PAGE} is outdated; run tools/recipe_page.py --write")
        return 1
    print(f"{PAGE} is up to date")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"recipe_page: {exc}")
