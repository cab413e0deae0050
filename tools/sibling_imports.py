"""Names that a package imports from its siblings, and which of them the installed siblings lack.

    VENV/bin/python tools/sibling_imports.py lt_trainer lt_data lt_ckpt lt_model

Run by an environment's own Python, with the names of the package and of its siblings. All imports are checked, also
those inside functions or of an uninstalled extra: sources are parsed, nothing is executed, since `import lt_trainer`
alone loads almost nothing of a sibling. Imports for type checkers only do not count. Standard library only; well under
a second.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path


def find_sibling_imports(sources: Path, siblings: set[str]) -> dict[tuple[str, str], str]:
    """Return (module, name) of all imports from siblings, with their first location; name may be empty."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(sources.rglob("*.py")):
        for node in _runtime_nodes(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            for module, name in _imported_names(node):
                if module.partition(".")[0] in siblings:
                    found.setdefault((module, name), f"{path.relative_to(sources.parent)}:{getattr(node, 'lineno', 0)}")
    return found


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one, except those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from _runtime_nodes(other)
        else:
            yield node
            yield from _runtime_nodes(node)


def _imported_names(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [(node.module, alias.name) for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module" and node.args:
        first = node.args[0]
        return [(first.value, "")] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def find_missing_names(sources: Path, roots: dict[str, Path]) -> list[str]:
    """Return a sentence for each imported name that is missing; `roots` has the folder of each sibling."""
    found: list[str] = []
    for (module, name), where in find_sibling_imports(sources, set(roots)).items():
        path = _module_file(roots, module)
        if path is None:
            found.append(f"{where}: no module {module}")
        elif name and name not in _module_names(path) and _module_file(roots, f"{module}.{name}") is None:
            found.append(f"{where}: {module} has no {name}")
    return found


def _module_file(roots: dict[str, Path], module: str) -> Path | None:
    top, *rest = module.split(".")
    place = roots[top].joinpath(*rest)
    candidates = [place / "__init__.py", *([place.with_suffix(".py")] if rest else [])]
    return next((path for path in candidates if path.is_file()), None)


def _module_names(path: Path) -> set[str]:
    """Return the names of a module: defined or imported at its top level, or in its table of lazy exports."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found: set[str] = set()
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    if "__getattr__" in found:
        lists = [n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None]
        found |= {
            c.value for n in lists for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str)
        }
    return found


def main(arguments: list[str]) -> int:
    """Check an installed package; return 1 if a sibling lacks a name."""
    folders: dict[str, Path] = {}
    for name in arguments:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            print(f"{name} is not installed")
            return 1
        folders[name] = Path(spec.origin).parent
    first, *siblings = arguments
    found = find_missing_names(folders[first], {name: folders[name] for name in siblings})
    print("\n".join(found) or f"{first}: all names imported from {', '.join(siblings) or 'no sibling'} exist")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
