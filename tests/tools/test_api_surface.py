"""What is written down about the packages is what they are: public names, the picture of the imports."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import architecture_diagram
import pytest
from api_names import public_names
from api_surface import api_lines, command_lines, field_lines, parse_api_file
from architecture_diagram import import_graph, longest_path_levels, render_flow_svg, render_svg, transitive_reduction
from members import ROOT, ToolError, read_members
from packaging.version import Version
from small_workspace import replace_text
from version_bump import bump_version, diff_api, required_bump

MEMBERS = read_members()


@pytest.mark.guarantee("semver")
@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_the_frozen_list_is_what_the_package_offers(name: str) -> None:
    """If this fails: tools/api_surface.py --write, and a line in the package's changelog."""
    assert parse_api_file((MEMBERS[name].folder / "API.txt").read_text()) == api_lines(MEMBERS[name])


def test_every_public_name_is_in_the_list() -> None:
    """By the other way: `__all__` as Python sees it."""
    script = (
        "import sys, importlib; print(*[f'{m}.{n}' for m in sys.argv[1:] for n in importlib.import_module(m).__all__])"
    )
    modules = [member.module for member in MEMBERS.values()]
    command = [sys.executable, "-c", script, *modules]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    listed = {line.split()[1] for member in MEMBERS.values() for line in public_names(member)}
    assert len(found) > 100
    assert set(found) <= listed


def test_the_list_has_commands_and_recipe_fields() -> None:
    data, trainer = (
        parse_api_file((MEMBERS[name].folder / "API.txt").read_text()) for name in ("lt-data", "lt-trainer")
    )
    assert "command lt/data/prepare" in data
    assert "option lt/data/prepare(--tokenizer) value required" in data
    assert any(line.startswith("recipe optimizer.lr = ") and line.endswith(" LEARNING_RATE") for line in trainer)
    neuron = parse_api_file((MEMBERS["lt-trainer-neuron"].folder / "API.txt").read_text())
    assert "option lt/train/env(--sdk) value = " in neuron, "what an engine adds to lt train"
    assert {"program lt-data", "extra lt-data[cli]"} <= set(data)


def test_every_command_of_lt_is_in_a_list() -> None:
    """By the other way: what the `lt` command finds, with all that is added to it."""
    from typer import Context
    from typer.main import get_command

    from lt_trainer.cli.commands import app

    train: Any = get_command(app)
    there = {f"lt/train/{name}" for name in train.list_commands(Context(train))}
    there |= {f"lt/{name}" for member in MEMBERS.values() for name in member.entry_points.get("lt.commands", {})}
    listed = {line for member in MEMBERS.values() for line in parse_api_file((member.folder / "API.txt").read_text())}
    assert len(there) > 15
    assert {f"command {path}" for path in there} <= listed


def test_programs_and_extras_are_promised(small_workspace_dir: Path) -> None:
    before = api_lines(read_members(small_workspace_dir)["lt-mid"])
    replace_text(small_workspace_dir / "packages/lt-mid/pyproject.toml", "cli = [", "shell = [")
    assert diff_api(before, api_lines(read_members(small_workspace_dir)["lt-mid"])) == (
        ["- extra lt-mid[cli]"],
        ["+ extra lt-mid[shell]"],
    )


