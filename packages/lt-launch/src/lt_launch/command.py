"""Commands of `lt`, found by entry point, and their dispatch.

A package offers a command by an entry point in the group `lt.commands`: the name is the command, the object a
`typer.Typer`. The first word of a command line names it; it is imported and receives the rest. Reading the metadata
costs about 0.06 CPU-seconds, and no package is imported for it. This level is a few lines of its own instead of a
`typer` group: since 0.29 typer imports pydantic (0.1 CPU-seconds) as soon as one of its commands parses an option, even
its own `--help`. Help is plain text for the same reason: rich costs another 0.1 CPU-seconds.
"""

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, requires, version
from typing import Any

from lt_launch.errors import LaunchError

PACKAGES = ("lt-ckpt", "lt-data", "lt-launch", "lt-model", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron")
COMMANDS = {
    "ckpt": ("inspect, verify and export checkpoints", "lt-ckpt[cli]"),
    "data": ("text to token store, packs, statistics", "lt-data[cli]"),
    "launch": ("start, watch and finish runs here, over ssh, on Slurm, on SageMaker", "lt-launch"),
    "model": ("presets, shapes, parameters, costs", "lt-model[cli]"),
    "quickstart": ("a whole pre-training run on this machine", "lt-trainer[quickstart]"),
    "release": ("publish a run with all that made it, verify it", "lt-trainer[release]"),
    "train": ("train a model from a recipe", "lt-trainer[cli]"),
}
"""Help and what to install, by command of lt's own packages; another package's command shows its summary."""


def run_command(arguments: Sequence[str]) -> None:
    """Run one command line of `lt`; exceptions of the command, including SystemExit, propagate.

    Raises:
        LaunchError: no command of that name is installed, or an unknown option precedes it.
    """
    match list(arguments):
        case []:
            raise LaunchError(f"lt needs a command\n\n{help_text()}")
        case ["--help" | "-h", *_]:
            sys.stdout.write(help_text())
        case ["--version", *_]:
            sys.stdout.writelines(f"{name} {version}\n" for name, version in installed_packages().items())
        case [option, *_] if option.startswith("-"):
            raise LaunchError(f"lt {option}: no such option; see lt --help")
        case [name, *rest]:
            from typer.main import get_command

            command = get_command(find_command(name).load())
            _disable_rich_and_completion(command)
            command.main(args=rest, prog_name=f"lt {name}")


def installed_commands() -> dict[str, EntryPoint]:
    """Return the entry points of all installed commands by name, in alphabetical order."""
    return {entry.name: entry for entry in sorted(entry_points(group="lt.commands"), key=lambda entry: entry.name)}


def installed_packages() -> dict[str, str]:
    """Return the version of every installed lt package by name."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_command(name: str) -> EntryPoint:
    """Return the entry point of a command without importing it.

    Raises:
        LaunchError: no such command; the message names the package to install or similar commands.
    """
    installed = installed_commands()
    if name in installed:
        return installed[name]
    if name in COMMANDS:
        raise LaunchError(f"lt {name} is not installed here: pip install '{COMMANDS[name][1]}'")
    near = get_close_matches(name, {*installed, *COMMANDS}, n=1)
    hint = f"did you mean lt {near[0]}?" if near else "lt --help lists the commands"
    raise LaunchError(f"lt {name}: no such command; {hint}")


def help_text() -> str:
    """Return the text of `lt --help`, built from metadata alone."""
    rows = {
        name: COMMANDS[name][0] if name in COMMANDS else _package_summary(package_name(entry))
        for name, entry in installed_commands().items()
    }
    commands = "".join(f"  {name:<{max(map(len, rows))}}  {text}\n" for name, text in rows.items())
    return f"""Usage: lt COMMAND [ARGS]...

  Pre-train language models: text in, Hugging Face safetensors out.

Options:
  --version  show the installed packages of lt
  --help     show this message

Commands:
{commands or "  none is installed: pip install 'lt-trainer[quickstart]' lt-trainer-gpu"}
lt COMMAND --help says more about one of them.
"""


def _package_summary(package: str) -> str:
    return metadata(package)["Summary"] or f"a command of {package}, which has no summary"


def package_name(entry: EntryPoint) -> str:
    """Return the name of the package that provides an entry point."""
    assert entry.dist is not None, f"{entry.name} was not found through an installed package"
    return entry.dist.name


def extra_for(name: str, module: str) -> str:
    """Return the extra of a command's package that provides a module ("lt-model[torch]"), or ""."""
    package = package_name(installed_commands()[name])
    wanted = module.partition(".")[0].replace("_", "-").lower()
    for requirement in requires(package) or []:
        found = re.match(r"([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if found and found[1].replace("_", "-").lower() == wanted:
            return f"{package}[{found[2]}]"
    return ""


def _disable_rich_and_completion(command: Any) -> None:
    """Disable rich help and the completion options, which do not work below `lt`."""
    command.rich_markup_mode = None
    command.params = [param for param in command.params if param.name not in ("install_completion", "show_completion")]
    for subcommand in getattr(command, "commands", {}).values():
        _disable_rich_and_completion(subcommand)
