"""Every import in a package's sources is of something that the package declares: a dependency or one of its extras.

In the workspace's one environment everything is importable, so a dependency that was forgotten shows up only on a
user's machine. This reads the sources without importing them: import statements anywhere, also inside functions, and
`import_module("...")` with a literal name. What only type checkers see (`if TYPE_CHECKING:`) does not count. An extra
of a sibling that is required brings what that extra requires. Under a second.

    python tools/declared.py             # all packages
    python tools/declared.py lt-data     # one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from members import ROOT, Member, ToolError, chosen, read
from packaging.utils import canonicalize_name

__all__ = ["declared", "imported", "undeclared"]

DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}
"""Import names that differ from the name of what is installed by more than - and _."""
PROVIDED = {
    ("lt-ckpt", "botocore"): "boto3",
    ("lt-data", "botocore"): "boto3",
    ("lt-data", "huggingface-hub"): "datasets",
    ("lt-launch", "botocore"): "boto3",
}
"""(package, imported) to what is declared: something whose interface it is part of, and which therefore brings it."""
OPTIONAL = {
    ("lt-model", "flash-attn"): "a backend for those who have it; built from source, so no extra can promise it",
    ("lt-trainer", "moto"): "lt_trainer.testing serves tests, which bring it",
}
"""Imports that a package may try without declaring them, each with the reason."""

BY_NAME = ("import_module", "__import__", "importorskip")


def imported(source: str, *, filename: str = "<source>") -> Iterator[tuple[str, int]]:
    """Top-level names that a module imports at run time, with the line; relative imports are left out."""
    pending: list[ast.AST] = [ast.parse(source, filename)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names = [first.value]
        for name in names:
            if top := name.partition(".")[0]:
                yield top, getattr(node, "lineno", 0)
        pending.extend(ast.iter_child_nodes(node))


def declared(member: Member, members: Mapping[str, Member]) -> set[str]:
    """Names that a package's dependencies and extras bring, with those of the siblings' extras that they ask for."""
    found: set[str] = set()
    pending = [r for group in member.requirements.values() for r in group]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        if name in members and name != member.name:
            pending += [r for extra in requirement.extras for r in members[name].extras.get(extra, ())]
    return found


def undeclared(member: Member, members: Mapping[str, Member], root: Path = ROOT) -> list[str]:
    """One sentence for each import of something that the package does not declare, in the order of files and lines."""
    brought = declared(member, members)
    problems: list[str] = []
    for path in sorted(member.source.rglob("*.py")):
        for name, line in sorted(imported(path.read_text(encoding="utf-8"), filename=str(path)), key=lambda x: x[1]):
            if name in sys.stdlib_module_names or name == member.module:
                continue
            wanted = canonicalize_name(DISTRIBUTIONS.get(name, name))
            key = (member.name, wanted)
            if wanted in brought or PROVIDED.get(key) in brought or key in OPTIONAL:
                continue
            where = f"{path.relative_to(root)}:{line}"
            remedy = "add it to pyproject.toml"
            problems.append(f"{where}: imports {name}, but {member.name} does not declare {wanted}: {remedy}")
    return problems


def main(arguments: list[str]) -> int:
    """Check the packages that are named, or all; returns 1 if something is undeclared."""
    members: Mapping[str, Member] = read()
    problems = [p for name in arguments or members for p in undeclared(chosen(members, name), members)]
    print("\n".join(problems) or f"declared: {', '.join(arguments or members)}")
    return bool(problems)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"declared: {exc}")
