"""Hosts reached over ssh, read from a hostfile.

    # comment
    node1
    node2 slots=8 port=2222 user=ubuntu addr=10.0.0.2 env.NCCL_DEBUG=INFO

One host per line, in rank order: names are never sorted, since text order puts node10 before node2. `slots` is the
number of devices; `addr` is the address for ssh and for the other hosts where the name does not resolve. Hosts without
slots use `--nproc-per-node`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.job import check_env

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")
GRAMMAR = "write lines of 'host [slots=N] [port=P] [user=U] [addr=A] [env.NAME=VALUE]'"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a hostfile."""

    name: str
    slots: int = 0
    """Devices; 0 = unknown."""
    port: int = 0
    user: str = ""
    addr: str = ""
    """Address to connect to; empty = the name."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Address to connect to."""
        return self.addr or self.name


def parse_hostfile(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Return the hosts of a hostfile in the order of their lines.

    Raises:
        LaunchError: an invalid line, a duplicate host, or no host at all; names the line number.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        location = f"{source}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as exc:
            raise LaunchError(f"{location}: {line.strip()!r}: {exc}; {GRAMMAR}") from exc
        if words:
            host = _parse_host(words, location)
            if any(host.name == other.name for other in hosts):
                raise LaunchError(f"{location}: {host.name} is listed twice; give it one line, with slots=N")
            hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source}: no host in it; {GRAMMAR}")
    return tuple(hosts)


def _parse_host(words: Sequence[str], location: str) -> Host:
    name, *settings = words
    if not NAME.fullmatch(name):
        raise LaunchError(f"{location}: {name!r} is not a host name; {GRAMMAR}")
    numbers = {"slots": 0, "port": 0}
    texts = {"user": "", "addr": ""}
    env: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key.startswith("env.") and equals:
            env[key[4:]] = value
        elif key in numbers and value.isdecimal() and 0 < int(value) < (65536 if key == "port" else 1 << 20):
            numbers[key] = int(value)
        elif key in texts and NAME.fullmatch(value):
            texts[key] = value
        else:
            raise LaunchError(f"{location}: {setting!r} of {name} is invalid; {GRAMMAR}")
    check_env(f"{location}: env", env)
    return Host(
        name=name, env=env, slots=numbers["slots"], port=numbers["port"], user=texts["user"], addr=texts["addr"]
    )


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the hosts of a hostfile.

    Raises:
        LaunchError: it cannot be read, or `parse_hostfile` rejects it.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise LaunchError(f"hostfile {str(path)!r}: cannot be read ({why}); give the path of a hostfile") from exc
    return parse_hostfile(text, str(path))


def slots_per_host(hosts: Sequence[Host]) -> int:
    """Return the slots common to all hosts, 0 if no host states them.

    Raises:
        LaunchError: they differ; every host must run the same number of ranks.
    """
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        listed = ", ".join(f"{host.name}={host.slots or 'not set'}" for host in hosts[:8])
        raise LaunchError(
            f"the hosts have different slots ({listed}); a run has the same number of processes on every host: set "
            "--nproc-per-node to the smallest, or leave hosts out"
        )
    return counts.pop()
