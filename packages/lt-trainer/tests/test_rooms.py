"""Rooms of lt_trainer: others import them through their door, the `__init__`, which exports lazily."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import lt_trainer

SOURCES = Path(lt_trainer.__file__).parent
REPOSITORY = Path(__file__).parents[3]
ROOMS = (
    "checkpointing",
    "config",
    "data",
    "evaluation",
    "observability",
    "planning",
    "release",
    "resilience",
    "run_directory",
    "training",
    "tuning",
)
DOORS = (*ROOMS, *(f"observability.{name}" for name in ("monitor", "report", "sinks", "watch")))
FOLDERS = [SOURCES, *sorted(REPOSITORY.glob("packages/*/src")), REPOSITORY / "tools", REPOSITORY / "examples"]


def imports_past_a_door(path: Path, source: str) -> Iterator[str]:
    """Each import of a room's inner module from outside of the room; `path` is relative to the folder of lt_trainer."""
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            package, _, inner = module.partition(".")
            room, _, rest = inner.partition(".")
            if package != "lt_trainer" or room not in ROOMS or path.parts[:2] == ("lt_trainer", room):
                continue
            door = inner if inner in DOORS else max((d for d in DOORS if inner.startswith(f"{d}.")), key=len)
            place = SOURCES / inner.replace(".", "/")
            if rest and inner != door and (place.is_dir() or place.with_suffix(".py").exists()):
                yield f"{path}:{node.lineno}: imports {module}; import from lt_trainer.{door}"
                break


def test_rooms_are_entered_through_their_doors() -> None:
    found: list[str] = []
    for folder in FOLDERS:
        for path in folder.rglob("*.py"):
            inside = path.relative_to(SOURCES.parent) if path.is_relative_to(SOURCES) else path
            found += imports_past_a_door(inside, path.read_text(encoding="utf-8"))
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "n_found"),
    [
        ("lt_trainer/training/loop.py", "from lt_trainer.config import Recipe", 0),
        ("lt_trainer/training/loop.py", "from lt_trainer.config.recipe import Recipe", 1),
        ("lt_trainer/config/recipe.py", "from lt_trainer.config.fields import build", 0),
        ("lt_trainer_gpu/spec.py", "def f():\n    import lt_trainer.config.recipe", 1),
        ("lt_trainer_gpu/spec.py", "from lt_trainer.config import recipe", 1),
        ("lt_trainer_gpu/spec.py", "from lt_trainer.config.sections import Recipe", 1),
        ("lt_trainer/cli/commands.py", "from lt_trainer.observability.report import write_report", 0),
        ("lt_trainer/cli/commands.py", "from lt_trainer.observability.report.writer import write_report", 1),
        ("lt_trainer/cli/commands.py", "from lt_trainer.engine import World\nfrom lt_trainer.cli import sample", 0),
    ],
)
def test_the_search_finds_what_it_should(path: str, source: str, n_found: int) -> None:
    assert len(list(imports_past_a_door(Path(path), source))) == n_found


@pytest.mark.parametrize("name", ["", *DOORS])
def test_a_door_exports_what_type_checkers_see(name: str) -> None:
    door = import_module(f"lt_trainer.{name}".rstrip("."))
    assert door.__file__ is not None
    tree = ast.parse(Path(door.__file__).read_text(encoding="utf-8"))
    imports = {alias.name: node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed = {name: node.module for name, node in imports.items() if name not in ("TYPE_CHECKING", "lazy_exports")}
    assert sorted(typed) == door.__all__
    assert set(door.__all__) <= set(dir(door))
    for exported, module in typed.items():
        assert module is not None
        assert getattr(door, exported) is getattr(import_module(module), exported)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(door, "nonsense")  # noqa: B009 - an attribute that type checkers do not know


def test_importing_the_doors_loads_nothing_behind_them() -> None:
    modules = [f"lt_trainer.{door}" for door in DOORS]
    script = (
        f"import sys, {', '.join(modules)}\n"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] in ('lt_trainer', 'lt_data', 'lt_ckpt', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(["lt_trainer", "lt_trainer.lazy", *modules])
