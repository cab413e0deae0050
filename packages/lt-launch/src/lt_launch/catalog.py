"""Which commands there are, read from the metadata of the installed packages without importing any of them.

A package offers a command by an entry point in the group `lt.commands`: the name is the command, the object a
`typer.Typer`. Reading the metadata costs about 0.06 CPU-seconds, however many commands there are.
"""

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version

__all__ = [
    "COMMANDS",
    "GROUP",
    "PACKAGES",
    "KnownCommand",
    "extra_for",
    "installed_commands",
    "installed_packages",
    "package_of",
    "summary",
]

GROUP = "lt.commands"

PACKAGES = ("lt-ckpt", "lt-data", "lt-launch", "lt-model", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron")


@dataclass(frozen=True)
class KnownCommand:
    """A command of lt: what it is for, and what to install to have it."""

    help: str
    install: str


COMMANDS = {
    "ckpt": KnownCommand("inspect, verify and export checkpoints", "lt-ckpt[cli]"),
    "data": KnownCommand("text to token store, packs, statistics", "lt-data[cli]"),
    "launch": KnownCommand("start, watch and finish runs here, over ssh, on Slurm, on SageMaker", "lt-launch"),
    "model": KnownCommand("presets, shapes, parameters, costs", "lt-model[cli]"),
    "quickstart": KnownCommand("a whole pre-training run on this machine", "lt-trainer[quickstart]"),
    "train": KnownCommand("train a model from a recipe", "lt-trainer[cli]"),
}
"""The commands of lt's own packages; those of others are described by their package's summary."""


def installed_commands() -> dict[str, EntryPoint]:
    """The entry point of every command that an installed package offers, by name, in alphabetical order."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        found.setdefault(entry.name, entry)
    return found


def installed_packages() -> dict[str, str]:
    """The version of every installed package of lt, by name."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def package_of(entry: EntryPoint) -> str:
    """The name of the package that offers an entry point."""
    assert entry.dist is not None, f"{entry.name} was not found through an installed package"
    return entry.dist.name


def summary(entry: EntryPoint) -> str:
    """One line about a command."""
    if entry.name in COMMANDS:
        return COMMANDS[entry.name].help
    assert entry.dist is not None, f"{entry.name} was not found through an installed package"
    return entry.dist.metadata["Summary"] or f"from {entry.dist.name}"


def extra_for(package: str, module: str) -> str:
    """The extra of `package` that brings `module` ("lt-model[torch]"), or "" when no extra does."""
    wanted = module.partition(".")[0].replace("_", "-").lower()
    for requirement in requires(package) or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if name and extra and name[0].replace("_", "-").lower() == wanted:
            return f"{package}[{extra[1]}]"
    return ""
