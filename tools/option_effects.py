"""Table of docs/reference/options.md: every option of lt with the test that shows its effect.

    python tools/option_effects.py            # prints problems; exit code 1 if there are any
    python tools/option_effects.py --write    # writes the page

`tools/option_effects.toml` has an entry for every option: the id of a test that fails where the option is parsed,
checked, printed and stored but otherwise ignored (`tools/plant_ignored_options.py` plants just that, and runs the
test). An option that changes no result of a run says why, in one of three words, and its test shows what changes
instead: a call, a kernel, an allocation, a file. Only what needs absent hardware may have no test.

An option without an entry, an entry without an option, a test that does not exist, an unknown reason and an outdated
page are errors. A few seconds, without torch.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from members import ROOT, ToolError
from option_schema import Option, read_options

__all__ = ["Effect", "find_problems", "read_effects", "render_page"]

TABLE, PAGE = "tools/option_effects.toml", "docs/reference/options.md"
REASONS = {
    "hardware absent": "acts on hardware that no test has",
    "speed only": "changes time or memory, no result",
    "storage only": "changes which files there are, no result",
}
HEAD = """# Options and what shows their effect

<!-- made by tools/option_effects.py -->

Every field of the recipe and every option of every command, with a test that fails if the option is read, checked,
printed and stored but otherwise ignored. `python tools/plant_ignored_options.py` plants that fault for each option and
runs its test. The meaning of fields is in the [recipe reference](../guides/recipe.md), that of options in `--help`.

An option that changes no result of a run has one of these marks:

| mark | meaning |
|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Entry of the table.

    Attributes:
        name: Name of the option.
        test: Id of the test as pytest takes it, or "".
        inert: Reason why no result changes, or "".
        instead: Value with which a required option is ignored.
    """

    name: str
    test: str
    inert: str = ""
    instead: Any = None

    @property
    def link(self) -> str:
        """Markdown link to the test, relative to docs/reference/."""
        file, _, name = self.test.partition("::")
        short = file.removeprefix("packages/").replace("/tests/", "/", 1)
        return f"[{short}::{name.partition('[')[0]}](../../{file})"


def read_effects(root: Path = ROOT) -> dict[str, Effect]:
    """Return the entries by option.

    Raises:
        ToolError: an entry has an unknown key.
    """
    table = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    found = {}
    for group, entries in table.items():
        for key, value in entries.items():
            name = f"{group} {key}" if group.startswith("lt ") else f"{group}.{key}"
            given = {"test": value} if isinstance(value, str) else dict(value)
            if unknown := given.keys() - {"test", "inert", "instead"}:
                raise ToolError(f"{TABLE}: {name} has the unknown key {min(unknown)}; use test, inert, instead")
            found[name] = Effect(name=name, **{"test": "", **given})
    return found


def find_problems(root: Path = ROOT, options: Iterable[Option] | None = None) -> list[str]:
    """Return all problems of the table and of the page."""
    options = read_options() if options is None else list(options)
    effects = read_effects(root)
    known = {option.name: option for option in options}
    problems = [
        f"{name} has no entry in {TABLE}: name a test that shows its effect" for name in known if name not in effects
    ]
    for name, effect in effects.items():
        if name not in known:
            problems.append(f"{TABLE}: there is no option {name}")
            continue
        if effect.inert and effect.inert not in REASONS:
            problems.append(f"{name}: inert = {effect.inert!r} is none of {', '.join(REASONS)}")
        if not effect.test and effect.inert != "hardware absent":
            problems.append(f"{name}: only an option whose hardware is absent may have no test")
        if effect.test and not has_test(root, effect.test):
            problems.append(f"{name}: there is no test {effect.test}")
        if known[name].is_required != (effect.instead is not None):
            problems.append(f"{name}: exactly a required option needs `instead`, the value with which it is ignored")
    if not problems and (root / PAGE).read_text(encoding="utf-8") != render_page(options, effects):
        problems.append(f"{PAGE} is not up to date: uv run python tools/option_effects.py --write")
    return problems


def has_test(root: Path, node: str) -> bool:
    """Return True if the file has the test function, and the words of its parameter."""
    file, _, name = node.partition("::")
    function, _, parameter = name.partition("[")
    names, source = _test_names(root / file) if (root / file).is_file() else (frozenset[str](), "")
    return function in names and all(word in source for word in parameter.removesuffix("]").split())


@cache
def _test_names(path: Path) -> tuple[frozenset[str], str]:
    source = path.read_text(encoding="utf-8")
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_")), source


def render_page(options: Iterable[Option], effects: Mapping[str, Effect]) -> str:
    """Return the page."""
    lines = [HEAD + "\n".join(f"| {reason} | {meaning} |" for reason, meaning in REASONS.items())]
    group = ""
    for option in options:
        if option.group != group:
            group = option.group
            title = f"`{group}`" if group.startswith("lt ") else f"`[{group}]`"
            lines += ["", f"## {title}", "", "| option | default | shown by |", "|---|---|---|"]
        effect = effects[option.name]
        default = f"`{option.default}`" if option.default else "required" if option.is_required else ""
        shown = effect.link if effect.test else ""
        mark = f" *({effect.inert})*" if effect.inert else ""
        lines.append(f"| `{option.name.removeprefix(group).lstrip(' .')}` | {default} | {(shown + mark).strip()} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Write the page, or print problems."""
    if arguments == ["--write"]:
        (ROOT / PAGE).write_text(render_page(read_options(), read_effects()), encoding="utf-8")
    elif arguments:
        raise ToolError(f"unknown arguments {' '.join(arguments)}; the only option is --write")
    problems = find_problems()
    print("\n".join(problems) or f"{len(read_effects())} options, each with its effect")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"option_effects: {exc}")
