"""Check of declared dependencies: everything that a package imports is a dependency or in an extra.

In the workspace's single environment everything is importable, so a forgotten dependency would only fail on a user's
machine. Sources are parsed, not imported: import statements anywhere, also inside functions, and `import_module("...")`
with a literal name. Imports for type checkers only (`if TYPE_CHECKING:`) do not count. A required extra of a sibling
provides the requirements of that extra. Under a second.

    python tools/check_dependencies.py             # all packages
    python tools/check_dependencies.py lt-data     # one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from members import ROOT, Member, ToolError, get_member, read_members
from packaging.utils import canonicalize_name

DISTRIBUTION_NAMES = {"cyclonedx": "cyclonedx-python-lib", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Import names that differ from the distribution name by more than - and _."""
PROVIDED_BY = {
    ("lt-ckpt", "botocore"): "boto3",
    ("lt-data", "botocore"): "boto3",
    ("lt-data", "s3transfer"): "boto3",
    ("lt-launch", "botocore"): "boto3",
    ("lt-trainer", "pyyaml"): "huggingface-hub",
}
"""(package, imported distribution) to the declared one that always installs it."""
OPTIONAL_IMPORTS = {
    ("lt-model", "flash-attn"): "a backend for those who have it; built from source, so no extra can promise it",
}
"""Undeclared imports that a package may try, each with the reason."""

DYNAMIC_IMPORT_CALLS = ("import_module", "__import__", "importorskip")


def imported_modules(source: str, *, filename: str = "<source>") -> Iterator[tuple[str, int]]:
    """Yield the top-level names that a module imports at run time, with line numbers; no relative imports."""
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in DYNAMIC_IMPORT_CALLS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names = [first.value]
        for name in names:
            if top := name.partition(".")[0]:
                yield top, getattr(node, "lineno", 0)
        pending.extend(ast.iter_child_nodes(node))


def declared_distributions(member: Member, members: Mapping[str, Member]) -> set[str]:
    """Return the names that a package's dependencies and extras provide, required sibling extras included."""
    found: set[str] = set()
    pending = [r for group in member.requirements.values() for r in group]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        if name in members and name != member.name:
            pending += [r for extra in requirement.extras for r in members[name].extras.get(extra, ())]
    return found


def find_undeclared_imports(member: Member, members: Mapping[str, Member], root: Path = ROOT) -> list[str]:
    """Return a sentence for each undeclared import, in order of files and lines."""
    provided = declared_distributions(member, members)
    problems: list[str] = []
    for path in sorted(member.source_dir.rglob("*.py")):
        for name, line in sorted(
            imported_modules(path.read_text(encoding="utf-8"), filename=str(path)), key=lambda x: x[1]
        ):
            if name in sys.stdlib_module_names or name == member.module:
                continue
            wanted = canonicalize_name(DISTRIBUTION_NAMES.get(name, name))
            key = (member.name, wanted)
            if wanted in provided or PROVIDED_BY.get(key) in provided or key in OPTIONAL_IMPORTS:
                continue
            where = f"{path.relative_to(root)}:{line}"
            remedy = "add it to pyproject.toml"
            problems.append(f"{where}: imports {name}, but {member.name} does not declare {wanted}: {remedy}")
    return problems


def main(arguments: list[str]) -> int:
    """Check the given packages, or all; return 1 if an import is undeclared."""
    members: Mapping[str, Member] = read_members()
    problems = [p for name in arguments or members for p in find_undeclared_imports(get_member(members, name), members)]
    print("\n".join(problems) or f"all imports are declared: {', '.join(arguments or members)}")
    return bool(problems)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"check_dependencies: {exc}")
