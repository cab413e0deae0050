"""The public names of a package, read from its sources: functions with parameters, classes with fields and methods.

A name is public when it stands in `__all__` of the package or of a module that `PUBLIC_MODULES` names
(where such a module has no `__all__`, its functions and classes). Where it is made
is found through imports, those for type checkers too, so lazily exported names need no import and neither torch nor any
other heavy package has to be there. One line says one thing, `KIND NAME REST`:

    function lt_data.pack
    parameter lt_data.pack(seq_len) keyword required
    field lt_data.Stats.n_tokens required

Annotations are left out: they are checked by the types stage, and their text differs where their meaning does not.
What a class inherits is listed where it is inherited from a class of ours; bases are named too, for who catches errors
by them. Static, class and async functions say so, and a parameter that callers cannot name; of what operators, `with`,
`for` and `len` call only the name is listed. Cost: a second for all packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from members import Member, ToolError

__all__ = ["names"]

PUBLIC_MODULES = {
    "lt-ckpt": ("errors",),
    "lt-data": ("torch", "exports.options"),
    "lt-launch": ("backend", "job", "profile"),
    "lt-model": ("activations", "costs"),
    "lt-trainer": ("control", "engine", "metrics", "planning.answer", "recipe", "testing", "torch"),
}
"""Beside the package itself: what READMEs and guides import by its own path."""

OPERATIONS = """
call iter next reversed len bool contains getitem setitem delitem enter exit aenter aexit aiter anext await
eq ne lt le gt ge hash int float index add radd sub mul rmul truediv floordiv mod pow and or xor neg fspath array
"""
SPOKEN = frozenset(f"__{name}__" for name in OPERATIONS.split())
"""Methods that callers use without their names."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def names(member: Member, *, sources: Path | None = None) -> list[str]:
    """The lines of a package, sorted; `sources` is the folder that holds the import packages of all members."""
    root = sources or member.source.parent
    found: list[str] = []
    for module in (member.module, *(f"{member.module}.{name}" for name in PUBLIC_MODULES.get(member.name, ()))):
        if _path(root, module) is None and module != member.module:
            continue  # an older version of the package did not have it
        for name in _exported(root, module):
            found += _lines(root, module, name, public=f"{module}.{name}")
    return sorted(set(found))


def _exported(root: Path, module: str) -> list[str]:
    for node in _tree(root, module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return (
                list(ast.literal_eval(node.value))
                if isinstance(node.value, ast.List | ast.Tuple)
                else _keys(node, root, module)
            )
    return [node.name for node in _tree(root, module).body if isinstance(node, Definition) and node.name[0] != "_"]


def _keys(node: ast.Assign, root: Path, module: str) -> list[str]:
    """`__all__ = sorted(_OWNERS)` or `list(_OWNERS)`: the keys of that table."""
    table = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    for other in _tree(root, module).body:
        target = other.targets[0] if isinstance(other, ast.Assign) else getattr(other, "target", None)
        value = getattr(other, "value", None)
        if isinstance(target, ast.Name) and target.id in table and isinstance(value, ast.Dict):
            return [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
    raise ToolError(f"{module}: __all__ is computed from something that is no table of this module")


def _lines(root: Path, module: str, name: str, *, public: str) -> list[str]:
    where, node = _definition(root, module, name)
    if isinstance(node, ast.ClassDef):
        return list(_class(root, where, node, public))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return list(_function(node, public, method=False))
    return [f"value {public}"]


def _definition(root: Path, module: str, name: str) -> tuple[str, ast.AST | None]:
    """The module that makes a name, and the definition there; None for a value or for what is not ours."""
    body = list(_flat(_tree(root, module).body))
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
    for node in body:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and _path(root, node.module) is not None:
                    if _path(root, f"{node.module}.{alias.name}") is not None:
                        return f"{node.module}.{alias.name}", None
                    return _definition(root, node.module, alias.name)
    return module, None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, with those below `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _class(root: Path, module: str, node: ast.ClassDef, public: str) -> Iterator[str]:
    yield f"class {public}"
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        where, inherited = _definition(root, module, name)
        if name.rpartition(".")[2][0] != "_":
            yield f"base {public} {name.rpartition('.')[2]}"
        if isinstance(inherited, ast.ClassDef):
            yield from (line for line in _class(root, where, inherited, public) if not line.startswith("class "))
    made = [*node.decorator_list, *node.bases]
    decorator = next((text for text in map(ast.unparse, made) if "dataclass" in text or "NamedTuple" in text), "")
    position = 0
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not part.target.id.startswith("_"):
            place = "" if not decorator or "kw_only=True" in decorator else f"{position} "
            yield f"field {public}.{part.target.id} {place}{_default(part, bool(decorator))}".rstrip()
            position += 1
        elif isinstance(part, ast.Assign):
            yield from (f"value {public}.{t.id}" for t in part.targets if isinstance(t, ast.Name) and t.id[0] != "_")
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _method(part, public)


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, public: str) -> Iterator[str]:
    decorators = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
    if node.name == "__init__":
        yield from (line for line in _function(node, public, method=True) if line.startswith("parameter "))
    elif node.name.startswith("_") and node.name not in SPOKEN:
        return
    elif node.name.startswith("_") and node.name != "__call__":
        yield f"function {public}.{node.name}"
    elif decorators & {"property", "cached_property"}:
        yield f"field {public}.{node.name}"
    elif not decorators & {"setter", "overload"}:
        yield from _function(node, f"{public}.{node.name}", method="staticmethod" not in decorators)


def _default(part: ast.AnnAssign, is_dataclass: bool) -> str:
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


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, public: str, *, method: bool) -> Iterator[str]:
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


def _path(root: Path, module: str) -> Path | None:
    """The file of a module of any member; `root` is one member's src, the others stand beside it."""
    relative = Path(*module.split("."))
    for src in (root, *_neighbours(root)):
        for candidate in (src / relative / "__init__.py", src / relative.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


@cache
def _neighbours(root: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in root.parent.parent.glob("*/src") if path != root))


def _tree(root: Path, module: str) -> ast.Module:
    path = _path(root, module)
    if path is None:
        raise ToolError(f"{module}: there is no such module")
    return _parsed(path)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))
