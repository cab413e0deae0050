"""A mutant is data: a file, the text to replace, the text that replaces it, and why that is wrong.

The text is looked for inside one function or class (`scope`), so that edits elsewhere in the file leave the mutant as
it is. It has to occur there exactly once: a mutant that no longer fits is an error, never skipped.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SETS = ("drawn", "chosen")


class MutantError(ValueError):
    """A mutant that does not fit the code; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong change.

    Attributes:
        id: name in its set, such as `ckpt-07`.
        file: path in the repository.
        scope: qualified name of the function or class that has the text; "" for the whole file.
        old: the text to replace.
        new: its replacement.
        why: what goes wrong with it; of a drawn one, the operator.
    """

    id: str
    file: str
    scope: str
    old: str
    new: str
    why: str

    @property
    def package(self) -> str:
        """Name of the package whose code it changes."""
        return self.file.split("/")[1]

    @property
    def digest(self) -> str:
        """Short hash of all that it says."""
        text = "\0".join((self.file, self.scope, self.old, self.new))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, text: str) -> tuple[str, range]:
        """Change the text of its file.

        Returns:
            The changed text, and the numbers of the lines that the old text stood on.

        Raises:
            MutantError: the text does not occur exactly once, or the result is no Python.
        """
        first, end = self._scope_offsets(text)
        count = text.count(self.old, first, end)
        if count != 1:
            raise MutantError(f"{self.id}: old text occurs {count} times in {self.scope or 'all'} of {self.file}")
        at = text.index(self.old, first, end)
        changed = text[:at] + self.new + text[at + len(self.old) :]
        try:
            compile(changed, self.file, "exec", dont_inherit=True)
        except SyntaxError as exc:
            raise MutantError(f"{self.id}: {self.file} does not compile: {exc}") from exc
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            raise MutantError(f"{self.id}: changes nothing but the layout of {self.file}")
        line = text.count("\n", 0, at) + 1
        return changed, range(line, line + self.old.rstrip("\n").count("\n") + 1)

    def _scope_offsets(self, text: str) -> tuple[int, int]:
        if not self.scope:
            return 0, len(text)
        found = scopes(ast.parse(text)).get(self.scope)
        if found is None:
            raise MutantError(f"{self.id}: {self.file} has no {self.scope}")
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts[found.start - 1], starts[found.stop - 1]


def scopes(tree: ast.Module) -> Mapping[str, range]:
    """Return the lines of every function and class by qualified name, decorators included.

    Of several definitions of one name, such as a property and its setter, the last one counts.
    """
    found: dict[str, range] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                assert child.end_lineno is not None
                found[name] = range(first, child.end_lineno + 1)
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


def read_set(name: str, folder: Path = FOLDER) -> list[Mutant]:
    """Return a set, in the order of its file.

    Raises:
        MutantError: an id that occurs twice.
    """
    rows = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**row) for row in rows]
    if len({mutant.id for mutant in mutants}) < len(mutants):
        raise MutantError(f"{name}.toml: ids occur twice")
    return mutants


def write_toml(mutants: list[Mutant]) -> str:
    """Return the text of a file with these mutants."""
    blocks = []
    for mutant in mutants:
        lines = ["[[mutant]]"]
        for key in ("id", "file", "scope", "why", "old", "new"):
            value = getattr(mutant, key)
            if "\n" in value:
                lines.append(f"{key} = '''\n{value}'''")
            else:
                lines.append(f"{key} = '{value}'" if '"' in value or "\\" in value else f'{key} = "{value}"')
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
