"""Parallel checks of all hosts of a hostfile.

Each host's hardware and versions, the shared folder, mutual connectivity and clock skew. Each host is reached with the
connection and the interpreter of a launch.
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

from lt_launch import look as look_module
from lt_launch.answers import machine_problem
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.machine import machine_findings
from lt_launch.ssh_connection import SAFE_PATH
from lt_launch.ssh_transport import SshTransport
from lt_launch.target import Finding

__all__ = ["doctor", "probe_hosts"]

MAX_SKEW_S = 1.0
MAX_PARALLEL_HOSTS = 32
LISTEN_SCRIPT = """
import socket, sys, time
server = socket.socket()
server.bind(("", 0))
server.listen(256)
server.settimeout(30)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
CONNECT_SCRIPT = (
    "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close(); print('reached')"
)
TOUCH_SCRIPT = (
    "import os, sys; os.makedirs(sys.argv[1], exist_ok=True); open(os.path.join(*sys.argv[1:3]), 'x').close()"
)
REMOVE_SCRIPT = "import os, sys; os.remove(os.path.join(*sys.argv[1:3]))"


def probe_hosts(
    hosts: Sequence[Host], transport: SshTransport, *, folder: str, token: str = ""
) -> list[tuple[Host, Mapping[str, Any]]]:
    """Return each host's description with its clock skew in "skew_s", or {"problem": ...}."""
    source = f"{inspect.getsource(look_module)}\nimport json\nprint(json.dumps(look(sys.argv[1], sys.argv[2])))"

    def probe(host: Host) -> Mapping[str, Any]:
        before = time.time()
        answer = _run_python(host, transport, source, folder, token)
        if "problem" in answer:
            return answer
        try:
            values = json.loads(answer["out"].splitlines()[-1])
        except (ValueError, IndexError, RecursionError):
            return {"problem": f"unexpected answer of python: {answer['out'][-200:]!r}"}
        if problem := machine_problem(values):
            return {"problem": f"unexpected answer of python: {problem}"}
        low, high = before - values["time"], time.time() - values["time"]
        return values | {"skew_s": max(low, -high, 0.0)}

    with ThreadPoolExecutor(max_workers=MAX_PARALLEL_HOSTS) as pool:
        return list(zip(hosts, pool.map(probe, hosts), strict=True))


def _run_python(host: Host, transport: SshTransport, source: str, *arguments: str) -> dict[str, str]:
    """Run a Python program on a host; return {"out": ...} or {"problem": ...}."""
    command = transport.ssh_argv(host, [transport.python, "-c", SAFE_PATH + source, *arguments])
    try:
        result = subprocess.run(
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
    if result.returncode:
        errors = result.stderr.strip().splitlines()
        return {"problem": errors[-1] if errors else f"exit code {result.returncode}"}
    return {"out": result.stdout}


def doctor(hosts: Sequence[Host], transport: SshTransport, pipeline: Pipeline | None) -> Iterator[Finding]:
    """Check all hosts; a finding about one host names it."""
    folder = str(Path(pipeline.out if pipeline else ".").absolute())
    token = f".lt-doctor-{secrets.token_hex(8)}"
    first = hosts[0]
    touched = _run_python(first, transport, TOUCH_SCRIPT, folder, token)
    try:
        answers = probe_hosts(hosts, transport, folder=folder, token=token)
    finally:
        if "problem" not in touched:
            _run_python(first, transport, REMOVE_SCRIPT, folder, token)
    up = [host for host, answer in answers if "problem" not in answer]
    for host, answer in answers:
        if "problem" in answer:
            remedy = f"try: ssh {host.address} {transport.python} --version"
            yield Finding(level="error", check="ssh", detail=answer["problem"], remedy=remedy, host=host.name)
            continue
        yield from machine_findings(answer, pipeline, host=host.name)
        yield _check_clock(host, answer)
        if len(hosts) > 1:
            yield _check_shared_folder(host, answer, folder, first, "problem" not in touched)
    yield from _check_versions(answers)
    if len(up) > 1:
        yield from _check_ports(up, transport)


def _check_clock(host: Host, answer: Mapping[str, Any]) -> Finding:
    skew = answer["skew_s"]
    if skew > MAX_SKEW_S:
        remedy = "start a time service there (chrony)"
        return Finding(level="warning", check="clock", detail=f"{skew:.0f} s off", remedy=remedy, host=host.name)
    return Finding(level="ok", check="clock", detail=f"within {MAX_SKEW_S:g} s", host=host.name)


def _check_shared_folder(host: Host, answer: Mapping[str, Any], folder: str, first: Host, touched: bool) -> Finding:
    if not touched:
        remedy = f"make it writable on {first.name}, or choose --out"
        return Finding(
            level="error", check="shared folder", detail=f"{folder} cannot be written", remedy=remedy, host=first.name
        )
    if answer["sees_token"]:
        return Finding(level="ok", check="shared folder", detail=folder, host=host.name)
    remedy = f"mount the same file system there: all hosts must see the checkpoints of {first.name}"
    return Finding(
        level="error",
        check="shared folder",
        detail=f"{folder} is not the same folder as on {first.name}",
        remedy=remedy,
        host=host.name,
    )


def _check_versions(answers: Sequence[tuple[Host, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Yield findings on versions that differ between hosts."""
    reached = [(host, answer) for host, answer in answers if "problem" not in answer]
    for name in sorted({name for _, answer in reached for name in answer["packages"]}):
        versions = {host.name: answer["packages"].get(name, "missing") for host, answer in reached}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{host}: {version}" for host, version in versions.items())
            yield Finding(level="error", check=f"{name} differs", detail=text, remedy="install one version everywhere")


def _check_ports(hosts: Sequence[Host], transport: SshTransport) -> Iterator[Finding]:
    """Check that every host reaches a free port of the first one, the rendezvous host."""
    first, *others = hosts
    with _open_listener(first, transport) as port:
        if not port:
            yield Finding(level="error", check="ports", detail="cannot listen on a free port", host=first.name)
            return
        with ThreadPoolExecutor(max_workers=MAX_PARALLEL_HOSTS) as pool:
            answers = pool.map(lambda host: _run_python(host, transport, CONNECT_SCRIPT, first.address, port), others)
            for host, answer in zip(others, answers, strict=True):
                text = f"{first.address}:{port}"
                if "problem" in answer:
                    remedy = f"open ports of {first.name} to {host.name} (firewall, security group), or set addr="
                    yield Finding(
                        level="error",
                        check="ports",
                        detail=f"{text}: {answer['problem']}",
                        remedy=remedy,
                        host=host.name,
                    )
                else:
                    yield Finding(level="ok", check="ports", detail=f"reaches {text}", host=host.name)


@contextmanager
def _open_listener(host: Host, transport: SshTransport) -> Iterator[str]:
    """Open a listener on a host until its standard input ends; yield its port, or "" on failure."""
    command = transport.ssh_argv(host, [transport.python, "-c", SAFE_PATH + LISTEN_SCRIPT])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
