"""Files of tests by how much they speak of a file of the code, for code that the map of lines does not have.

A file of tests speaks of the code by the names that stand in both: what the changed function is called, the classes and
functions around it, the module. Rare names count more (the logarithm of how few files of tests have them), and a file
of tests that is named like the module comes first.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MAX_FILES = 8
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@cache
def words_of_tests(root: Path) -> Mapping[str, frozenset[str]]:
    """Return the words of every file of tests by its path."""
    paths = [*root.glob("packages/*/tests/**/test_*.py"), *root.glob("tests/**/test_*.py")]
    return {
        str(path.relative_to(root)): frozenset(WORD.findall(path.read_text(encoding="utf-8"))) for path in sorted(paths)
    }


@cache
def rarity(root: Path) -> Mapping[str, float]:
    """Return how much a word counts."""
    files = words_of_tests(root)
    counts = Counter(word for words in files.values() for word in words)
    return {word: math.log(len(files) / n) for word, n in counts.items()}


def spoken_names(path: str, text: str, scope: str) -> Mapping[str, float]:
    """Return the names by which tests may speak of a function, each with its weight."""
    names = {Path(path).stem: 1.0}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names[node.name] = 1.0
    return names | dict.fromkeys(scope.split("."), 4.0)


def files_that_name(root: Path, path: str, text: str, scope: str) -> list[str]:
    """Return the files of tests that speak most of a function, best first."""
    names, counts = spoken_names(path, text, scope), rarity(root)
    package, stem = path.split("/")[1], Path(path).stem

    def score(file: str, words: frozenset[str]) -> float:
        found = sum(weight * counts[name] for name, weight in names.items() if name in words)
        likeness = 10.0 * (stem in Path(file).stem or Path(file).stem.removeprefix("test_") in path)
        return (found + likeness) * (2.0 if file.startswith(f"packages/{package}/") else 1.0)

    ranked = sorted(((score(file, words), file) for file, words in words_of_tests(root).items()), reverse=True)
    return [file for points, file in ranked[:MAX_FILES] if points > 0]
