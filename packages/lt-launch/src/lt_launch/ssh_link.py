"""How a host is reached over ssh: the profile's table, the hosts, and the command lines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lt_launch.boot import BOOT
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host, parse, read
from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["SshOptions", "SshTransport", "hosts_of"]


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The table [ssh] of a profile."""

    hostfile: str = option("", "path of a hostfile")
    hosts: tuple[str, ...] = option((), "lines of a hostfile, in place of one")
    options: tuple[str, ...] = option((), 'more words for the ssh command, such as ["-i", "~/key"]')
    connect_timeout_s: float = option(30.0, "until every host must have answered", unit="s")
    link_timeout_s: float = option(5.0, "of silence after which a host, or the launcher, counts as lost", unit="s")
    lost_grace_s: float = option(3.0, "from the loss of the launcher until processes are killed", unit="s")

    def __post_init__(self) -> None:
        check_types(self, "ssh")
        if self.hostfile and self.hosts:
            raise RecipeError(
                "hosts stand in two places",
                values={"ssh.hostfile": self.hostfile, "ssh.hosts": list(self.hosts)},
                remedy="keep one of them",
            )
        if self.connect_timeout_s < 1 or self.link_timeout_s < 2 or self.lost_grace_s < 0:
            raise RecipeError(
                "too short to tell a slow answer from a lost host",
                values={"ssh.connect_timeout_s": self.connect_timeout_s, "ssh.link_timeout_s": self.link_timeout_s},
                remedy="use at least 1 and 2 seconds",
            )


def hosts_of(options: SshOptions) -> tuple[Host, ...]:
    """The hosts of a profile.

    Raises:
        LaunchError: there are none, or a line cannot be read.
    """
    if options.hosts:
        return parse("\n".join(options.hosts), "ssh.hosts")
    if not options.hostfile:
        raise LaunchError("the target ssh needs hosts: give --hostfile FILE, or [ssh] hostfile in the profile")
    return read(options.hostfile)


class SshTransport:
    """Agents at the end of ssh connections."""

    carries_files = True
    memory_gib = math.inf

    def __init__(self, options: SshOptions, python: str) -> None:
        self.link_timeout_s, self.connect_timeout_s = options.link_timeout_s, options.connect_timeout_s
        self._options, self.python = options, python

    def argv(self, host: Host) -> list[str]:
        """Ssh without a terminal, a password or a question; `boot` at its end."""
        return self.ssh(host, [self.python, "-c", BOOT])

    def places(self, host: Host) -> int:
        """The slots that the hostfile gives it; a host that says nothing runs one stage at a time."""
        return host.slots or 1

    def ssh(self, host: Host, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={round(self.connect_timeout_s)}"]
        words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", *self._options.options]
        words += ["-p", str(host.port)] if host.port else []
        words += ["-l", host.user] if host.user else []
        return [*words, host.address, shlex.join(command)]
