"""Profile: facts about a user's machines, shared by all jobs.

A profile is a TOML file: `--profile FILE`, else the file that LT_LAUNCH_PROFILE names, else ~/.config/lt/launch.toml
if it exists. A run file may have the same tables below `[profile]`; they override the profile key by key.

    python = "/shared/venv/bin/python"      # on the nodes
    setup = ["source /etc/profile.d/modules.sh"]
    [env]
    NCCL_DEBUG = "WARN"
    [ssh]                                   # one table per target, read by that target alone
    hostfile = "hosts.txt"
    [slurm]
    partition = "train"

A target reads its own table with `Profile.options(name, Class)`, where Class is a section
(`lt_trainer.config.section`): unknown keys and wrong types are errors that name field and file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lt_launch.errors import LaunchError
from lt_launch.job import check_env
from lt_launch.target_registry import TARGETS
from lt_trainer.config.recipe import read_toml
from lt_trainer.config.section import Given, Section, build, flatten, suggest
from lt_trainer.errors import RecipeError

S = TypeVar("S", bound=Section)
PROFILE_VARIABLE = "LT_LAUNCH_PROFILE"
TOP_LEVEL_KEYS = ("python", "setup")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Values of a profile by dotted name, each with its source; a target converts them to typed options."""

    values: Mapping[str, Given] = field(default_factory=dict)
    """By dotted name ("slurm.partition")."""

    @property
    def python(self) -> str:
        """Interpreter on the nodes; it must have lt-trainer and the engine."""
        return self.get_python("python3")

    def get_python(self, default: str) -> str:
        """Return the interpreter of the profile, else `default`."""
        value = self._top_level_value("python", default)
        if not isinstance(value, str) or not value:
            raise self._field_error("python", "expected text", 'write python = "/path/to/python"')
        return value

    @property
    def setup(self) -> tuple[str, ...]:
        """Shell lines to run on a node before any command."""
        value = self._top_level_value("setup", [])
        if not isinstance(value, list | tuple) or not all(isinstance(line, str) for line in value):
            raise self._field_error("setup", "expected a list of lines", 'write setup = ["module load cuda"]')
        return tuple(value)

    @property
    def container_notes(self) -> tuple[str, ...]:
        """Notes for the user whose job runs in containers started by a service."""
        note = "setup of the profile is not run in containers; put it into the image"
        return (note,) if self.setup else ()

    @property
    def env(self) -> dict[str, str]:
        """Variables of every process; the job's variables take precedence."""
        variables = self.table("env", text_only=True)
        check_env("env", variables)
        return variables

    def table(self, name: str, *, text_only: bool = False) -> dict[str, Any]:
        """Return a table with user-defined keys (env)."""
        prefix = f"{name}."
        values = {key[len(prefix) :]: given.value for key, given in self.values.items() if key.startswith(prefix)}
        for key, value in values.items():
            if text_only and not isinstance(value, str):
                raise self._field_error(f"{name}.{key}", "expected text", "put it in quotes")
        return values

    def options(self, name: str, cls: type[S]) -> S:
        """Return the table `name` as the section of one target; missing keys take their defaults.

        Raises:
            RecipeError: unknown key, wrong type, or a value that the class rejects, with its source.
        """
        prefix = f"{name}."
        return build(cls, {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}, name)

    def with_values(self, values: Mapping[str, Any], source: str) -> Profile:
        """Return the profile overridden by values by dotted name."""
        return Profile(values={**self.values, **{name: Given(value, source) for name, value in values.items()}})

    def with_overrides(self, given: Mapping[str, Given]) -> Profile:
        """Return the profile overridden by values of a run file."""
        return Profile(values={**self.values, **given})

    def with_hostfile(self, path: Path | None) -> Profile:
        """Return the profile with the hosts of a hostfile; without one, the profile unchanged."""
        if path is None:
            return self
        others = {name: given for name, given in self.values.items() if name != "ssh.hosts"}
        return Profile(values=others).with_values({"ssh.hostfile": str(path)}, "--hostfile")

    def to_dict(self) -> dict[str, Any]:
        """Return the values by dotted name, for JSON."""
        return {name: given.value for name, given in self.values.items()}

    def _top_level_value(self, name: str, default: Any) -> Any:
        return self.values[name].value if name in self.values else default

    def _field_error(self, name: str, problem: str, remedy: str) -> RecipeError:
        given = self.values[name]
        return RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)


def load_profile(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Profile:
    """Load the user's profile.

    Args:
        path: the file; None searches the default locations, and a missing file is no error.
        environ: environment variables; default: those of this process.

    Raises:
        LaunchError: an explicitly named file is missing, or a key is unknown; RecipeError: it is not TOML.
    """
    environ = os.environ if environ is None else environ
    explicit = path or environ.get(PROFILE_VARIABLE, "")
    file = Path(explicit) if explicit else Path(environ.get("HOME", "/")) / ".config" / "lt" / "launch.toml"
    if not file.exists():
        if explicit:
            raise LaunchError(f"profile {str(file)!r}: no such file; give the path of a TOML file")
        return Profile()
    given = read_values(file)
    check_profile_keys(given)
    return Profile(values=given)


def read_values(file: Path, prefix: str = "") -> dict[str, Given]:
    """Return the values of a TOML file by dotted name; the path of a hostfile in it is relative to the file.

    Args:
        file: profile or run file.
        prefix: what the names of a profile's values begin with in it.
    """
    given = {name: Given(value, str(file)) for name, value in flatten(read_toml(file)).items()}
    hostfile = given.get(name := f"{prefix}ssh.hostfile")
    if hostfile is not None and isinstance(hostfile.value, str) and hostfile.value:
        given[name] = Given(str(file.absolute().parent / hostfile.value), hostfile.source)
    return given


def check_profile_keys(given: Mapping[str, Given]) -> None:
    """Reject unknown tables and keys; keys inside a target's table are checked by that target."""
    tables = {*TARGETS, "env"}
    for name, value in given.items():
        head, dot, _ = name.partition(".")
        if (head in TOP_LEVEL_KEYS and not dot) or (head in tables and (dot or value.value == {})):
            continue
        near = suggest(head, (*TOP_LEVEL_KEYS, *tables))
        hint = f"did you mean {near}? " if near else ""
        remedy = f"{hint}a profile has {', '.join(TOP_LEVEL_KEYS)} and the tables {', '.join(sorted(tables))}"
        raise RecipeError("unknown field", values={name: value.value}, origins={name: value.source}, remedy=remedy)