SOURCE = '''
"""A module."""
from dataclasses import dataclass
from typing import NamedTuple, TYPE_CHECKING
if TYPE_CHECKING:
    from lt_mid.deep import Far
__all__ = ["C", "D", "E", "Far", "N", "V", "f", "g"]
V = 1
def f(a, b=2, *rest, c, d: int = 4, **more): ...
async def g(x, /, y): ...
class B(Exception): ...
class C(B, Sequence[int]):
    """A class."""
    x: int
    _y: int
    def __init__(self, p, q=1): ...
    def m(self, *, k): ...
    def _hidden(self): ...
    def __len__(self): ...
    def __repr__(self): ...
    @property
    def prop(self): ...
    @staticmethod
    def s(one): ...
    @classmethod
    def made(cls): ...
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
base lt_mid.C B
base lt_mid.C Exception
base lt_mid.C Sequence
base lt_mid.E B
base lt_mid.E C
base lt_mid.E Exception
base lt_mid.E Sequence
base lt_mid.N NamedTuple
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
function lt_mid.C.__len__
function lt_mid.C.m
function lt_mid.C.made classmethod
function lt_mid.C.s staticmethod
function lt_mid.E.__len__
function lt_mid.E.m
function lt_mid.E.made classmethod
function lt_mid.E.n
function lt_mid.E.s staticmethod
function lt_mid.f
function lt_mid.g async
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
parameter lt_mid.g(x) 0 unnamed required
parameter lt_mid.g(y) 1 required
value lt_mid.V
"""


def test_the_names_of_a_module(small_workspace_dir: Path) -> None:
    source = small_workspace_dir / "packages/lt-mid/src/lt_mid"
    ast.parse(SOURCE)
    (source / "__init__.py").write_text(SOURCE)
    (source / "deep.py").write_text("class Far: ...\n")
    assert public_names(read_members(small_workspace_dir)["lt-mid"]) == EXPECTED.split("\n")[1:-1]


def test_the_pictures_are_what_the_sources_import() -> None:
    """If this fails: tools/architecture_diagram.py --write."""
    assert (ROOT / "docs/images/architecture.svg").read_text() == render_flow_svg(MEMBERS)
    assert (ROOT / "docs/images/imports.svg").read_text() == render_svg(MEMBERS)


def test_each_arrow_of_the_data_flow_has_an_import(monkeypatch: pytest.MonkeyPatch, small_workspace_dir: Path) -> None:
    with pytest.raises(ToolError, match="PLACES does not match the packages: lt-base"):
        render_flow_svg(read_members(small_workspace_dir))
    monkeypatch.setattr(
        architecture_diagram,
        "FLOWS",
        (*architecture_diagram.FLOWS, architecture_diagram.Flow("lt-data", "lt-ckpt", "dust")),
    )
    with pytest.raises(ToolError, match="'dust' connects lt-data and lt-ckpt, and neither imports the other"):
        render_flow_svg(MEMBERS)


def test_the_table_beside_the_picture_says_the_same() -> None:
    rows = re.findall(
        r"^\| (lt-[a-z-]+) \(`\w+`\) \|[^|]*\| ([^|]*) \|", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    written = {name: set(re.findall(r"lt-[a-z-]+", text)) for name, text in rows}
    assert written == import_graph(MEMBERS)


def test_a_new_import_changes_the_picture(small_workspace_dir: Path) -> None:
    replace_text(
        small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py", "\n\n__all__", "\n\nimport lt_base\n\n__all__"
    )
    replace_text(small_workspace_dir / "packages/lt-top/src/lt_top/__init__.py", "...", "\n    import lt_mid, lt_base")
    edges = import_graph(read_members(small_workspace_dir))
    assert edges == {"lt-base": set(), "lt-mid": {"lt-base"}, "lt-side": set(), "lt-top": {"lt-mid", "lt-base"}}
    assert longest_path_levels(edges) == {"lt-base": 0, "lt-mid": 1, "lt-side": 0, "lt-top": 2}
    assert transitive_reduction(edges)["lt-top"] == {"lt-mid"}
    before = render_svg(read_members(small_workspace_dir))
    replace_text(small_workspace_dir / "packages/lt-side/src/lt_side/__init__.py", "...", "import lt_base")
    assert render_svg(read_members(small_workspace_dir)) != before
    with pytest.raises(ToolError, match="import cycle: lt-a, lt-b"):
        longest_path_levels({"lt-a": {"lt-b"}, "lt-b": {"lt-a"}})


MODULE = '''
"""A module."""
from dataclasses import dataclass
from enum import Enum
__all__ = ["C", "D", "E", "S", "V", "f", "g", "h"]
V = 1
def f(a, b=2, *rest, c, d=4, **more): ...
def g(a, b): ...
async def h(a): ...
class B:
    K = 1
    def inherited(self, x): ...
class C(B):
    def __init__(self, p, q=1): ...
    def m(self, *, k=1): ...
    def __len__(self): ...
    @property
    def prop(self): ...
    @staticmethod
    def s(one): ...
class X: ...
class Y(X): ...
@dataclass(frozen=True, kw_only=True)
class D(Y):
    one: int
    two: int = 2
class E(Enum):
    A = "a"
    Z = "z"
@dataclass
class S:
    one: int
    two: int = 2
