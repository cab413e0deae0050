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
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lt_launch.errors import LaunchError
from lt_launch.job import check_env
from lt_model.home_folder import expand_home
from lt_trainer.config.recipe import read_toml
from lt_trainer.config.section import Given, PathText, Section, build, flatten, inside, option, suggest
from lt_trainer.errors import RecipeError

S = TypeVar("S", bound=Section)
TARGETS = {
    "local": "lt_launch.hosts:LocalTarget",
    "ssh": "lt_launch.hosts:SshTarget",
    "slurm": "lt_launch.slurm.target:SlurmTarget",
    "sagemaker": "lt_launch.sagemaker.target:SageMakerTarget",
    "k8s": "lt_launch.k8s.target:KubernetesTarget",
}
"""Class by name, as `module:class`; it is made without arguments. A profile has a table of each target's name."""


class Shared(Section):
    """Fields of a profile that every target reads."""

    python: PathText = option("", "interpreter on the nodes; it must have lt-trainer and the engine")
    setup: tuple[str, ...] = option((), "shell lines to run on a node before any command")
    env: dict[str, str] = option({}, "variables of every process; the job's variables take precedence")

    def check(self) -> None:
        """Refuse variables that are set by the launcher or look like secrets."""
        check_env("env", self.env)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Values of a profile by dotted name ("slurm.partition"), each with its source.

    Raises:
        RecipeError: a table or key is unknown; keys inside a target's table are checked by that target.
    """

    values: Mapping[str, Given] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = (*Shared.model_fields, *TARGETS)
        for name, given in self.values.items():
            head = name.partition(".")[0]
            if head not in known:
                near = suggest(head, known)
                hint = f"did you mean {near}? " if near else ""
                remedy = f"{hint}a profile has {', '.join(known)}"
                raise RecipeError(
                    "unknown field", values={name: given.value}, origins={name: given.source}, remedy=remedy
                )
        assert self._shared is not None

    @cached_property
    def _shared(self) -> Shared:
        own = {name: given for name, given in self.values.items() if name.partition(".")[0] in Shared.model_fields}
        return build(Shared, own)

    @property
    def python(self) -> str:
        """Interpreter on the nodes."""
        return self._shared.python or "python3"

    @property
    def setup(self) -> tuple[str, ...]:
        """Shell lines to run on a node before any command."""
        return self._shared.setup

    @property
    def env(self) -> dict[str, str]:
        """Variables of every process."""
        return self._shared.env

    @property
    def container_notes(self) -> tuple[str, ...]:
        """Notes for the user whose job runs in containers started by a service."""
        return ("setup of the profile is not run in containers; put it into the image",) if self.setup else ()

    def options(self, name: str, cls: type[S]) -> S:
        """Return the table `name` as the section of one target; missing keys take their defaults.

        Raises:
            RecipeError: unknown key, wrong type, or a value that the class rejects, with its source.
        """
        return build(cls, inside(self.values, name), name)

    def with_values(self, values: Mapping[str, Any], source: str) -> Profile:
        """Return the profile overridden by values by dotted name."""
        return Profile(values={**self.values, **{name: Given(value, source) for name, value in values.items()}})


def load_profile(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Profile:
    """Load the user's profile.

    Args:
        path: the file; None searches the default locations, and a missing file is no error.
        environ: environment variables.

    Raises:
        LaunchError: an explicitly named file is missing; RecipeError: it is not TOML, or a key is unknown.
    """
    explicit = path or expand_home(environ.get("LT_LAUNCH_PROFILE", ""))
    file = Path(explicit) if explicit else Path(environ.get("HOME", "/")) / ".config" / "lt" / "launch.toml"
    if file.exists():
        return Profile(values=read_values(file))
    if explicit:
        raise LaunchError(f"profile {str(file)!r}: no such file; give the path of a TOML file")
    return Profile()


def read_values(file: Path, prefix: str = "") -> dict[str, Given]:
    """Return the values of a TOML file by dotted name; the path of a hostfile in it is relative to the file.

    Args:
        file: profile or run file.
        prefix: what the names of a profile's values begin with in it.
    """
    given = {name: Given(value, str(file)) for name, value in flatten(read_toml(file)).items() if value != {}}
    hostfile = given.get(name := f"{prefix}ssh.hostfile")
    if hostfile is not None and isinstance(hostfile.value, str) and hostfile.value and hostfile.value[0] != "~":
        given[name] = Given(str(file.absolute().parent / hostfile.value), hostfile.source)
    return given
