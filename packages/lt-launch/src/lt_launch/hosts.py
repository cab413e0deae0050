"""Hosts that ssh reaches, from a hostfile.

    # comment
    node1
    node2 slots=8 port=2222 user=ubuntu addr=10.0.0.2 env.NCCL_DEBUG=INFO

One host a line, in the order in which ranks are given out: names are never sorted, for node10 comes before node2 in any
sorting of text. `slots` is the number of devices; `addr` is what ssh and the other hosts connect to where the name does
not resolve. Bare names take `--nproc-per-node`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.job import check_env

__all__ = ["Host", "parse", "read", "slots"]

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")
GRAMMAR = "write lines of 'host [slots=N] [port=P] [user=U] [addr=A] [env.NAME=VALUE]'"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    slots: int = 0
    """Devices; 0 = not said."""
    port: int = 0
    user: str = ""
    addr: str = ""
    """What to connect to; empty = the name."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """What to connect to."""
        return self.addr or self.name


def parse(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Hosts in the order of their lines.

    Raises:
        LaunchError: a line that cannot be read, a host that stands there twice, or none at all; with the line's number.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as exc:
            raise LaunchError(f"{where}: {line.strip()!r}: {exc}; {GRAMMAR}") from exc
        if words:
            host = _host(words, where)
            if any(host.name == other.name for other in hosts):
                raise LaunchError(f"{where}: {host.name} stands here twice; give it one line, with slots=N")
            hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source}: there is no host in it; {GRAMMAR}")
    return tuple(hosts)


def _host(words: Sequence[str], where: str) -> Host:
    name, *settings = words
    if not NAME.fullmatch(name):
        raise LaunchError(f"{where}: {name!r} is not the name of a host; {GRAMMAR}")
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
            raise LaunchError(f"{where}: {setting!r} of {name} cannot be used; {GRAMMAR}")
    check_env(f"{where}: env", env)
    return Host(
        name=name, env=env, slots=numbers["slots"], port=numbers["port"], user=texts["user"], addr=texts["addr"]
    )


def read(path: str | Path) -> tuple[Host, ...]:
    """The hosts of a hostfile.

    Raises:
        LaunchError: it cannot be read, or `parse` refuses it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise LaunchError(f"hostfile {str(path)!r}: cannot be read ({why}); give the path of a hostfile") from exc
    return parse(text, str(path))


def slots(hosts: Sequence[Host]) -> int:
    """The slots of every host where all say the same, 0 where none says.

    Raises:
        LaunchError: they differ; ranks of a run are the same number on each host.
    """
    found = {host.slots for host in hosts}
    if len(found) > 1:
        listed = ", ".join(f"{host.name}={host.slots or 'not said'}" for host in hosts[:8])
        raise LaunchError(
            f"the hosts have different slots ({listed}); a run has the same number of processes on every host: set "
            "--nproc-per-node to the smallest, or leave hosts out"
        )
    return found.pop()
