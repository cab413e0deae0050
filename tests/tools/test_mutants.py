"""The mutants still fit the code, and the parts of the tool that decide: operators, where text stands, which tests."""

import ast
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from cover import SCHEMA, line_numbers
from mutant import SETS, Mutant, MutantError, read_set, write_toml
from operators import changes, iter_nodes
from score import survivors, table
from selection import CoveringTest, LineMap, corresponding_lines, find_tests, select

ROOT = Path(__file__).parents[2]
CODE = '''"""Text."""

LIMIT = 3


class Door:
    def open(self, n: int) -> int:
        if n < LIMIT:
            return n + 1
        return n

    def close(self, n: int) -> int:
        if n < LIMIT:
            return n - 1
        return n
'''


def mutant(scope: str, old: str, new: str) -> Mutant:
    return Mutant(id="x-01", file="packages/lt-x/src/lt_x/door.py", scope=scope, old=old, new=new, why="")


@pytest.mark.parametrize("name", SETS)
def test_each_mutant_changes_the_code_in_one_place(name: str) -> None:
    """One that fails here: give its new text in the set, or draw its package anew (tools/mutants/draw.py)."""
    mutants = read_set(name)
    assert len(mutants) == 100
    assert {m.package for m in mutants} == {folder.name for folder in (ROOT / "packages").iterdir()}
    problems = []
    for one in mutants:
        try:
            one.apply((ROOT / one.file).read_text(encoding="utf-8"))
        except (MutantError, OSError) as exc:
            problems.append(str(exc))
    assert problems == []


def test_each_chosen_mutant_says_why_it_is_wrong() -> None:
    assert [one.id for one in read_set("chosen") if len(one.why.split()) < 3] == []


def test_a_text_is_replaced_in_its_function_alone() -> None:
    changed, lines = mutant("Door.close", "n < LIMIT", "n <= LIMIT").apply(CODE)
    assert changed == CODE.replace("n < LIMIT", "n <= LIMIT").replace("n <= LIMIT", "n < LIMIT", 1)
    assert list(lines) == [CODE.splitlines().index("    def close(self, n: int) -> int:") + 2]


@pytest.mark.parametrize(
    ("scope", "old", "new", "message"),
    [
        ("Door", "n < LIMIT", "n > LIMIT", "occurs 2 times"),
        ("Door.open", "n > LIMIT", "n", "occurs 0 times"),
        ("Door.lock", "n", "m", "has no Door.lock"),
        ("Door.open", "return n + 1", "return n +", "does not compile"),
        ("Door.open", "n + 1", "(n + 1)", "changes nothing but the layout"),
    ],
)
def test_what_is_no_mutant(scope: str, old: str, new: str, message: str) -> None:
    with pytest.raises(MutantError, match=message):
        mutant(scope, old, new).apply(CODE)


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = ("a = 'b'", 'a = "b"', "    a\n    b\n", 'r"\\d"')
    mutants = [Mutant(id=f"x-{i}", file="f", scope="", old=text, new="pass", why="") for i, text in enumerate(texts)]
    (tmp_path / "drawn.toml").write_text(write_toml(mutants))
    assert read_set("drawn", tmp_path) == mutants
    (tmp_path / "drawn.toml").write_text(write_toml([mutants[0], mutants[0]]))
    with pytest.raises(MutantError, match="twice"):
        read_set("drawn", tmp_path)


def drawn(code: str) -> set[tuple[str, str]]:
    return {(c.operator, c.text) for node in iter_nodes(ast.parse(code)) for c in changes(node)}


@pytest.mark.parametrize(
    ("code", "operator", "text"),
    [
        ("x = a < b", "comparison", "(a <= b)"),
        ("x = a not in b", "comparison", "(a in b)"),
        ("x = a and b", "and/or", "(a or b)"),
        ("x = not a", "removed not", "(a)"),
        ("x = a - b", "arithmetic", "(a + b)"),
        ("x = 2", "constant + 1", "3"),
        ("x = True", "constant", "False"),
        ("def f(x=1): ...", "constant - 1", "0"),
        ("x = a[:n]", "slice end - 1", "(n) - 1"),
        ("x = min(a, b)", "min became max", "(max(a, b))"),
        ("x = f(a, b)", "arguments swapped", "(f(b, a))"),
        ("return_ = (a, b)", "items swapped", "((b, a))"),
        ("fsync(file)", "statement dropped", "pass"),
        ("n += 1", "statement dropped", "pass"),
        ("raise E(a)", "error not raised", "pass"),
        ("if a: pass", "condition negated", "not (a)"),
        ("for a in b: continue", "continue became break", "break"),
        ("f(a, key=b)", "key= dropped", "(f(a))"),
        ("x = a if b else c", "branches swapped", "(c if b else a)"),
    ],
)
def test_an_operator(code: str, operator: str, text: str) -> None:
    assert (operator, text) in drawn(code)


