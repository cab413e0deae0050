"""No old name is left: tools/old_names.txt against modules, definitions, schemas, command tables and events.

A line of the list is `kind<TAB>old<TAB>new`, where kind is one of

    module     dotted module, or the path of a file under tools/, tests/ or packages/
    symbol     MODULE:QUALIFIED.NAME in today's module: a function, class, constant, method or field
    word       a bare name that nothing in the sources may be called
    field      dotted field of a recipe, a run file or a launch profile
    option     COMMAND --option
    command    COMMAND
    event      PACKAGE NAME of an event of events.jsonl

Definitions are read from the syntax tree, fields from the schemas, options and commands from the parsed command lines.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for path in ROOT.glob("packages/*/src/**/*.py"))
EVENT_WRITERS = {"log_event", "append_event"}
SHARED_CLASS_NAMES = {
    "S3Folder": "lt-ckpt and lt-data stay independent; both S3 adapters are replaced by boto3's transfer manager",
}
"""Public class names that may stand in two packages, each with the reason."""


def old_names() -> list[tuple[str, str, str]]:
    lines = (ROOT / "tools" / "old_names.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(kind, old, new) for kind, old, new in rows]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[3:]  # packages/NAME/src/...
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def assigned_names(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Return the qualified names that a module or class defines, attributes set on `self` included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}"
            if prefix:
                for leaf in ast.walk(node):
                    is_set = isinstance(leaf, ast.Attribute) and isinstance(leaf.ctx, ast.Store)
                    if is_set and isinstance(leaf.value, ast.Name) and leaf.value.id == "self":
                        yield f"{prefix}{leaf.attr}"
        elif isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}"
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions([*node.body, *node.orelse], prefix)
        else:
            yield from (f"{prefix}{name}" for name in assigned_names(node))


def sources() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return sources()


def of_kind(kind: str) -> list[tuple[str, str]]:
    rows = [(old, new) for row_kind, old, new in old_names() if row_kind == kind]
    assert rows, f"the list has no {kind}"
    return rows


def test_the_list_is_well_formed() -> None:
    rows = old_names()
    kinds = {"module", "symbol", "word", "field", "option", "command", "event"}
    assert {kind for kind, _, _ in rows} == kinds
    assert len({(kind, old) for kind, old, _ in rows}) == len(rows), "an old name stands twice"
    assert all(old != new and new for _, old, new in rows)


def test_no_old_module(trees: dict[str, ast.Module]) -> None:
    left = [old for old, _ in of_kind("module") if old in trees or ("/" in old and (ROOT / old).exists())]
    assert left == []


def test_no_old_symbol(trees: dict[str, ast.Module]) -> None:
    defined = {f"{module}:{name}" for module, tree in trees.items() for name in definitions(tree.body)}
    assert [f"{old} → {new}" for old, new in of_kind("symbol") if old in defined] == []


def test_no_old_word(trees: dict[str, ast.Module]) -> None:
    words = dict(of_kind("word"))
    found = [
        f"{module}:{name} → {words[word]}"
        for module, tree in trees.items()
        for name in definitions(tree.body)
        if (word := name.rpartition(".")[2].lstrip("_")) in words
    ]
    assert found == []


def test_no_old_field() -> None:
    from lt_launch.job import Job, Stage
    from lt_launch.k8s.options import KubernetesOptions
    from lt_launch.local import LocalOptions
    from lt_launch.sagemaker.options import SageMakerOptions
    from lt_launch.slurm.options import SlurmOptions
    from lt_launch.ssh_transport import SshOptions
    from lt_trainer import Recipe
    from lt_trainer.config.fields import leaves
    from lt_trainer_gpu import GpuOptions
    from lt_trainer_neuron import NeuronOptions

    schema = {**leaves(Recipe), **leaves(GpuOptions, "engine.gpu."), **leaves(NeuronOptions, "engine.neuron.")}
    schema |= {**leaves(Job, "job."), **leaves(Stage, "stage.")}
    targets = {"k8s": KubernetesOptions, "local": LocalOptions, "sagemaker": SageMakerOptions}
    targets |= {"slurm": SlurmOptions, "ssh": SshOptions}
    for table, options in targets.items():
        schema |= leaves(options, f"{table}.")
    sections = {name.rpartition(".")[0] for name in schema}
    renamed = {leaf.former_name: leaf.name for leaf in schema.values() if leaf.former_name}
    for old, new in of_kind("field"):
        assert old not in schema
        assert old not in sections
        assert new in schema or new in sections, f"{new} is no field today"
        assert renamed.get(old) == new or new in sections, f"the error for {old} does not name {new}"


def command_lines() -> set[str]:
    lines = [line for path in ROOT.glob("packages/*/API.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    return {" ".join(line.split()[:2]) for line in lines if line.startswith(("command ", "option "))}


def test_no_old_option_or_command() -> None:
    """Against API.txt, which `tests/tools/test_api_surface.py` holds to the command tables."""
    known = command_lines()
    assert "command lt/ckpt" in known
    for old, _ in of_kind("command"):
        assert f"command {old.replace(' ', '/')}" not in known
    for old, new in of_kind("option"):
        command, _, flag = old.rpartition(" ")
        assert f"option {command.replace(' ', '/')}({flag})" not in known
        assert f"option {command.replace(' ', '/')}({new})" in known, f"{command} has no {new}"


def test_no_old_event() -> None:
    written: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in EVENT_WRITERS:
                names = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
                written[path.relative_to(ROOT).parts[1]] |= names
    assert {"start", "resume", "checkpoint"} <= written["lt-trainer"], "events are not found any more"
    for old, new in of_kind("event"):
        package, _, name = old.partition(" ")
        assert name not in written[package]
        assert new in written[package]


def test_no_public_class_name_stands_in_two_packages(trees: dict[str, ast.Module]) -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(module.partition(".")[0])
    shared = {name for name, packages in owners.items() if len(packages) > 1}
    assert shared == {name for name in SHARED_CLASS_NAMES if len(owners[name]) > 1}
    assert shared == set(SHARED_CLASS_NAMES), "an exception that is not needed any more"


QUESTION_WORDS = {"What", "Who", "Whether", "How", "Where", "Which", "When", "Why", "See"}
NOT_IMPERATIVE = {"The", "A", "An", "This", "Returns", "Gives", "Makes", "Reads", "Writes", "Checks", "Finds", "Opens"}
SOON_REPLACED = ("lt_data/remote/",)
"""Sources that a scheduler or a library replaces; they keep their words until then."""


def documented(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """Return name, first line of the docstring, and whether it is a function (no property) of all that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                decorators = {ast.unparse(one) for one in getattr(node, "decorator_list", [])}
                is_property = any("property" in name or name.endswith(".setter") for name in decorators)
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property
                yield getattr(node, "name", "module"), text.splitlines()[0], is_function


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*")))
def test_docstrings_are_in_one_mood(package: str) -> None:
    """The first line of a function is imperative, of anything else a noun phrase; it asks nothing and is short."""
    found = []
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        if any(part in path.as_posix() for part in SOON_REPLACED):
            continue
        for name, line, is_function in documented(ast.parse(path.read_text(encoding="utf-8"))):
            word = line.split()[0].strip(".,:;")
            if word in QUESTION_WORDS or (is_function and word in NOT_IMPERATIVE) or len(line) > 100:
                found.append(f"{path.relative_to(ROOT)}: {name}: {line}")
    assert found == []
