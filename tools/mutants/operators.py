"""Small wrong changes of Python code: what each operator does to a node, and which nodes are left alone.

Left alone, by rule, is what cannot be wrong in a way that a test of behaviour sees: docstrings and other texts (all
strings, f-strings, what is logged or printed), types (annotations, casts, `TYPE_CHECKING`, protocols), decorators,
`__all__`, `assert` (our own invariants), `__repr__`, `strict=` of `zip`, and numbers that only set the pace: timeouts,
intervals of polling, sizes of buffers and pieces.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import NamedTuple


class Change(NamedTuple):
    """A node and what is written in its place."""

    node: ast.expr | ast.stmt
    text: str
    operator: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
PAIRS = {"min": "max", "max": "min", "any": "all", "all": "any"}
TEXT_CALLS = re.compile(r"^(print|echo|secho|log|debug|info|warn|warning|error|exception|note|say|add_note)$")
PACE = re.compile(
    r"timeout|interval|poll|buffer|chunk|piece|part_bytes|block_bytes|workers|threads|prefetch|sleep|backoff|_s$", re.I
)
PATHS = re.compile(r"path|folder|root|dir\b|file|name|target", re.I)
PACE_CALLS = re.compile(r"^(sleep|wait|join|lru_cache)$")
REFLECTION = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "delattr"}
ANNOTATING_CALLS = {"cast", "TypeVar", "NewType", "field", "Option", "Argument"}


def callee(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return {ast.Name: lambda f: f.id, ast.Attribute: lambda f: f.attr}.get(type(call.func), lambda _: "")(call.func)


def is_left_alone(node: ast.AST) -> bool:
    """Tell whether nothing in a node is changed."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call() as call):
            return is_left_alone(call)
        case ast.Call():
            return is_text_call(node)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.ClassDef(bases=bases):
            return any("Protocol" in ast.unparse(base) for base in bases)
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Annotated" | "Callable" | "Literal"))):
            return True
        case ast.keyword(arg=str(name)) | ast.AnnAssign(target=ast.Name(id=name)):
            return name == "strict" or bool(PACE.search(name))
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__" or bool(PACE.search(name))
    return False


def is_text_call(node: ast.Call) -> bool:
    """Tell whether a call writes a text, waits, or describes a type."""
    match node.func:
        case ast.Attribute(value=ast.Attribute(attr="stderr" | "stdout")):
            return True
    name = callee(node)
    return bool(TEXT_CALLS.match(name) or PACE_CALLS.match(name)) or name in ANNOTATING_CALLS


def iter_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be changed, statements before what they have in them."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_alone(child):
                if not (isinstance(child, ast.Tuple) and is_unordered(node, child)):
                    yield child
                yield from iter_nodes(child)


def is_unordered(parent: ast.AST, items: ast.Tuple) -> bool:
    """Tell whether the order of items is of no effect: of names, after `in`, of types."""
    if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in items.elts):
        return True
    if isinstance(parent, ast.Compare):
        return isinstance(parent.ops[-1], ast.In | ast.NotIn)
    return isinstance(parent, ast.ExceptHandler) or (isinstance(parent, ast.Call) and callee(parent) == "isinstance")


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield what the operators make of a node itself."""
    if isinstance(node, ast.expr):
        yield from expression_changes(node)
    elif isinstance(node, ast.stmt):
        yield from statement_changes(node)


def expression_changes(node: ast.expr) -> Iterator[Change]:
    """Yield the changes of an expression."""
    match node:
        case ast.Constant(value=value):
            yield from constant_changes(node, value)
        case ast.Call():
            yield from call_changes(node)
        case ast.Slice(lower=lower, upper=upper):
            if upper is not None and not isinstance(upper, ast.Constant):
                yield Change(upper, f"({ast.unparse(upper)}) - 1", "slice end - 1")
            if lower is not None and not isinstance(lower, ast.Constant):
                yield Change(lower, f"({ast.unparse(lower)}) + 1", "slice begin + 1")
        case ast.Tuple(elts=[first, second, *rest], ctx=ast.Load()) if are_alike(first, second):
            yield become(node, "items swapped", elts=[second, first, *rest])
        case ast.IfExp(body=body, orelse=orelse) if not has_text(node):
            yield become(node, "branches swapped", body=orelse, orelse=body)
        case _:
            yield from operator_changes(node)


def operator_changes(node: ast.expr) -> Iterator[Change]:
    """Yield the changes of an expression that is an operator and its operands."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield become(node, "comparison", ops=[*ops[:i], COMPARISONS[type(op)](), *ops[i + 1 :]])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not has_text(node) and not is_path(node):
            yield become(node, "arithmetic", op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield become(node, "and/or", op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield Change(node, f"({ast.unparse(operand)})", "removed not")
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield Change(node, f"({ast.unparse(operand)})", "sign")


def constant_changes(node: ast.Constant, value: object) -> Iterator[Change]:
    """Yield the changes of a constant."""
    if isinstance(value, bool):
        yield Change(node, str(not value), "constant")
    elif isinstance(value, int):
        yield Change(node, str(value + 1), "constant + 1")
        if value > 0:
            yield Change(node, str(value - 1), "constant - 1")
    elif isinstance(value, float):
        yield Change(node, repr(value * 2 if value else 1.0), "constant doubled")


def call_changes(node: ast.Call) -> Iterator[Change]:
    """Yield the changes of a call."""
    func, args, keywords = node.func, node.args, node.keywords
    if isinstance(func, ast.Name) and func.id in PAIRS:
        yield become(node, f"{func.id} became {PAIRS[func.id]}", func=ast.Name(id=PAIRS[func.id]))
    elif len(args) >= 2 and are_alike(args[0], args[1]) and not has_text(node) and callee(node) not in REFLECTION:
        yield become(node, "arguments swapped", args=[args[1], args[0], *args[2:]])
    for i, keyword in enumerate(keywords):
        if keyword.arg and not is_left_alone(keyword):
            yield become(node, f"{keyword.arg}= dropped", keywords=[*keywords[:i], *keywords[i + 1 :]])


def are_alike(first: ast.expr, second: ast.expr) -> bool:
    """Tell whether two expressions differ and are of one kind, so that either may stand where the other does."""
    return type(first) is type(second) and ast.dump(first) != ast.dump(second)


def become(node: ast.expr, operator: str, **fields: object) -> Change:
    """Return the change of some fields of an expression."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return Change(node, f"({ast.unparse(changed)})", operator)


def statement_changes(node: ast.stmt) -> Iterator[Change]:
    """Yield the changes of a statement."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield Change(node, "pass", "statement dropped")
        case ast.Raise(exc=ast.Call()):
            yield Change(node, "pass", "error not raised")
        case ast.Break():
            yield Change(node, "continue", "break became continue")
        case ast.Continue():
            yield Change(node, "break", "continue became break")
        case ast.If(test=test) | ast.While(test=test):
            yield Change(test, f"not ({ast.unparse(test)})", "condition negated")


def is_path(node: ast.BinOp) -> bool:
    """Tell whether a division joins paths, by the names of what is divided; as arithmetic it would only be a crash."""
    return isinstance(node.op, ast.Div) and bool(PATHS.search(ast.unparse(node)))


def has_text(node: ast.AST) -> bool:
    """Tell whether a node has a string in it: joined texts, and types written as `A | B` of names in strings."""
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )
