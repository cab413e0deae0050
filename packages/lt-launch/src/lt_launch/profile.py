"""Facts about the machines of a person, which no job should have to repeat: a profile.

A profile is a TOML file: `--profile FILE`, else the file that LT_LAUNCH_PROFILE names, else ~/.config/lt/launch.toml
where that exists. A run file may hold the same tables below `[profile]`; they win, table by table and key by key.

    python = "/shared/venv/bin/python"      # on the nodes
    setup = ["source /etc/profile.d/modules.sh"]
    [env]
    NCCL_DEBUG = "WARN"
    [ssh]                                   # one table for each target, known to that target's backend alone
    hostfile = "hosts.txt"
    [slurm]
    partition = "train"
    [prices]
    file = "prices.toml"

A backend reads its own table with `Profile.options(name, Class)`, where Class is a frozen dataclass made of
`lt_trainer.fields.option` fields: unknown keys and wrong types are errors that name file, line and remedy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lt_launch.errors import LaunchError
from lt_launch.job import check_env, check_lines
from lt_launch.targets import BACKENDS
from lt_trainer.errors import RecipeError
from lt_trainer.fields import build, leaves, suggest
from lt_trainer.resolve import Given, from_toml, typed

__all__ = ["Profile", "load_profile"]

T = TypeVar("T")
VARIABLE = "LT_LAUNCH_PROFILE"
PLAIN = ("python", "setup")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile as it was read: values by dotted name, each with its source, typed when a backend asks for them."""

    given: Mapping[str, Given] = field(default_factory=dict)
    """By dotted name ("slurm.partition")."""

    @property
    def python(self) -> str:
        """The interpreter on the nodes; it must have lt-trainer and the engine."""
        return self.python_or("python3")

    def python_or(self, default: str) -> str:
        """The interpreter that the profile names, else `default`."""
        value = self._plain("python", default)
        if not isinstance(value, str) or not value:
            raise self._wrong("python", "expected text", 'write python = "/path/to/python"')
        return value

    @property
    def setup(self) -> tuple[str, ...]:
        """Lines of bash to run on a node before anything else."""
        value = self._plain("setup", [])
        if not isinstance(value, list | tuple) or not all(isinstance(line, str) for line in value):
            raise self._wrong("setup", "expected a list of lines", 'write setup = ["module load cuda"]')
        check_lines("setup", value)
        return tuple(value)

    @property
    def left_out_of_containers(self) -> tuple[str, ...]:
        """What a person should know whose job runs in containers that a service starts."""
        note = "setup of the profile is not run: what a container needs belongs into its image"
        return (note,) if self.setup else ()

    @property
    def env(self) -> dict[str, str]:
        """Variables for every process; those of the job win."""
        found = self.table("env", of_text=True)
        check_env("env", found)
        return found

    def table(self, name: str, *, of_text: bool = False) -> dict[str, Any]:
        """A table with keys that a person chooses (env, prices), by key."""
        prefix = f"{name}."
        found = {key[len(prefix) :]: given.value for key, given in self.given.items() if key.startswith(prefix)}
        for key, value in found.items():
            if of_text and not isinstance(value, str):
                raise self._wrong(f"{name}.{key}", "expected text", "put it in quotes")
        return found

    def options(self, name: str, cls: type[T]) -> T:
        """The table `name` as a dataclass of one backend; what is missing takes its default.

        Raises:
            RecipeError: unknown key, wrong type, or a value that the class refuses, with its source.
        """
        prefix = f"{name}."
        assignments = {key: given for key, given in self.given.items() if key.startswith(prefix)}
        values = typed(assignments, leaves(cls, prefix))
        try:
            return build(cls, values, prefix)
        except RecipeError as exc:
            raise exc.located({key: given.source for key, given in assignments.items()}) from None

    def with_values(self, values: Mapping[str, Any], source: str) -> Profile:
        """The profile with more values by dotted name, which win."""
        return Profile(given={**self.given, **{name: Given(value, source) for name, value in values.items()}})

    def over(self, given: Mapping[str, Given]) -> Profile:
        """The profile with values of a run file, which win."""
        return Profile(given={**self.given, **given})

    def with_hostfile(self, path: Path | None) -> Profile:
        """The profile with the hosts of a hostfile in place of its own; unchanged without one."""
        if path is None:
            return self
        others = {name: given for name, given in self.given.items() if name != "ssh.hosts"}
        return Profile(given=others).with_values({"ssh.hostfile": str(path)}, "--hostfile")

    def as_table(self) -> dict[str, Any]:
        """Values by dotted name, for JSON."""
        return {name: given.value for name, given in self.given.items()}

    def _plain(self, name: str, default: Any) -> Any:
        return self.given[name].value if name in self.given else default

    def _wrong(self, name: str, problem: str, remedy: str) -> RecipeError:
        given = self.given[name]
        return RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)


def load_profile(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Profile:
    """Read the person's profile.

    Args:
        path: the file; None looks for it where the module says, and finding none is fine.
        environ: by default this process's.

    Raises:
        LaunchError: a file that was asked for is not there, or a key belongs nowhere; RecipeError: it is not TOML.
    """
    environ = os.environ if environ is None else environ
    asked = path or environ.get(VARIABLE, "")
    file = Path(asked) if asked else Path(environ.get("HOME", "/")) / ".config" / "lt" / "launch.toml"
    if not file.exists():
        if asked:
            raise LaunchError(f"profile {str(file)!r}: there is no such file; give the path of a TOML file")
        return Profile()
    given = from_toml(file)
    check_names(given)
    return Profile(given=given)


def check_names(given: Mapping[str, Given]) -> None:
    """Refuse names that no table of a profile has; what stands inside a backend's table that backend checks."""
    tables = {backend.profile_table for backend in BACKENDS.values()} - {""} | {"env", "prices"}
    for name, value in given.items():
        head, dot, _ = name.partition(".")
        if (head in PLAIN and not dot) or (head in tables and (dot or value.value == {})):
            continue
        near = suggest(head, (*PLAIN, *tables))
        meant = f"did you mean {near}? " if near else ""
        remedy = f"{meant}a profile holds {', '.join(PLAIN)} and the tables {', '.join(sorted(tables))}"
        raise RecipeError("unknown field", values={name: value.value}, origins={name: value.source}, remedy=remedy)
