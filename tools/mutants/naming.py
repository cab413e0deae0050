"""Tests by how much they speak of a piece of code, for code that the map of lines does not have.

A test speaks of the code by the names that stand in both: the function or class that is changed, those around it, the
public ones of its module, the module, and less those of the modules that import it. A rare name counts more (the
logarithm of how few tests have it). The words of a test are those of its function and of what it calls in its own file;
those of the whole file count a quarter.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

MAX_TESTS = 60
MAX_FILES = 8
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
CONTEXT = 0.25


def words_of_functions(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each test of a file with the words of its function and of the functions that these name."""
    words: dict[str, frozenset[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            words[node.name] = frozenset(WORD.findall(ast.get_source_segment(text, node) or ""))
    for name, own in words.items():
        if name.startswith("test_"):
            called = [words[other] for other in own & words.keys() if not other.startswith("test_")]
            yield name, own.union(*called)


@cache
def words_of_tests(root: Path) -> Mapping[tuple[str, str], frozenset[str]]:
    """Return the words of every test by its file and name."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for path in sorted([*root.glob("packages/*/tests/**/test_*.py"), *root.glob("tests/**/test_*.py")]):
        for name, words in words_of_functions(path.read_text(encoding="utf-8")):
            found[str(path.relative_to(root)), name] = words
    return found


@cache
def rarity(root: Path) -> Mapping[str, float]:
    """Return how much a word counts."""
    tests = words_of_tests(root)
    counts = Counter(word for words in tests.values() for word in words)
    return {word: math.log(len(tests) / n) for word, n in counts.items()}


@cache
def words_of_files(root: Path) -> Mapping[str, frozenset[str]]:
    """Return the words of every file of tests."""
    files = {file for file, _ in words_of_tests(root)}
    return {file: frozenset(WORD.findall((root / file).read_text(encoding="utf-8"))) for file in files}


def public_names(path: str, text: str) -> Iterator[str]:
    """Yield the name of a module, and its public functions and classes."""
    yield Path(path).stem
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


@cache
def importers(root: Path) -> Mapping[str, frozenset[str]]:
    """Return the public names of the modules that import a module, by its dotted name."""
    found: dict[str, set[str]] = {}
    for path in root.glob("packages/*/src/**/*.py"):
        text = path.read_text(encoding="utf-8")
        modules = {
            node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module
        }
        for module in modules if path.name != "__init__.py" else ():
            found.setdefault(module, set()).update(public_names(str(path), text))
    return {module: frozenset(names) for module, names in found.items()}


def spoken_names(root: Path, path: str, text: str, scope: str) -> Mapping[str, float]:
    """Return the names by which tests may speak of a function, each with its weight."""
    module = ".".join(Path(path).with_suffix("").parts[3:])
    names = dict.fromkeys(importers(root).get(module, ()), 0.4)
    return names | dict.fromkeys(public_names(path, text), 1.0) | dict.fromkeys(scope.split("."), 3.0)


def tests_that_name(root: Path, path: str, text: str, scope: str) -> list[str]:
    """Return the tests that speak most of a function, best first."""
    names, counts, files = spoken_names(root, path, text, scope), rarity(root), words_of_files(root)
    package, stem = path.split("/")[1], Path(path).stem

    def points(words: frozenset[str]) -> float:
        return sum(weight * counts.get(name, 0.0) for name, weight in names.items() if name in words)

    @cache
    def context(file: str) -> float:
        likeness = 8.0 * (stem in Path(file).stem or Path(file).stem.removeprefix("test_") in path)
        return CONTEXT * points(files[file]) + likeness

    def score(file: str, words: frozenset[str]) -> float:
        return (points(words) + context(file)) * (2.0 if file.startswith(f"packages/{package}/") else 1.0)

    ranked = sorted(((score(file, w), file, name) for (file, name), w in words_of_tests(root).items()), reverse=True)
    chosen: list[str] = []
    used: set[str] = set()
    for number, file, name in ranked:
        if number > 0 and len(chosen) < MAX_TESTS and (file in used or len(used) < MAX_FILES):
            used.add(file)
            chosen.append(f"{file}::{name}")
    return chosen
