"""Machines that ssh reaches: network namespaces with a name, an address and an sshd of their own, on one bridge.

Needs root, /usr/sbin/sshd and ip; without them the tests are skipped and say so. A launcher runs in a namespace too, so
that nothing of the machine's own network is touched.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SSHD = "/usr/sbin/sshd"
NEEDED = ("ip", "ssh", "ssh-keygen", "unshare")


def missing() -> str:
    """Why these tests cannot run here; empty when they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if not Path(SSHD).exists():
        absent.append("sshd")
    if absent:
        return f"{', '.join(absent)} not found: apt-get install openssh-server openssh-client iproute2"
    probe = f"ltp{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "ip netns add is not permitted here"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Machine:
    """One host."""

    def __init__(self, name: str, net: str, link: str, address: str, process: "subprocess.Popen[bytes]") -> None:
        self.name, self.net, self.link, self.address, self.process = name, net, link, address, process

    def cut(self) -> None:
        """Pull the cable."""
        sh("ip", "-n", self.net, "link", "set", "eth0", "down")

    def kill(self) -> None:
        """Cut the power: the first process of its process namespace takes all others with it."""
        self.process.kill()
        self.process.wait()

    def processes(self, word: str) -> list[int]:
        """Processes on this host whose command line holds a word."""
        done = subprocess.run(["ip", "netns", "pids", self.net], capture_output=True, text=True, check=False)
        found = []
        for pid in done.stdout.split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in command:
                found.append(int(pid))
        return found


class Net:
    """Some hosts and a place to launch from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.tag = folder / "work", folder / "keys", secrets.token_hex(2)
        self.folder.mkdir()
        self.keys.mkdir()
        self.machines: dict[str, Machine] = {}
        self.hub = f"lt{self.tag}hub"
        self.started: list[subprocess.Popen[str]] = []
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / "host_key"))
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / "key"))
        shutil.copy(self.keys / "key.pub", self.keys / "authorized_keys")
        Path("/run/sshd").mkdir(exist_ok=True)
        sh("ip", "netns", "add", self.hub)
        sh("ip", "-n", self.hub, "link", "set", "lo", "up")
        sh("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.hub, "addr", "add", "10.77.0.1/24", "dev", "br0")
        sh("ip", "-n", self.hub, "link", "set", "br0", "up")

    def add(self, name: str, *, private: Path | None = None) -> Machine:
        """A host; `private` is a folder that it does not share with the others."""
        number = len(self.machines) + 2
        net, link, address = f"lt{self.tag}{name}", f"v{self.tag}{name}", f"10.77.0.{number}"
        sh("ip", "netns", "add", net)
        sh("ip", "-n", net, "link", "set", "lo", "up")
        sh("ip", "-n", self.hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", net)
        sh("ip", "-n", self.hub, "link", "set", link, "master", "br0", "up")
        sh("ip", "-n", net, "addr", "add", f"{address}/24", "dev", "eth0")
        sh("ip", "-n", net, "link", "set", "eth0", "up")
        options = {
            "ListenAddress": address,
            "HostKey": self.keys / "host_key",
            "AuthorizedKeysFile": self.keys / "authorized_keys",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "prohibit-password",
        }
        words = " ".join(f"-o {key}={value}" for key, value in options.items())
        mount = f"mount -t tmpfs none {private} && " if private else ""
        script = f"hostname {name} && {mount}exec {SSHD} -D -e -f /dev/null {words}"
        command = ["ip", "netns", "exec", net, "unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork"]
        with open(self.keys / f"sshd-{name}.log", "wb") as log:
            process = subprocess.Popen([*command, "--kill-child", "sh", "-c", script], stdout=log, stderr=log)
        self.machines[name] = Machine(name, net, link, address, process)
        deadline = time.monotonic() + 30
        while b"listening on" not in (self.keys / f"sshd-{name}.log").read_bytes():
            assert process.poll() is None, (self.keys / f"sshd-{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self.machines[name]

    def hostfile(self, *names: str, more: str = "") -> str:
        """A hostfile with these hosts, in this order."""
        rows = [f"{name} addr={self.machines[name].address} {more}" for name in names]
        (self.folder / "hosts.txt").write_text("\n".join(rows) + "\n")
        return "hosts.txt"

    def profile(self) -> None:
        """The person's profile: how ssh finds its key here."""
        options = ["-F", "/dev/null", "-i", str(self.keys / "key"), "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        text = f"python = {json.dumps(sys.executable)}\n[ssh]\nlink_timeout_s = 6\nssh_args = {json.dumps(options)}\n"
        Path(os.environ["LT_LAUNCH_PROFILE"]).write_text(text)

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.hub, sys.executable, "-m", "lt_launch", "launch", *arguments]

    def lt(self, *arguments: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        """`lt launch` from the hub; both streams, after checking the exit code."""
        environ = {**os.environ, **(env or {})}
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """`lt launch` from the hub, not waited for."""
        process = subprocess.Popen(
            self.command(*arguments), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        for machine in self.machines.values():
            if machine.process.poll() is None:
                machine.process.send_signal(signal.SIGKILL)
                machine.process.wait()
        for net in (*(machine.net for machine in self.machines.values()), self.hub):
            done = subprocess.run(["ip", "netns", "pids", net], capture_output=True, text=True, check=False)
            for pid in done.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", net], check=False)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    """A hub and the hosts a and b, with a profile that reaches them."""
    why = missing()
    if why:
        pytest.skip(f"ssh over network namespaces is not tested here: {why}")
    made = Net(tmp_path)
    try:
        made.add("a")
        made.add("b")
        made.profile()
        yield made
    finally:
        made.close()


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait for something, at most some seconds."""

    def wait(what: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait
