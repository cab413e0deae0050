"""Public names of a package, read from its sources: functions with parameters, classes with fields and methods.

A name is public when it is in `__all__` of the package or of a module in `PUBLIC_MODULES` (of a module without
`__all__`: what it imports as `x as x`, or else its functions and classes). Definitions are found by following imports,
including those for type checkers, so lazily exported names need no import, and neither torch nor any other heavy
package has to be installed. Each line describes one thing, `KIND NAME REST`:

    function lt_data.pack
    parameter lt_data.pack(seq_len) keyword required
    field lt_data.StoreStats.n_tokens required

Annotations are left out: the types stage checks them, and equal types can have different text. Inherited members are
listed if the base class is one of ours; bases are listed too, for callers that catch errors by them. Static, class and
async functions and positional-only parameters are marked as such; of methods called by operators, `with`, `for` and
`len` only the name is listed. Cost: a second for all packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from members import Member, ToolError

__all__ = ["public_names"]

PUBLIC_MODULES = {
    "lt-ckpt": ("errors",),
    "lt-data": ("torch", "exports.options"),
    "lt-launch": ("job", "profile", "target"),
    "lt-model": ("activation_memory", "costs"),
    "lt-trainer": ("config", "control", "engine", "planning", "run_directory", "testing", "torch"),
}
"""Public modules besides the package itself: READMEs and guides import them by path."""

OPERATOR_NAMES = """
call iter next reversed len bool contains getitem setitem delitem enter exit aenter aexit aiter anext await
eq ne lt le gt ge hash int float index add radd sub mul rmul truediv floordiv mod pow and or xor neg fspath array
"""
CALLED_DUNDERS = frozenset(f"__{name}__" for name in OPERATOR_NAMES.split())
"""Special methods that callers invoke implicitly."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_names(member: Member, *, sources: Path | None = None) -> list[str]:
    """Return the lines of a package, sorted; `sources` is the folder of all import packages."""
    root = sources or member.source_dir.parent
    found: list[str] = []
    for module in (member.module, *(f"{member.module}.{name}" for name in PUBLIC_MODULES.get(member.name, ()))):
        if _module_path(root, module) is None and module != member.module:
            continue  # an older version of the package did not have it
        for name in _exported_names(root, module):
            found += _name_lines(root, module, name, public=f"{module}.{name}")
    return sorted(set(found))


