"""The frozen list of what users may rely on: Python names, commands with options, recipe fields, programs, extras.

There is one list for each package.

    python tools/api_surface.py                   # fails where packages/*/API.txt is not what the sources say
    python tools/api_surface.py --write           # writes the lists; look at the diff before you commit it
    python tools/api_surface.py --since lt-data-v0.1.0 lt-data    # breaks, additions and the next version they need

A change of a list is a change for users: it comes with a line in the package's changelog (tools/changelog.py sees to
that, since the sources changed too) and decides how far the next version must move (tools/release.py).

Python names come from the sources (tools/api_names.py); commands and recipe fields from the packages themselves, which
have to be installed: it is the command line that users see, not the code that makes it. A few seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from api_names import names
from members import ROOT, Member, ToolError, chosen, read
from surface_levels import bumped, compare, level_of

__all__ = ["changes_since", "command_lines", "field_lines", "frozen", "surface"]

FILE = "API.txt"
COMMANDS = "lt.commands"
HEADER = (
    "# What users of {name} may rely on. Written by tools/api_surface.py; a change of it belongs in CHANGELOG.md.\n"
)
RECIPES = {
    "lt-trainer": ("", "lt_trainer.recipe", "Recipe"),
    "lt-trainer-gpu": ("engine.gpu.", "lt_trainer_gpu.options", "GpuOptions"),
    "lt-trainer-neuron": ("engine.neuron.", "lt_trainer_neuron.options", "NeuronOptions"),
}
"""Prefix, module and class of the recipe fields that a package owns."""


def surface(member: Member) -> list[str]:
    """All lines of a package: names, then commands, then recipe fields, then what is installed by name."""
    installed = [f"extra {member.name}[{extra}]" for extra in sorted(member.extras)]
    installed += [f"program {script}" for script in sorted(member.scripts)]
    return [*names(member), *_commands(member), *_fields(member), *installed]


def frozen(text: str) -> list[str]:
    """The lines of a list that was written, without comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def changes_since(tag: str, member: Member, *, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Breaks and additions of the frozen list since a tag; nothing where the tag has no list yet.

    Raises:
        ToolError: there is no such tag.
    """
    path = f"packages/{member.name}/{FILE}"
    there = _git("ls-tree", "--name-only", tag, path, root=root).strip()
    before = frozen(_git("show", f"{tag}:{path}", root=root)) if there else []
    return compare(before, frozen((member.folder / FILE).read_text(encoding="utf-8"))) if there else ([], [])


def _commands(member: Member) -> Iterator[str]:
    """Commands with arguments and options, of the entry points that the package declares.

    The group `lt.commands` has those of `lt`, `lt.commands.train` those that are added to `lt train`.
    """
    for group, commands in sorted(member.entry_points.items()):
        if group != COMMANDS and not group.startswith(f"{COMMANDS}."):
            continue
        path = "/".join(["lt", *group.split(".")[2:]])
        for name, target in sorted(commands.items()):
            module, _, attribute = target.partition(":")
            app: Any = getattr(import_module(module), attribute)
            yield from command_lines(app, f"{path}/{name}")


def command_lines(app: Any, path: str) -> list[str]:
    """The lines of a typer app, or of a command, that is called by the words of `path`."""
    return sorted(set(_walk(_click(app), path)))


def _click(app: Any) -> Any:
    """The command object below a typer app, or what has that interface already."""
    import typer

    return typer.main.get_command(app) if isinstance(app, typer.Typer) else app


def _walk(command: Any, path: str) -> Iterator[str]:
    yield f"command {path}"
    for parameter in getattr(command, "params", ()):
        required = " required" if parameter.required else ""
        if parameter.param_type_name == "argument":
            yield f"argument {path}({parameter.name}){' many' if parameter.nargs == -1 else ''}{required}"
            continue
        kind = "flag" if getattr(parameter, "is_flag", False) else "many" if parameter.multiple else "value"
        default = getattr(parameter.default, "value", parameter.default)
        said = f" = {default}" if isinstance(default, str | int | float | Path) and kind == "value" else ""
        for option in (*parameter.opts, *parameter.secondary_opts):
            yield f"option {path}({option}) {kind}{said}{required}"
        described = getattr(parameter, "type_descriptor", None)  # None for an option that typer adds by itself
        for choice in sorted(_choices(getattr(described, "annotation", None))):
            yield f"choice {path}({parameter.opts[0]}) {choice}"
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(child, f"{path}/{name}")


def _choices(annotation: Any) -> set[str]:
    """The values that an annotation allows, where it names them: literals and enumerations, also `X | None`."""
    if get_origin(annotation) is Literal:
        return {str(value) for value in get_args(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {str(one.value) for one in annotation}
    return {value for part in get_args(annotation) for value in _choices(part)}


def _fields(member: Member) -> Iterator[str]:
    """Recipe fields with type and default, and the upper-case name where a field has one."""
    if member.name not in RECIPES:
        return
    from lt_trainer.fields import leaves

    prefix, module, owner = RECIPES[member.name]
    yield from field_lines(leaves(getattr(import_module(module), owner)).values(), prefix)


def field_lines(leaves: Iterable[Any], prefix: str = "") -> list[str]:
    """The lines of recipe fields (`lt_trainer.fields.Leaf`)."""
    return [f"recipe {prefix}{leaf.name} = {leaf.default!r}{f' {leaf.hp}' if leaf.hp else ''}" for leaf in leaves]


def _git(*arguments: str, root: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _check(member: Member, *, write: bool) -> list[str]:
    path, now = member.folder / FILE, surface(member)
    before = frozen(path.read_text(encoding="utf-8")) if path.is_file() else []
    if write:
        path.write_text(HEADER.format(name=member.name) + "\n".join(now) + "\n", encoding="utf-8")
        return []
    breaks, added = compare(before, now)
    return [f"{member.name}: {line}" for line in [*breaks, *added]]


def main(arguments: list[str]) -> int:
    """Check, write or compare the lists; returns 1 if one is not what the sources say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="all by default")
    parser.add_argument("--write", action="store_true", help="write what the sources say")
    parser.add_argument("--since", metavar="TAG", help="print what changed since a tag, for one package")
    options = parser.parse_args(arguments)
    members: Mapping[str, Member] = read()
    picked = [chosen(members, name) for name in options.packages or members]
    if options.since:
        if len(picked) != 1:
            parser.error("--since takes one package")
        breaks, added = changes_since(options.since, picked[0])
        version = picked[0].version
        print(
            "\n".join([*breaks, *added, f"next version: {bumped(version, level_of(breaks, added, version=version))}"])
        )
        return 0
    found = [line for member in picked for line in _check(member, write=options.write)]
    if found:
        print("\n".join([*found, "run tools/api_surface.py --write and say it in the package's CHANGELOG.md"]))
    return bool(found)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"api_surface: {exc}")
