"""Frozen lists of what users may rely on: Python names, commands with options, recipe fields, programs, extras.

There is one list per package.

    python tools/api_surface.py                   # fails where packages/*/API.txt does not match the sources
    python tools/api_surface.py --write           # writes the lists; review the diff before you commit it
    python tools/api_surface.py --since lt-data-v0.1.0 lt-data    # breaks, additions and the next version they need

A changed list is a change for users: it needs a line in the package's changelog (tools/changelog.py checks that, since
the sources changed too) and decides how far the next version must move (tools/release.py).

Python names come from the sources (tools/api_names.py); commands and recipe fields from the installed packages, because
users see the command line and not the code that builds it. A few seconds.
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

from api_names import public_names
from members import ROOT, Member, ToolError, get_member, read_members
from version_bump import bump_version, diff_api, required_bump

__all__ = ["api_lines", "command_lines", "diff_since_tag", "field_lines", "parse_api_file"]

API_FILE = "API.txt"
ENTRY_POINT_GROUP = "lt.commands"
HEADER = "# Public API of {name}, written by tools/api_surface.py; a change of it belongs in CHANGELOG.md.\n"
RECIPE_SCHEMAS = {
    "lt-trainer": ("", "lt_trainer.config.recipe", "Recipe"),
    "lt-trainer-gpu": ("engine.gpu.", "lt_trainer_gpu.options", "GpuOptions"),
    "lt-trainer-neuron": ("engine.neuron.", "lt_trainer_neuron.options", "NeuronOptions"),
}
"""Prefix, module and class of the recipe fields that a package owns."""


def api_lines(member: Member) -> list[str]:
    """Return all lines of a package: names, commands, recipe fields, extras and programs."""
    installed = [f"extra {member.name}[{extra}]" for extra in sorted(member.extras)]
    installed += [f"program {script}" for script in sorted(member.scripts)]
    return [*public_names(member), *_command_lines(member), *_recipe_field_lines(member), *installed]


def parse_api_file(text: str) -> list[str]:
    """Return the lines of a written list, without comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def diff_since_tag(tag: str, member: Member, *, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return breaks and additions of the frozen list since a tag; nothing if the tag has no list.

    Raises:
        ToolError: there is no such tag.
    """
    path = f"packages/{member.name}/{API_FILE}"
    exists = _git("ls-tree", "--name-only", tag, path, root=root).strip()
    before = parse_api_file(_git("show", f"{tag}:{path}", root=root)) if exists else []
    return (
        diff_api(before, parse_api_file((member.folder / API_FILE).read_text(encoding="utf-8"))) if exists else ([], [])
    )


def _command_lines(member: Member) -> Iterator[str]:
    """Yield the commands, arguments and options of the entry points that the package declares.

    The group `lt.commands` has the commands of `lt`, `lt.commands.train` those added to `lt train`.
    """
    for group, commands in sorted(member.entry_points.items()):
        if group != ENTRY_POINT_GROUP and not group.startswith(f"{ENTRY_POINT_GROUP}."):
            continue
        path = "/".join(["lt", *group.split(".")[2:]])
        for name, target in sorted(commands.items()):
            module, _, attribute = target.partition(":")
            app: Any = getattr(import_module(module), attribute)
            yield from command_lines(app, f"{path}/{name}")


def command_lines(app: Any, path: str) -> list[str]:
    """Return the lines of a typer app or command that is called by the words of `path`."""
    return sorted(set(_walk_commands(_click_command(app), path)))


def _click_command(app: Any) -> Any:
    """Return the click command of a typer app; any other object unchanged."""
    import typer

    return typer.main.get_command(app) if isinstance(app, typer.Typer) else app


def _walk_commands(command: Any, path: str) -> Iterator[str]:
    yield f"command {path}"
    for parameter in getattr(command, "params", ()):
        required = " required" if parameter.required else ""
        if parameter.param_type_name == "argument":
            yield f"argument {path}({parameter.name}){' many' if parameter.nargs == -1 else ''}{required}"
            continue
        kind = "flag" if getattr(parameter, "is_flag", False) else "many" if parameter.multiple else "value"
        default = getattr(parameter.default, "value", parameter.default)
        shown = f" = {default}" if isinstance(default, str | int | float | Path) and kind == "value" else ""
        for option in (*parameter.opts, *parameter.secondary_opts):
            yield f"option {path}({option}) {kind}{shown}{required}"
        descriptor = getattr(parameter, "type_descriptor", None)  # None for an option that typer adds by itself
        for choice in sorted(_choices(getattr(descriptor, "annotation", None))):
            yield f"choice {path}({parameter.opts[0]}) {choice}"
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _walk_commands(child, f"{path}/{name}")


def _choices(annotation: Any) -> set[str]:
    """Return the values that an annotation allows: literals and enumerations, also in `X | None`."""
    if get_origin(annotation) is Literal:
        return {str(value) for value in get_args(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {str(one.value) for one in annotation}
    return {value for part in get_args(annotation) for value in _choices(part)}


def _recipe_field_lines(member: Member) -> Iterator[str]:
    """Yield the recipe fields with default and upper-case name, if any."""
    if member.name not in RECIPE_SCHEMAS:
        return
    from lt_trainer.config import leaves

    prefix, module, owner = RECIPE_SCHEMAS[member.name]
    yield from field_lines(leaves(getattr(import_module(module), owner)).values(), prefix)


def field_lines(leaves: Iterable[Any], prefix: str = "") -> list[str]:
    """Return the lines of recipe fields (`lt_trainer.config.fields.Leaf`)."""
    return [
        f"recipe {prefix}{leaf.name} = {leaf.default!r}{f' {leaf.hyperparameter}' if leaf.hyperparameter else ''}"
        for leaf in leaves
    ]


def _git(*arguments: str, root: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _check(member: Member, *, write: bool) -> list[str]:
    path, now = member.folder / API_FILE, api_lines(member)
    before = parse_api_file(path.read_text(encoding="utf-8")) if path.is_file() else []
    if write:
        path.write_text(HEADER.format(name=member.name) + "\n".join(now) + "\n", encoding="utf-8")
        return []
    breaks, added = diff_api(before, now)
    return [f"{member.name}: {line}" for line in [*breaks, *added]]


def main(arguments: list[str]) -> int:
    """Check, write or compare the lists; return 1 if one does not match the sources."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="all by default")
    parser.add_argument("--write", action="store_true", help="write the lists")
    parser.add_argument("--since", metavar="TAG", help="print what changed since a tag, for one package")
    options = parser.parse_args(arguments)
    members: Mapping[str, Member] = read_members()
    picked = [get_member(members, name) for name in options.packages or members]
    if options.since:
        if len(picked) != 1:
            parser.error("--since takes one package")
        breaks, added = diff_since_tag(options.since, picked[0])
        version = picked[0].version
        print(
            "\n".join(
                [
                    *breaks,
                    *added,
                    f"next version: {bump_version(version, required_bump(breaks, added, version=version))}",
                ]
            )
        )
        return 0
    found = [line for member in picked for line in _check(member, write=options.write)]
    if found:
        print("\n".join([*found, "run tools/api_surface.py --write and add a line to the package's CHANGELOG.md"]))
    return bool(found)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"api_surface: {exc}")
