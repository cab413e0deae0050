"""Which tests a change of some lines is run against: those that run the lines, within a limit of time.

The map (`cover.py`) knows the lines of the code as it was when it was made. Lines of today's file are found in that
text by a comparison of both; of a line that is new or changed, those of its function stand in.

A line outside functions (a constant, a field) is run by every import and tells nothing: the tests are those that run a
line of the same package that names what is defined there. A default in a function's signature has those that run the
function.

What a test costs is its own time and that of the shared fixtures that no test before it has set up.

There is time for some of the tests only. Half of it goes to the fastest, with the tests of the code's own package
first; half to those of which the file is the largest part of all that they run. The fastest run first.
"""

from __future__ import annotations

import ast
import difflib
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutant import scopes

START_S = 5.0
"""Importing pytest, torch and the packages."""
FILE_S = 0.5
"""Importing a file of tests and setting up what its tests share."""


@dataclass(frozen=True, kw_only=True)
class CoveringTest:
    """A test that runs some of the lines.

    Attributes:
        seconds: its own time.
        share: part of all lines that it runs that are in the file.
        fixtures: time of each fixture that it shares with others.
    """

    name: str
    seconds: float
    share: float
    fixtures: Mapping[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """File of tests."""
        return self.name.partition("::")[0]

    @property
    def seconds_alone(self) -> float:
        """Time of a run of this test alone."""
        return self.seconds + sum(self.fixtures.values())


class LineMap:
    """The map, read only."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.sizes = dict(self._connection.execute("select test, count(*) from line group by test"))
        self._sizes_in_file: dict[str, dict[int, int]] = {}

    def tests(self, path: str, text: str, lines: Iterable[int]) -> list[CoveringTest]:
        """Return the tests that run lines of a file whose text is given."""
        found: dict[int, CoveringTest] = {}
        for version, known in self._connection.execute("select version, text from source where path = ?", (path,)):
            for test in self._tests_of(version, path, corresponding_lines(text, known, lines)):
                found[test[0]] = self._as_test(*test, path)
        return list(found.values())

    def _as_test(self, number: int, name: str, seconds: float, path: str) -> CoveringTest:
        if path not in self._sizes_in_file:
            query = "select test, count(*) from line where path = ? group by test"
            self._sizes_in_file[path] = dict(self._connection.execute(query, (path,)))
        in_file = self._sizes_in_file[path].get(number, 0)
        fixtures = dict(self._connection.execute("select name, seconds from fixture where test = ?", (number,)))
        return CoveringTest(name=name, seconds=seconds, share=in_file / self.sizes[number], fixtures=fixtures)

    def _tests_of(self, version: str, path: str, lines: set[int]) -> list[tuple[int, str, float]]:
        marks = ",".join(map(str, sorted(lines)))
        query = "select distinct test.id, name, seconds from line join test on test = test.id"
        return self._connection.execute(
            f"{query} where version = ? and path = ? and number in ({marks})", (version, path)
        ).fetchall()

    def lines_that_name(self, names: Sequence[str], package: str) -> Iterable[tuple[str, str, set[int]]]:
        """Yield version, file and lines inside functions of a package in which one of the names occurs."""
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        query = "select version, path, text from source where path glob ?"
        for version, path, text in self._connection.execute(query, (f"packages/{package}/*",)).fetchall():
            if pattern.search(text):
                inside = function_lines(ast.parse(text))
                lines = {n for n, line in enumerate(text.splitlines(), 1) if n in inside and pattern.search(line)}
                if lines:
                    yield version, path, lines

    def tests_that_name(self, names: Sequence[str], package: str, path: str) -> list[CoveringTest]:
        """Return the tests that run a line of a package in which one of the names occurs."""
        found: dict[int, CoveringTest] = {}
        for version, file, lines in self.lines_that_name(names, package):
            for test in self._tests_of(version, file, lines):
                found.setdefault(test[0], self._as_test(*test, path))
        return list(found.values())


def function_lines(tree: ast.Module) -> set[int]:
    """Return the lines that run when a function is called, and not when its module is imported."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            assert body[-1].end_lineno is not None
            lines.update(range(body[0].lineno, body[-1].end_lineno + 1))
    return lines


def corresponding_lines(text: str, known: str, lines: Iterable[int]) -> set[int]:
    """Return the lines of a known text that some lines of another are; those of the function where there are none."""
    now, then = text.splitlines(), known.splitlines()
    blocks = difflib.SequenceMatcher(None, now, then, autojunk=False).get_matching_blocks() if now != then else []
    same = {block.a + i + 1: block.b + i + 1 for block in blocks for i in range(block.size)}
    found = {n if now == then else same.get(n) for n in lines}
    if None not in found:
        return {n for n in found if n is not None}
    around = [rows for rows in scopes(ast.parse(text)).values() if set(lines) & set(rows)]
    rows = min(around, key=len, default=range(1, len(now) + 1))
    inside = function_lines(ast.parse(known))
    return {same[n] for n in rows if n in same and same[n] in inside} | {n for n in found if n is not None}


def lines_of_signature(tree: ast.Module, lines: Iterable[int]) -> set[int]:
    """Return the lines of the functions of which the signatures are on some lines."""
    wanted, body = set(lines), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if wanted & {*range(node.lineno, node.body[0].lineno)}:
                body.update(range(node.body[0].lineno, node.end_lineno + 1))
    return body


def defined_names(tree: ast.Module, lines: Iterable[int]) -> list[str]:
    """Return the names that are defined by the statements outside functions on some lines."""
    names: list[str] = []
    wanted = set(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.end_lineno and wanted & {*range(node.lineno, node.end_lineno + 1)}:
            names += _names_of(node)
    return names


def _names_of(node: ast.stmt) -> list[str]:
    match node:
        case ast.Assign(targets=targets):
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
    return []


def find_tests(lines: LineMap, path: str, text: str, changed: range) -> list[CoveringTest]:
    """Return all tests that run some lines of a file."""
    tree = ast.parse(text)
    rows = statement_lines(tree, changed)
    if rows & function_lines(tree):
        return lines.tests(path, text, rows & function_lines(tree))
    if body := lines_of_signature(tree, rows):
        return lines.tests(path, text, body)
    names = defined_names(tree, rows)
    found = lines.tests_that_name(names, path.split("/")[1], path) if names else []
    return found or lines.tests(path, text, rows)


def statement_lines(tree: ast.Module, changed: range) -> set[int]:
    """Return the lines of the smallest statements around some lines, without the bodies of compound ones."""
    rows = set(changed)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.end_lineno is not None and not hasattr(node, "body"):
            own = set(range(node.lineno, node.end_lineno + 1))
            if own & rows:
                rows |= own
    return rows


def select(tests: Sequence[CoveringTest], package: str, limit_s: float) -> list[CoveringTest]:
    """Return the tests to run within a limit of time, the fastest first."""
    chosen: dict[str, CoveringTest] = {}
    files: set[str] = set()
    set_up: set[str] = set()
    spent = START_S

    def take(candidates: Iterable[CoveringTest], until: float) -> None:
        nonlocal spent, set_up
        for test in candidates:
            cost = test.seconds + (0 if test.file in files else FILE_S)
            cost += sum(seconds for name, seconds in test.fixtures.items() if name not in set_up)
            if test.name not in chosen and spent + cost <= until:
                chosen[test.name] = test
                files.add(test.file)
                set_up |= test.fixtures.keys()
                spent += cost

    is_own = {test.name: test.name.startswith(f"packages/{package}/") for test in tests}
    take(sorted(tests, key=lambda test: (not is_own[test.name], test.seconds_alone)), (START_S + limit_s) / 2)
    take(sorted(tests, key=lambda test: -test.share), limit_s)
    take(sorted(tests, key=lambda test: test.seconds_alone), limit_s)
    by_file: dict[str, float] = {}
    for test in chosen.values():
        by_file[test.file] = by_file.get(test.file, 0.0) + test.seconds_alone
    return sorted(chosen.values(), key=lambda test: (by_file[test.file], test.file, test.seconds))
