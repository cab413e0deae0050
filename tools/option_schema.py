"""All options of lt: every field of the recipe and of the engines, every option of every `lt` command.

Fields come from the dataclasses, options from the installed typer apps. A few seconds, without torch.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from members import read_members
from recipe_page import ENGINES, ENTRIES

from lt_trainer import Recipe
from lt_trainer.config import leaves, named_section_tables

__all__ = ["Option", "command_options", "read_options", "recipe_options"]

ENTRY_POINT_GROUP = "lt.commands"
OF_TYPER = ("help", "install_completion", "show_completion")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Option that a user may set.

    Attributes:
        name: Dotted name of a field ("optimizer.eps"), or command and flag ("lt data pack --mode").
        group: Section of the recipe, or command.
        help: Meaning, as `--help` or the recipe's reference has it.
        default: The value without it, as text.
        is_required: True for an option that a command cannot do without.
        plant: Object for LT_IGNORED_OPTION, which makes it ignored.
    """

    name: str
    group: str
    help: str
    default: str
    is_required: bool = False
    plant: dict[str, Any]

    def ignored(self, instead: Any = None) -> str:
        """Return the text of LT_IGNORED_OPTION; `instead` is the value of a required option."""
        return json.dumps(self.plant if instead is None else {**self.plant, "instead": instead})


def read_options() -> list[Option]:
    """Return all options: fields in the recipe's order, then commands by name."""
    return [*recipe_options(), *command_options()]


def recipe_options() -> list[Option]:
    """Return the fields of the recipe, of its named sections and of the engines."""
    found = list(_fields(Recipe, ""))
    for table, cls in named_section_tables(Recipe).items():
        found += _fields(cls, f"{table}.{ENTRIES[table]}.")
    for prefix, cls in ENGINES.items():
        found += _fields(cls, f"{prefix}.")
    order = list(dict.fromkeys(option.group for option in found))
    return sorted(found, key=lambda option: order.index(option.group))


def _fields(cls: type, prefix: str) -> Iterator[Option]:
    schema, hints = leaves(cls, prefix), typing.get_type_hints(cls)
    for item in fields(cls):
        dotted = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from _fields(hints[item.name], f"{dotted}.")
        elif dotted in schema:
            parts = dotted.split(".")
            yield Option(
                name=dotted,
                group=".".join(parts[:2] if parts[0] == "engine" else parts[:1]),
                help=schema[dotted].help,
                default=repr(item.default),
                plant={"kind": "field", "module": cls.__module__, "class": cls.__name__, "name": item.name},
            )


def command_options() -> list[Option]:
    """Return the options of all commands; `--help` is typer's own."""
    import typer

    found: list[Option] = []
    for member in read_members().values():
        for group, commands in sorted(member.entry_points.items()):
            if group == ENTRY_POINT_GROUP or group.startswith(f"{ENTRY_POINT_GROUP}."):
                path = " ".join(["lt", *group.split(".")[2:]])
                for name, target in sorted(commands.items()):
                    module, _, attribute = target.partition(":")
                    app: Any = getattr(import_module(module), attribute)
                    command = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
                    found += _parameters(command, f"{path} {name}")
    return sorted(found, key=lambda option: option.name.partition(" --")[0])


def _parameters(command: Any, path: str) -> Iterator[Option]:
    for parameter in getattr(command, "params", ()):
        if parameter.param_type_name == "argument" or parameter.name in (
            "help",
            "install_completion",
            "show_completion",
        ):
            continue
        default = getattr(parameter.default, "value", parameter.default)
        flag = max(parameter.opts, key=len)
        yield Option(
            name=f"{path} {flag}",
            group=path,
            help=parameter.help or "",
            default="" if default is None or callable(default) else repr(default),
            is_required=parameter.required,
            plant={
                "kind": "parameter",
                "module": command.callback.__module__,
                "function": command.callback.__name__,
                "name": parameter.name,
            },
        )
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _parameters(child, f"{path} {name}")
