"""Map of lines and tests: which test runs which line of the packages, and how long it takes.

    uv run python tools/mutants/cover.py                          # all default tests, about an hour on one core
    uv run python tools/mutants/cover.py packages/lt-model/tests  # these anew; the others' lines stay as they are

The map is a database in `.mutants/` with the text of the files that the lines are lines of, so that it stays of use
after they have changed (`selection.py`). Tracing is described in `trace_lines.py`.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from sandbox import CACHE, TOOL, Sandbox, run, sandbox

MAP = CACHE / "lines.sqlite"
PARTS = (
    *(f"packages/lt-{name}/tests" for name in ("model", "ckpt", "data", "trainer-neuron", "trainer-gpu", "launch")),
    "packages/lt-trainer/tests",
    "tests",
)
SCHEMA = """
create table if not exists test (id integer primary key, name text unique, seconds real, version text);
create table if not exists source (version text, path text, text text, primary key (version, path));
create table if not exists fixture (test integer, name text, seconds real);
create table if not exists line (test integer, path text, number integer);
create index if not exists by_line on line (path, number);
create index if not exists by_fixture on fixture (test);
"""


def trace(box: Sandbox, part: str) -> None:
    """Run a part of the tests under the tracer."""
    folder = box.site_packages / "mutants-trace"
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "raw").mkdir(parents=True)
    (folder / "root").write_text(str(box.root))
    (folder / "context").write_text("")
    shutil.copy(TOOL / "trace_lines.py", box.site_packages)
    (box.site_packages / "trace_lines.pth").write_text("import trace_lines\n")
    command, environment = box.pytest(["-p", "trace_lines", part])
    subprocess.run(command, cwd=box.root, env=environment, check=False)  # what fails under a tracer is left out
    (box.site_packages / "trace_lines.pth").unlink()


def line_numbers(bits: bytes) -> Iterable[int]:
    """Return the numbers of the set bits, as coverage.py packs lines."""
    return (8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1)


def read_lines(folder: Path, root: Path) -> Mapping[str, Mapping[str, set[int]]]:
    """Return the lines by context and file of all processes that were traced."""
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    query = "select context, path, numbits from line_bits natural join (select id as file_id, path from file)"
    query += " natural join (select id as context_id, context from context)"
    for database in folder.iterdir():
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            try:
                rows = connection.execute(query).fetchall()
            except sqlite3.DatabaseError:  # of a process that a test lets write no more than some bytes
                print(f"{database.name}: not read: it was not written to its end", flush=True)
                continue
            for context, path, bits in rows:
                lines[context][str(Path(path).relative_to(root))].update(line_numbers(bits))
    return lines


def store(box: Sandbox, part: str) -> int:
    """Replace the part's tests in the map; returns their number."""
    folder = box.site_packages / "mutants-trace"
    facts = json.loads((folder / "tests.json").read_text())
    lines = read_lines(folder / "raw", box.root)
    CACHE.mkdir(exist_ok=True)
    with sqlite3.connect(MAP) as connection:
        connection.executescript(SCHEMA)
        for table in ("line", "fixture"):
            query = f"delete from {table} where test in (select id from test where name glob ?)"
            connection.execute(query, (f"{part}*",))
        connection.execute("delete from test where name glob ?", (f"{part}*",))
        for name in facts["durations"].keys() - set(facts["failed"]):
            files: dict[str, set[int]] = defaultdict(set)
            for context in (name, *facts["fixtures"][name]):
                for path, numbers in lines.get(context, {}).items():
                    files[path] |= numbers
            row = (name, facts["durations"][name], box.commit)
            cursor = connection.execute("insert into test (name, seconds, version) values (?, ?, ?)", row)
            rows = ((cursor.lastrowid, path, number) for path, numbers in files.items() for number in numbers)
            connection.executemany("insert into line values (?, ?, ?)", rows)
            setups = ((cursor.lastrowid, n, s) for n, s in facts["setups"].items() if n in facts["fixtures"][name])
            connection.executemany("insert into fixture values (?, ?, ?)", setups)
        for path in sorted(box.root.glob("packages/*/src/**/*.py")):
            row = (box.commit, str(path.relative_to(box.root)), path.read_text(encoding="utf-8"))
            connection.execute("insert or replace into source values (?, ?, ?)", row)
        connection.execute("delete from source where version not in (select version from test)")
    connection.close()
    if facts["failed"]:
        print(f"failed under the tracer, left out: {' '.join(facts['failed'])}", flush=True)
    return len(facts["durations"])


def main(parts: list[str]) -> int:
    """Trace the parts, all without arguments."""
    with sandbox() as box:
        run("uv", "pip", "install", "--quiet", "--python", box.python, "coverage>=7.10", cwd=box.root)
        for part in parts or PARTS:
            trace(box, part)
            print(f"--- {part}: {store(box, part)} tests at {box.commit[:7]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