@pytest.mark.parametrize(
    "code",
    [
        '"""Text."""',
        "x: Literal[1] | None",
        "assert a < b",
        "log(a, b)",
        "__all__ = [1, 2]",
        "POLL_S = 3",
        "Point = Callable[[int, str], None]",
        "sys.stderr.write(a)",
        "x = isinstance(a, b)",
        "if TYPE_CHECKING:\n    x = 1",
        "class A(Protocol):\n    n = 1",
        "def __repr__(self): return 1 + 2",
        "@dataclass(frozen=True)\nclass A: ...",
    ],
)
def test_what_is_left_alone(code: str) -> None:
    assert drawn(code) == set()


def test_lines_are_found_again_after_the_file_has_changed() -> None:
    known = CODE
    now = CODE.replace("LIMIT = 3\n", "LIMIT = 3\nMORE = 4\n").replace("return n - 1", "return n - 2")
    line = now.splitlines().index("            return n + 1") + 1
    assert corresponding_lines(now, known, [line]) == {line - 1}
    changed = now.splitlines().index("            return n - 2") + 1
    assert corresponding_lines(now, known, [changed]) == {changed - 2, changed}  # the rest of its function


@pytest.fixture
def line_map(tmp_path: Path) -> LineMap:
    """Two tests: one runs `open`, the other `close`."""
    path = tmp_path / "lines.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
        connection.execute("insert into source values ('v', 'packages/lt-x/src/lt_x/door.py', ?)", (CODE,))
        rows = [(1, "packages/lt-x/tests/a.py::open", 0.5, "v"), (2, "tests/b.py::close", 2.0, "v")]
        connection.executemany("insert into test values (?, ?, ?, ?)", rows)
        lines = [(1, 8), (1, 9), (2, 13), (2, 14), (1, 3), (2, 3)]
        connection.executemany(
            "insert into line values (?, 'packages/lt-x/src/lt_x/door.py', ?)", [(test, line) for test, line in lines]
        )
    connection.close()
    return LineMap(path)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("return n + 1", ["packages/lt-x/tests/a.py::open"]),
        ("return n - 1", ["tests/b.py::close"]),
        ("def close(self", ["tests/b.py::close"]),
        ("LIMIT = 3", ["packages/lt-x/tests/a.py::open", "tests/b.py::close"]),  # of each function that names it
    ],
)
def test_the_tests_of_a_line(line_map: LineMap, old: str, expected: Sequence[str]) -> None:
    one = mutant("", old, "pass")
    line = CODE[: CODE.index(old)].count("\n") + 1
    assert sorted(test.name for test in find_tests(line_map, one.file, CODE, range(line, line + 1))) == expected


def test_half_of_the_time_is_for_the_tests_that_are_closest() -> None:
    quick = [CoveringTest(name=f"tests/a.py::{i}", seconds=1.0, share=0.01) for i in range(100)]
    close = CoveringTest(name="tests/b.py::close", seconds=9.0, share=0.9)
    long = CoveringTest(name="tests/c.py::long", seconds=99.0, share=1.0)
    chosen = select([*quick, close, long], "lt-x", 60.0)
    assert close in chosen
    assert long not in chosen
    assert 35 < sum(test.seconds for test in chosen) <= 55


def test_a_fixture_that_tests_share_counts_once_and_for_each_of_them() -> None:
    """Else a test looks quick that waits for a minute until its fixture is there."""
    trained = {"fixture trained": 40.0}
    shared = [CoveringTest(name=f"tests/a.py::{i}", seconds=0.1, share=0.5, fixtures=trained) for i in range(10)]
    assert select(shared, "lt-x", 60.0) == shared
    assert select(shared, "lt-x", 40.0) == []
    other = CoveringTest(name="tests/b.py::other", seconds=30.0, share=0.1)
    assert select([*shared, other], "lt-x", 40.0) == [other]
    assert shared[0].seconds_alone == 40.1


def test_bits_of_lines() -> None:
    assert list(line_numbers(bytes([0b10, 0, 0b101]))) == [1, 16, 18]


def test_an_explained_survivor_is_a_survivor() -> None:
    one, other = (Mutant(id=i, file="packages/lt-x/a.py", scope="f", old="", new="", why="") for i in ("x-1", "x-2"))
    results = {"x-1": {"caught_by": "t", "message": ""}, "x-2": {"caught_by": "", "message": "none"}}
    assert table([one, other], results)[-1] == "| lt-x | 2 | 1 |"
    assert survivors([one, other], results, {"x-2": "the same"})[-1].endswith("`packages/lt-x/a.py`: the same")
