"""Questions to every host of a hostfile at once.

What it has, whether all see one folder, reach each other, and agree on the time. Each host is asked with the
connection and the interpreter that a launch would use.
"""

from __future__ import annotations

import inspect
import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lt_launch.agent import look as look_module
from lt_launch.backend import Finding
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.machine import findings
from lt_launch.ssh_link import SshTransport

__all__ = ["doctor", "survey"]

MOST_SKEW_S = 1.0
AT_ONCE = 32
LISTEN = """
import socket, sys, time
server = socket.socket()
server.bind(("", 0))
server.listen(256)
server.settimeout(30)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close(); print('reached')"
TOUCH = "import os, sys; os.makedirs(sys.argv[1], exist_ok=True); open(os.path.join(*sys.argv[1:3]), 'x').close()"
REMOVE = "import os, sys; os.remove(os.path.join(*sys.argv[1:3]))"


def survey(
    hosts: Sequence[Host], transport: SshTransport, *, folder: str, token: str = ""
) -> list[tuple[Host, Mapping[str, Any]]]:
    """What every host says of itself, or {"problem": ...}, with its clock's distance from ours in "skew_s"."""
    source = f"{inspect.getsource(look_module)}\nimport json\nprint(json.dumps(look(sys.argv[1], sys.argv[2])))"

    def ask(host: Host) -> Mapping[str, Any]:
        before = time.time()
        answer = _python(host, transport, source, folder, token)
        if "problem" in answer:
            return answer
        try:
            values = json.loads(answer["out"].splitlines()[-1])
        except (ValueError, IndexError):
            return {"problem": f"it did not answer as python would: {answer['out'][-200:]!r}"}
        low, high = before - values["time"], time.time() - values["time"]
        return values | {"skew_s": max(low, -high, 0.0)}

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return list(zip(hosts, pool.map(ask, hosts), strict=True))


def _python(host: Host, transport: SshTransport, source: str, *arguments: str) -> dict[str, str]:
    """Run a program on a host: {"out": ...} or {"problem": ...}."""
    command = transport.ssh(host, [transport.python, "-c", source, *arguments])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=transport.connect_timeout_s + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {transport.connect_timeout_s + 60:.0f} s"}
    except OSError as exc:
        return {"problem": f"cannot run ssh: {exc.strerror}"}
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"problem": said[-1] if said else f"exit code {done.returncode}"}
    return {"out": done.stdout}


def doctor(hosts: Sequence[Host], transport: SshTransport, pipeline: Pipeline | None) -> Iterator[Finding]:
    """Look at all hosts; what concerns one host names it."""
    folder = str(Path(pipeline.out if pipeline else ".").absolute())
    token = f".lt-doctor-{secrets.token_hex(8)}"
    first = hosts[0]
    touched = _python(first, transport, TOUCH, folder, token)
    try:
        answers = survey(hosts, transport, folder=folder, token=token)
    finally:
        if "problem" not in touched:
            _python(first, transport, REMOVE, folder, token)
    up = [host for host, answer in answers if "problem" not in answer]
    for host, answer in answers:
        if "problem" in answer:
            remedy = f"try: ssh {host.address} {transport.python} --version"
            yield Finding(level="wrong", what="ssh", found=answer["problem"], remedy=remedy, where=host.name)
            continue
        yield from findings(answer, pipeline, where=host.name)
        yield _clock(host, answer)
        if len(hosts) > 1:
            yield _shared(host, answer, folder, first, "problem" not in touched)
    yield from _same(answers)
    if len(up) > 1:
        yield from _ports(up, transport)


def _clock(host: Host, answer: Mapping[str, Any]) -> Finding:
    skew = answer["skew_s"]
    if skew > MOST_SKEW_S:
        remedy = "start a time service there (chrony)"
        return Finding(level="warning", what="clock", found=f"{skew:.0f} s off", remedy=remedy, where=host.name)
    return Finding(level="ok", what="clock", found=f"within {MOST_SKEW_S:g} s", where=host.name)


def _shared(host: Host, answer: Mapping[str, Any], folder: str, first: Host, touched: bool) -> Finding:
    if not touched:
        remedy = f"make it writable on {first.name}, or choose --out"
        return Finding(
            level="wrong", what="shared folder", found=f"{folder} cannot be written", remedy=remedy, where=first.name
        )
    if answer["sees_token"]:
        return Finding(level="ok", what="shared folder", found=folder, where=host.name)
    remedy = f"mount the same file system there: checkpoints of {first.name} must be seen by all"
    return Finding(
        level="wrong",
        what="shared folder",
        found=f"{folder} is not the one of {first.name}",
        remedy=remedy,
        where=host.name,
    )


def _same(answers: Sequence[tuple[Host, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Versions that differ between hosts."""
    reached = [(host, answer) for host, answer in answers if "problem" not in answer]
    for name in sorted({name for _, answer in reached for name in answer["packages"]}):
        found = {host.name: answer["packages"].get(name, "missing") for host, answer in reached}
        if len(set(found.values())) > 1:
            text = ", ".join(f"{host}: {version}" for host, version in found.items())
            yield Finding(level="wrong", what=f"{name} differs", found=text, remedy="install one version everywhere")


def _ports(hosts: Sequence[Host], transport: SshTransport) -> Iterator[Finding]:
    """Whether every host reaches a free port of the first one, where ranks meet."""
    first, *others = hosts
    with _listening(first, transport) as port:
        if not port:
            yield Finding(level="wrong", what="ports", found="cannot listen on a free port", where=first.name)
            return
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            found = pool.map(lambda host: _python(host, transport, CONNECT, first.address, port), others)
            for host, answer in zip(others, found, strict=True):
                text = f"{first.address}:{port}"
                if "problem" in answer:
                    remedy = f"open ports of {first.name} to {host.name} (firewall, security group), or set addr="
                    yield Finding(
                        level="wrong",
                        what="ports",
                        found=f"{text}: {answer['problem']}",
                        remedy=remedy,
                        where=host.name,
                    )
                else:
                    yield Finding(level="ok", what="ports", found=f"reaches {text}", where=host.name)


@contextmanager
def _listening(host: Host, transport: SshTransport) -> Iterator[str]:
    """A listener on a host; its port, or "" where it did not come up. It ends with its standard input."""
    command = transport.ssh(host, [transport.python, "-c", LISTEN])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
