"""What is written down about the packages is what they are: public names, the picture of the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from api_names import names
from api_surface import frozen, surface
from architecture import drawing, imports, levels, reduced
from members import ROOT, ToolError, read
from small_workspace import edit

REAL = read()


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_frozen_list_is_what_the_package_offers(name: str) -> None:
    """If this fails: tools/api_surface.py --write, and a line in the package's changelog."""
    assert frozen((REAL[name].folder / "API.txt").read_text()) == surface(REAL[name])


def test_every_public_name_is_in_the_list() -> None:
    """By the other way: `__all__` as Python sees it."""
    script = (
        "import sys, importlib; print(*[f'{m}.{n}' for m in sys.argv[1:] for n in importlib.import_module(m).__all__])"
    )
    modules = [member.module for member in REAL.values()]
    command = [sys.executable, "-c", script, *modules]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    listed = {line.split()[1] for member in REAL.values() for line in names(member)}
    assert len(found) > 100
    assert set(found) <= listed


def test_the_list_has_commands_and_recipe_fields() -> None:
    data, trainer = (frozen((REAL[name].folder / "API.txt").read_text()) for name in ("lt-data", "lt-trainer"))
    assert "command lt/data/prepare" in data
    assert "option lt/data/prepare(--tokenizer) value required" in data
    assert any(line.startswith("recipe optimizer.lr = ") and line.endswith(" LEARNING_RATE") for line in trainer)


SOURCE = '''
"""A module."""
from dataclasses import dataclass
from typing import NamedTuple, TYPE_CHECKING
if TYPE_CHECKING:
    from lt_mid.deep import Far
__all__ = ["C", "D", "E", "Far", "N", "V", "f"]
V = 1
def f(a, b=2, *rest, c, d: int = 4, **more): ...
class C:
    """A class."""
    x: int
    _y: int
    def __init__(self, p, q=1): ...
    def m(self, *, k): ...
    def _hidden(self): ...
    @property
    def prop(self): ...
    @staticmethod
    def s(one): ...
class E(C):
    def n(self): ...
@dataclass(frozen=True, kw_only=True)
class D:
    one: int
    two: int = 2
class N(NamedTuple):
    one: int
    two: int = 2
def not_public(): ...
'''
EXPECTED = """
class lt_mid.C
class lt_mid.D
class lt_mid.E
class lt_mid.Far
class lt_mid.N
field lt_mid.C.prop
field lt_mid.C.x
field lt_mid.D.one required
field lt_mid.D.two = 2
field lt_mid.E.prop
field lt_mid.E.x
field lt_mid.N.one 0 required
field lt_mid.N.two 1 = 2
function lt_mid.C.m
function lt_mid.C.s
function lt_mid.E.m
function lt_mid.E.n
function lt_mid.E.s
function lt_mid.f
parameter lt_mid.C(p) 0 required
parameter lt_mid.C(q) 1 = 1
parameter lt_mid.C.m(k) keyword required
parameter lt_mid.C.s(one) 0 required
parameter lt_mid.E(p) 0 required
parameter lt_mid.E(q) 1 = 1
parameter lt_mid.E.m(k) keyword required
parameter lt_mid.E.s(one) 0 required
parameter lt_mid.f(**more)
parameter lt_mid.f(*rest)
parameter lt_mid.f(a) 0 required
parameter lt_mid.f(b) 1 = 2
parameter lt_mid.f(c) keyword required
parameter lt_mid.f(d) keyword = 4
value lt_mid.V
"""


def test_the_names_of_a_module(small: Path) -> None:
    source = small / "packages/lt-mid/src/lt_mid"
    ast.parse(SOURCE)
    (source / "__init__.py").write_text(SOURCE)
    (source / "deep.py").write_text("class Far: ...\n")
    assert names(read(small)["lt-mid"]) == EXPECTED.split("\n")[1:-1]


def test_the_picture_is_what_the_sources_import() -> None:
    """If this fails: tools/architecture.py --write."""
    assert (ROOT / "docs/images/architecture.svg").read_text() == drawing(REAL)


def test_a_new_import_changes_the_picture(small: Path) -> None:
    edit(small / "packages/lt-mid/src/lt_mid/__init__.py", "\n\n__all__", "\n\nimport lt_base\n\n__all__")
    edit(small / "packages/lt-top/src/lt_top/__init__.py", "...", "\n    import lt_mid, lt_base")
    edges = imports(read(small))
    assert edges == {"lt-base": set(), "lt-mid": {"lt-base"}, "lt-side": set(), "lt-top": {"lt-mid", "lt-base"}}
    assert levels(edges) == {"lt-base": 0, "lt-mid": 1, "lt-side": 0, "lt-top": 2}
    assert reduced(edges)["lt-top"] == {"lt-mid"}
    before = drawing(read(small))
    edit(small / "packages/lt-side/src/lt_side/__init__.py", "...", "import lt_base")
    assert drawing(read(small)) != before
    with pytest.raises(ToolError, match="import each other: lt-a, lt-b"):
        levels({"lt-a": {"lt-b"}, "lt-b": {"lt-a"}})
