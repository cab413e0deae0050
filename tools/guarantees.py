"""Table of docs/guarantees.md: every promise with the tests that check it.

    python tools/guarantees.py            # prints problems; exit code 1 if there are any
    python tools/guarantees.py --write    # writes the table into docs/guarantees.md

The promises are in tools/guarantees.toml. A test refers to one by `@pytest.mark.guarantee("ID", ...)`, which is read
from the sources of tests/ and packages/*/tests: nothing is imported. The part of the page above the marker is written
by hand. An unknown id, a promise without a test and an outdated page are errors.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GuaranteeTest", "Promise", "find_guarantee_tests", "find_problems", "read_promises", "render_page"]

ROOT = Path(__file__).resolve().parent.parent
PROMISES, PAGE = "tools/guarantees.toml", "docs/guarantees.md"
FOLDERS = ("tests", "packages/*/tests")
BEGIN, END = "<!-- made by tools/guarantees.py -->", "<!-- end of tools/guarantees.py -->"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Promise: its id, its text and the title of its area."""

    id: str
    text: str
    area: str


@dataclass(frozen=True, kw_only=True)
class GuaranteeTest:
    """Test with the mark `guarantee`.

    Attributes:
        file: Path below the root.
        name: Name of the function.
        ids: Ids of the promises that it checks.
        marks: "slow" or "gpu" if the test has that mark.
    """

    file: str
    name: str
    ids: tuple[str, ...]
    marks: tuple[str, ...] = ()

    @property
    def link(self) -> str:
        """Markdown link to the test, relative to docs/."""
        short = self.file.removeprefix("packages/").replace("/tests/", "/", 1)
        return f"[{short}::{self.name}](../{self.file})" + "".join(f" *({mark})*" for mark in self.marks)


def read_promises(root: Path = ROOT) -> list[Promise]:
    """Return the promises in file order."""
    areas = tomllib.loads((root / PROMISES).read_text(encoding="utf-8")).values()
    return [
        Promise(id=name, text=text, area=area["title"]) for area in areas for name, text in area["promises"].items()
    ]


def find_guarantee_tests(root: Path = ROOT) -> list[GuaranteeTest]:
    """Return the marked tests in order of files and lines."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in root.glob(f"{folder}/**/test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.guarantee" not in source:
            continue
        tree = ast.parse(source, filename=str(path))
        whole = _marks_of_module(tree)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in sorted(functions, key=lambda one: one.lineno):
            marks = dict(_marks(node.decorator_list))
            if "guarantee" in marks:
                own = tuple(mark for mark in ("slow", "gpu") if mark in marks or mark in whole)
                file = path.relative_to(root).as_posix()
                found.append(GuaranteeTest(file=file, name=node.name, ids=marks["guarantee"], marks=own))
    return found


def render_page(root: Path = ROOT) -> str:
    """Return the page with its table made anew from promises and tests."""
    head, _, rest = (root / PAGE).read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    kept: dict[str, list[str]] = {}
    for test in find_guarantee_tests(root):
        for name in test.ids:
            kept.setdefault(name, []).append(test.link)
    lines, area = [BEGIN], ""
    for promise in read_promises(root):
        if promise.area != area:
            area = promise.area
            lines += ["", f"## {area}", "", "| promise | tests |", "|---|---|"]
        lines.append(f"| **{promise.id}**: {promise.text} | {', '.join(kept.get(promise.id, []))} |")
    return head + "\n".join([*lines, "", END]) + (tail or "\n")


def find_problems(root: Path = ROOT) -> list[str]:
    """Return all problems: unknown or duplicate ids, promises without a test, an outdated page."""
    known = [promise.id for promise in read_promises(root)]
    found_tests = find_guarantee_tests(root)
    found = [f"{PROMISES}: the id {name!r} stands twice" for name in sorted(known) if known.count(name) > 1]
    for test in found_tests:
        if not test.ids:
            found.append(f"{test.file}::{test.name}: guarantee() needs ids in quotes")
        found += [
            f"{test.file}::{test.name}: no promise {name!r} in {PROMISES}" for name in test.ids if name not in known
        ]
    kept = {name for test in found_tests for name in test.ids}
    found += [f'{name}: no test has @pytest.mark.guarantee("{name}")' for name in known if name not in kept]
    if (root / PAGE).read_text(encoding="utf-8") != render_page(root):
        found.append(f"{PAGE} is not up to date: uv run python tools/guarantees.py --write")
    return list(dict.fromkeys(found))


def _marks(expressions: list[ast.expr]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the pytest marks among decorators, each with its string arguments."""
    for expression in expressions:
        call = expression if isinstance(expression, ast.Call) else None
        name = ast.unparse(call.func if call else expression)
        if name.startswith("pytest.mark."):
            values = [one.value for one in call.args if isinstance(one, ast.Constant)] if call else []
            yield name.removeprefix("pytest.mark."), tuple(value for value in values if isinstance(value, str))


def _marks_of_module(tree: ast.Module) -> set[str]:
    """Return the marks set by `pytestmark` of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            value = node.value
            return {name for name, _ in _marks(value.elts if isinstance(value, ast.List) else [value])}
    return set()


def main(arguments: list[str]) -> int:
    """Write the page, or print problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    if parser.parse_args(arguments).write:
        text = render_page()
        (ROOT / PAGE).write_text(text, encoding="utf-8")
    found = find_problems()
    print("\n".join(found) or f"{len(read_promises())} promises, {len(find_guarantee_tests())} tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