'''
BREAKING_CHANGES = {
    "a function is gone": ("def g(a, b): ...\n", ""),
    "a name is gone from __all__": ('"g",', ""),
    "a parameter is gone": ("b=2, ", ""),
    "a parameter has another name": ("def f(a,", "def f(first,"),
    "a default has changed": ("b=2", "b=3"),
    "a keyword's default has changed": ("d=4", "d=5"),
    "a parameter must be given": ("b=2", "b"),
    "a keyword must be given": ("d=4", "d"),
    "a parameter became a keyword": ("def g(a, b)", "def g(a, *, b)"),
    "a parameter lost its name": ("def g(a, b)", "def g(a, /, b)"),
    "parameters changed places": ("def g(a, b)", "def g(b, a)"),
    "no more of them": ("*rest, c", "*, c"),
    "no other keywords": (", **more", ""),
    "one more parameter": ("def g(a, b)", "def g(a, b, c)"),
    "one more keyword": ("def g(a, b)", "def g(a, b, *, c)"),
    "a method is gone": ("    def m(self, *, k=1): ...\n", ""),
    "a method's parameter is gone": ("*, k=1", ""),
    "len() is gone": ("    def __len__(self): ...\n", ""),
    "__init__ takes less": ("p, q=1", "p"),
    "what was inherited is gone": ("    def inherited(self, x): ...\n", ""),
    "a base is gone": ("class C(B)", "class C"),
    "a base of which nothing was inherited is gone": ("class D(Y)", "class D"),
    "a value of a class is gone": ("    K = 1\n", ""),
    "a member is gone": ('    Z = "z"\n', ""),
    "a field is gone": ("    one: int\n", ""),
    "a field's default has changed": ("two: int = 2", "two: int = 3"),
    "a field must be given": ("two: int = 2", "two: int"),
    "fields changed places": ("class S:\n    one: int\n    two: int = 2", "class S:\n    two: int\n    one: int = 2"),
    "a function became a class": ("def g(a, b): ...", "class g: ..."),
    "a property became a method": ("    @property\n", ""),
    "a method became a property": ("    def m(self, *, k=1)", "    @property\n    def m(self)"),
    "a static method became one of objects": ("    @staticmethod\n    def s(", "    def s(self, "),
}
NOT_FOUND_BY_GRIFFE = {"a name is gone from __all__", "a parameter is gone"}
"""What griffe does not see: what is exported, and a parameter in whose place others are taken."""


@pytest.mark.parametrize("planted", BREAKING_CHANGES)
def test_a_break_is_found_and_moves_the_version(small_workspace_dir: Path, planted: str) -> None:
    """Everything that griffe calls a break is one in our list too."""
    griffe = pytest.importorskip("griffe", reason="griffe is not installed: the list was not compared with it")
    folder = small_workspace_dir / "packages/lt-mid/src/lt_mid"
    old, new = BREAKING_CHANGES[planted]
    assert MODULE.count(old) >= 1
    lists, objects = [], []
    for name, text in (("before", MODULE), ("after", MODULE.replace(old, new, 1))):
        module = small_workspace_dir / name / "packages" / "lt-mid" / "src" / "lt_mid"
        module.mkdir(parents=True)
        (module / "__init__.py").write_text(text)
        member = dataclasses.replace(read_members(small_workspace_dir)["lt-mid"], folder=module.parents[1])
        lists.append(public_names(member))
        objects.append(griffe.load("lt_mid", search_paths=[module.parent]))
    assert folder.is_dir()
    breaks, additions = diff_api(*lists)
    assert breaks
    for version, needed in (("0.3.1", "0.4.0"), ("1.2.3", "2.0.0")):
        level = required_bump(breaks, additions, version=Version(version))
        assert str(bump_version(Version(version), level)) == needed
    assert bool(list(griffe.find_breaking_changes(*objects))) is (planted not in NOT_FOUND_BY_GRIFFE)


APP = """
import typer
from typing import Annotated, Literal
app = typer.Typer()
@app.command()
def pack(store: str, out: Annotated[str, typer.Option()], rows: Annotated[int, typer.Option()] = 4, fast: bool = False,
    mode: Annotated[Literal["best", "cut"], typer.Option()] = "best"): ...
@app.command()
def stats(store: str): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("@app.command()\ndef stats", "def stats", True),
        ("rows: Annotated[int, typer.Option()] = 4, ", "", True),
        ("rows: Annotated[int, typer.Option()] = 4", 'rows: Annotated[int, typer.Option("--lines")] = 4', True),
        ("] = 4", "] = 8", True),
        ("] = 4", "]", True),
        ("fast: bool = False", "fast: str = ''", True),
        ('"best", "cut"', '"best"', True),
        ("def stats(store: str", "def stats(store: str, other: str", True),
        ('"best", "cut"', '"best", "cut", "free"', False),
        ("fast: bool = False", "fast: bool = False, slow: bool = False", False),
        ("def stats(store: str)", "def stats(store: str, wide: int = 80)", False),
    ],
)
def test_a_change_of_commands(old: str, new: str, broken: bool) -> None:
    assert APP.count(old) == 1
    lists = []
    for text in (APP, APP.replace(old, new)):
        public_names: dict[str, object] = {}
        exec(text, public_names)
        lists.append(command_lines(public_names["app"], "lt/x"))
    breaks, additions = diff_api(*lists)
    assert bool(breaks) is broken, (breaks, additions)
    assert breaks or additions


def test_a_change_of_recipe_fields() -> None:
    from lt_trainer.config.fields import leaves
    from lt_trainer.config.recipe import Recipe

    fields = list(leaves(Recipe).values())
    (lr,) = [leaf for leaf in fields if leaf.name == "optimizer.lr"]
    others = [leaf for leaf in fields if leaf is not lr]
    before = field_lines(fields)
    assert diff_api(before, before) == ([], [])
    assert diff_api(before, field_lines(others))[0] == ["- recipe optimizer.lr = 0.0016 LEARNING_RATE"]
    assert diff_api(before, field_lines([*others, dataclasses.replace(lr, default=1.0)]))[0]
    assert diff_api(before, field_lines([*others, dataclasses.replace(lr, name="optimizer.rate")]))[0]
    assert diff_api(field_lines(others), before) == ([], ["+ recipe optimizer.lr = 0.0016 LEARNING_RATE"])
