"""Draw a set of mutants: `python tools/mutants/draw.py` writes `drawn.toml`, always the same for the same code.

Each package has a share of the set by its lines. Its statements are drawn by a seed without repeats, and of each
statement one of the changes that the operators have for it (`operators.py`). A drawn mutant stays as it is when the
code moves; when the statements of some have gone, their package is drawn anew:

    python tools/mutants/draw.py --package lt-launch      # only this package anew, the others' stay
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mutant import FOLDER, Mutant, MutantError, read_set, scopes, write_toml
from operators import Change, changes, iter_nodes
from sandbox import ROOT

SEED = 26
SIZE = 100


def package_files(package: str) -> list[Path]:
    """Return the source files of a package."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def shares(size: int = SIZE) -> Mapping[str, int]:
    """Return the number of mutants of each package, by its lines: largest remainders."""
    names = sorted(folder.name for folder in (ROOT / "packages").iterdir())
    lines = {name: sum(path.read_text().count("\n") for path in package_files(name)) for name in names}
    exact = {name: size * lines[name] / sum(lines.values()) for name in names}
    counts = {name: int(share) for name, share in exact.items()}
    for name in sorted(names, key=lambda name: counts[name] - exact[name])[: size - sum(counts.values())]:
        counts[name] += 1
    return counts


def statement_changes(path: Path) -> Iterator[list[Change]]:
    """Yield the changes of each statement that has any."""
    by_line: dict[int, list[Change]] = defaultdict(list)
    statement = 0
    for node in iter_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            statement = node.lineno
        for change in changes(node):
            by_line[max(statement, 0)].append(change)
    yield from by_line.values()


def as_mutant(path: Path, change: Change, name: str) -> Mutant | None:
    """Return a change as text in its function, or None if it stands there twice or is no Python."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    node = change.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    old, new = "".join(lines[node.lineno - 1 : node.end_lineno]), before + change.text + after
    around = {scope: rows for scope, rows in scopes(ast.parse(text)).items() if node.lineno in rows}
    scope = min(around, key=lambda scope: len(around[scope]), default="")
    mutant = Mutant(id=name, file=str(path.relative_to(ROOT)), scope=scope, old=old, new=new, why=change.operator)
    for extra in (0, 1, 2):  # lines before it, where its own stand there twice
        more = "".join(lines[node.lineno - 1 - extra : node.lineno - 1])
        try:
            (wider := replace(mutant, old=more + old, new=more + new)).apply(text)
        except MutantError:
            continue
        return wider
    return None


def iter_drawn(package: str) -> Iterator[Mutant]:
    """Yield mutants of a package in the order in which they are drawn."""
    chance = random.Random(f"{SEED} {package}")
    statements = [(path, options) for path in package_files(package) for options in statement_changes(path)]
    chance.shuffle(statements)
    for path, options in statements:
        mutant = as_mutant(path, chance.choice(options), "")
        if mutant:
            yield mutant


def draw(package: str, count: int) -> list[Mutant]:
    """Return the first mutants that are drawn for a package."""
    short = package.removeprefix("lt-")
    drawn = zip(range(1, count + 1), iter_drawn(package), strict=False)
    return [replace(mutant, id=f"{short}-{number:02}") for number, mutant in drawn]


def main() -> int:
    """Write the set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", help="draw only this one's anew")
    options = parser.parse_args()
    kept = read_set("drawn") if options.package else []
    counts = {name: sum(mutant.package == name for mutant in kept) for name in shares()} if kept else shares()
    mutants = []
    for package, count in counts.items():
        if options.package in (None, package):
            mutants += draw(package, count)
        else:
            mutants += [mutant for mutant in kept if mutant.package == package]
    (FOLDER / "drawn.toml").write_text(write_toml(mutants))
    print({package: sum(m.package == package for m in mutants) for package in counts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