def _exported_names(root: Path, module: str) -> list[str]:
    for node in _module_ast(root, module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return (
                list(ast.literal_eval(node.value))
                if isinstance(node.value, ast.List | ast.Tuple)
                else _lazy_export_names(node, root, module)
            )
    body = _module_ast(root, module).body
    imported = [alias for node in _flatten_statements(body) if isinstance(node, ast.ImportFrom) for alias in node.names]
    if reexported := [alias.name for alias in imported if alias.asname == alias.name]:
        return reexported
    return [node.name for node in body if isinstance(node, Definition) and node.name[0] != "_"]


def _lazy_export_names(node: ast.Assign, root: Path, module: str) -> list[str]:
    """Return the keys of the table in `__all__ = sorted(_OWNERS)` or `list(_OWNERS)`."""
    table = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    for other in _module_ast(root, module).body:
        target = other.targets[0] if isinstance(other, ast.Assign) else getattr(other, "target", None)
        value = getattr(other, "value", None)
        if isinstance(target, ast.Name) and target.id in table and isinstance(value, ast.Dict):
            return [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
    raise ToolError(f"{module}: __all__ is computed from something that is no table of this module")


def _name_lines(root: Path, module: str, name: str, *, public: str) -> list[str]:
    where, node = _find_definition(root, module, name)
    if isinstance(node, ast.ClassDef):
        return list(_class_lines(root, where, node, public))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return list(_function_lines(node, public, method=False))
    return [f"value {public}"]


def _find_definition(root: Path, module: str, name: str) -> tuple[str, ast.AST | None]:
    """The module that makes a name, and the definition there; None for a value or for what is not ours."""
    body = list(_flatten_statements(_module_ast(root, module).body))
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
    for node in body:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and _module_path(root, node.module) is not None:
                    if _module_path(root, f"{node.module}.{alias.name}") is not None:
                        return f"{node.module}.{alias.name}", None
                    return _find_definition(root, node.module, alias.name)
    return module, None


def _flatten_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those inside `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flatten_statements([*node.body, *node.orelse])


def _class_lines(root: Path, module: str, node: ast.ClassDef, public: str) -> Iterator[str]:
    yield f"class {public}"
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        where, inherited = _find_definition(root, module, name)
        if name.rpartition(".")[2][0] != "_":
            yield f"base {public} {name.rpartition('.')[2]}"
        if isinstance(inherited, ast.ClassDef):
            yield from (line for line in _class_lines(root, where, inherited, public) if not line.startswith("class "))
    made = [*node.decorator_list, *node.bases]
    decorator = next((text for text in map(ast.unparse, made) if "dataclass" in text or "NamedTuple" in text), "")
    position = 0
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not part.target.id.startswith("_"):
            place = "" if not decorator or "kw_only=True" in decorator else f"{position} "
            yield f"field {public}.{part.target.id} {place}{_format_default(part, bool(decorator))}".rstrip()
            position += 1
        elif isinstance(part, ast.Assign):
            yield from (f"value {public}.{t.id}" for t in part.targets if isinstance(t, ast.Name) and t.id[0] != "_")
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _method_lines(part, public)


def _method_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, public: str) -> Iterator[str]:
    decorators = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
    if node.name == "__init__":
        yield from (line for line in _function_lines(node, public, method=True) if line.startswith("parameter "))
    elif node.name.startswith("_") and node.name not in CALLED_DUNDERS:
        return
    elif node.name.startswith("_") and node.name != "__call__":
        yield f"function {public}.{node.name}"
    elif decorators & {"property", "cached_property"}:
        yield f"field {public}.{node.name}"
    elif not decorators & {"setter", "overload"}:
        yield from _function_lines(node, f"{public}.{node.name}", method="staticmethod" not in decorators)


def _format_default(part: ast.AnnAssign, is_dataclass: bool) -> str:
    if not is_dataclass:
        return ""
    value = part.value
    if isinstance(value, ast.Call):
        given = {k.arg: ast.unparse(k.value) for k in value.keywords}
        if ast.unparse(value.func).rpartition(".")[2] == "field" and not {"default", "default_factory"} & set(given):
            return "required"
        made = given.get("default") or given.get("default_factory")
        return f"= {made or (ast.unparse(value.args[0]) if value.args else ast.unparse(value))}"
    return "required" if value is None else f"= {ast.unparse(value)}"


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, public: str, *, method: bool) -> Iterator[str]:
    bound = {ast.unparse(d) for d in node.decorator_list} & {"staticmethod", "classmethod"}
    kinds = [*bound, *(["async"] if isinstance(node, ast.AsyncFunctionDef) else [])]
    yield " ".join([f"function {public}", *kinds])
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for i, argument in enumerate(positional):
        if method and i == 0:
            continue
        default = "required" if i < missing else f"= {ast.unparse(arguments.defaults[i - missing])}"
        unnamed = "unnamed " if i < len(arguments.posonlyargs) else ""
        yield f"parameter {public}({argument.arg}) {i - method} {unnamed}{default}"
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield f"parameter {public}({argument.arg}) keyword {'required' if value is None else f'= {ast.unparse(value)}'}"
    if arguments.vararg:
        yield f"parameter {public}(*{arguments.vararg.arg})"
    if arguments.kwarg:
        yield f"parameter {public}(**{arguments.kwarg.arg})"


def _module_path(root: Path, module: str) -> Path | None:
    """Return the file of any member's module; `root` is one member's src, the others are its siblings."""
    relative = Path(*module.split("."))
    for src in (root, *_sibling_sources(root)):
        for candidate in (src / relative / "__init__.py", src / relative.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


@cache
def _sibling_sources(root: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in root.parent.parent.glob("*/src") if path != root))


def _module_ast(root: Path, module: str) -> ast.Module:
    path = _module_path(root, module)
    if path is None:
        raise ToolError(f"{module}: no such module")
    return _parse_file(path)


@cache
def _parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))
