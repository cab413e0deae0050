"""Transport over ssh: options of the profile, hosts, and command lines."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import model_validator

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host, parse_hostfile, read_hostfile
from lt_launch.policy import Place
from lt_launch.ssh_connection import BOOT, SAFE_PATH, SshConnection
from lt_trainer.config.section import Section, option

__all__ = ["SshOptions", "SshTransport", "resolve_hosts"]


class SshOptions(Section, table="ssh"):
    """Options in the table [ssh] of a profile."""

    hostfile: str = option("", "path of a hostfile")
    hosts: tuple[str, ...] = option((), "lines of a hostfile, in place of a file")
    ssh_args: tuple[str, ...] = option((), 'extra arguments of the ssh command, such as ["-i", "~/key"]')
    connect_timeout_s: float = option(30.0, "time within which every host must answer", unit="s", ge=1)
    link_timeout_s: float = option(5.0, "silence after which a host or the launcher counts as lost", unit="s", ge=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hostfile and self.hosts:
            raise self.wrong("hostfile hosts", "hosts are given twice", "keep one of them")
        return self


def resolve_hosts(options: SshOptions) -> tuple[Host, ...]:
    """Return the hosts of a profile.

    Raises:
        LaunchError: there are none, or a line is invalid.
    """
    if options.hosts:
        return parse_hostfile("\n".join(options.hosts), "ssh.hosts")
    if not options.hostfile:
        raise LaunchError("the target ssh needs hosts: give --hostfile FILE, or [ssh] hostfile in the profile")
    return read_hostfile(options.hostfile)


class SshTransport:
    """Transport over one ssh connection per host and attempt."""

    memory_gib = math.inf

    def __init__(self, options: SshOptions, python: str) -> None:
        self.link_timeout_s, self.connect_timeout_s = options.link_timeout_s, options.connect_timeout_s
        self._options, self.python = options, python

    def argv(self, host: Host) -> list[str]:
        """Return the ssh command that starts `boot`, without terminal, password or prompt."""
        return self.ssh_argv(host, [self.python, "-c", SAFE_PATH + BOOT])

    def address(self, host: Host) -> str:
        """Return the host's address."""
        return host.address

    def open_node(self, host: Host, spec: Mapping[str, Any], place: Place, files: Mapping[str, str]) -> SshConnection:
        """Connect to a host."""
        launch = str(place.folder.parent.parent)
        return SshConnection(
            host.name, self.argv(host), spec, launch=launch, files=files, link_timeout_s=self.link_timeout_s
        )

    def slots(self, host: Host) -> int:
        """Return the host's slots in the hostfile; a host without slots runs one stage at a time."""
        return host.slots or 1

    def ssh_argv(self, host: Host, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={round(self.connect_timeout_s)}"]
        words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", *self._options.ssh_args]
        words += ["-p", str(host.port)] if host.port else []
        words += ["-l", host.user] if host.user else []
        return [*words, host.address, shlex.join(command)]
