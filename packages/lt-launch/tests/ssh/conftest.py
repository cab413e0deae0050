"""Machines that ssh reaches: network namespaces with a name, an address and an sshd of their own, on one bridge.

Needs root, /usr/sbin/sshd and ip; without them the tests are skipped and say so. A launcher runs in a namespace too, so
that nothing of the machine's own network is touched. The folder that all share has blanks, quotes and `;` in its name.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SSHD = "/usr/sbin/sshd"


def missing() -> str:
    """Why these tests cannot run here; empty when they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [name for name in ("ip", "ssh", "ssh-keygen", "unshare", SSHD) if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install openssh-server openssh-client iproute2"
    probe = f"ltp{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "ip netns add is not permitted here"
    sh(f"ip netns del {probe}")
    return ""


def sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class Machine:
    """One host."""

    def __init__(self, net: str, process: "subprocess.Popen[bytes]") -> None:
        self.net, self.process = net, process

    def cut(self) -> None:
        """Pull the cable."""
        sh(f"ip -n {self.net} link set eth0 down")

    def kill(self) -> None:
        """Cut the power: the first process of its process namespace takes all others with it."""
        self.process.kill()
        self.process.wait()

    def processes(self, word: str) -> list[int]:
        """Processes on this host whose command line holds a word."""
        done = subprocess.run(["ip", "netns", "pids", self.net], capture_output=True, text=True, check=False)
        found = []
        for pid in done.stdout.split():
            with suppress(OSError):
                found += [int(pid)] if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return found


class Net:
    """Some hosts and a place to launch from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.tag = folder / 'it\'s; a "b"', folder / "keys", secrets.token_hex(2)
        self.folder.mkdir()
        self.keys.mkdir()
        self.machines: dict[str, Machine] = {}
        self.hub = f"lt{self.tag}hub"
        self.started: list[subprocess.Popen[str]] = []
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / name)], check=True)
        shutil.copy(self.keys / "key.pub", self.keys / "authorized_keys")
        Path("/run/sshd").mkdir(exist_ok=True)
        sh(f"ip netns add {self.hub}")
        for words in ("set lo up", "add br0 type bridge", "set br0 up"):
            sh(f"ip -n {self.hub} link {words}")
        sh(f"ip -n {self.hub} addr add 10.77.0.1/24 dev br0")

    def add(self, name: str, *, private: Path | None = None) -> Machine:
        """A host that the others know by its name; `private` is a folder that it does not share with them."""
        net, link, address = f"lt{self.tag}{name}", f"v{self.tag}{name}", f"10.77.0.{len(self.machines) + 2}"
        sh(f"ip netns add {net}")
        sh(f"ip -n {self.hub} link add {link} type veth peer name eth0 netns {net}")
        sh(f"ip -n {self.hub} link set {link} master br0 up")
        sh(f"ip -n {net} addr add {address}/24 dev eth0")
        for device in ("lo", "eth0"):
            sh(f"ip -n {net} link set {device} up")
        for file, text in (("config", f"Host {name}\nHostName {address}\n"), ("hosts", f"{address} {name}\n")):
            with open(self.keys / file, "a") as lines:
                lines.write(text)
        options = {"ListenAddress": address, "HostKey": self.keys / "host_key", "UsePAM": "no", "StrictModes": "no"}
        options |= {"AuthorizedKeysFile": self.keys / "authorized_keys", "PidFile": "none"}
        words = " ".join(f"-o {key}={value}" for key, value in options.items())
        mounts = f"mount --bind {self.keys}/hosts /etc/hosts" + (' && mount -t tmpfs none "$0"' if private else "")
        script = f"hostname {name} && {mounts} && exec {SSHD} -D -e -f /dev/null {words}"
        command = ["ip", "netns", "exec", net, "unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork"]
        command += ["--kill-child", "sh", "-c", script, str(private)]
        log = self.keys / f"sshd-{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        self.machines[name] = Machine(net, process)
        self.until(lambda: b"listening on" in log.read_bytes())
        return self.machines[name]

    def hostfile(self, *names: str, more: str = "") -> str:
        """A hostfile with these hosts, in this order."""
        (self.folder / "hosts.txt").write_text("".join(f"{name} {more}\n" for name in names))
        return "hosts.txt"

    def profile(self, more: str = "") -> None:
        """The person's profile: how ssh finds hosts and its key here."""
        options = ["-F", str(self.keys / "config"), "-i", str(self.keys / "key"), "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        text = f"python = {json.dumps(sys.executable)}\n{more}\n[ssh]\nlink_timeout_s = 6\n"
        Path(os.environ["LT_LAUNCH_PROFILE"]).write_text(f"{text}ssh_args = {json.dumps(options)}\n")

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        """`lt launch` from the hub, not waited for."""
        command = ["ip", "netns", "exec", self.hub, sys.executable, "-m", "lt_launch", "launch", *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env={**os.environ, **(env or {})}, **output))
        return self.started[-1]

    def lt(self, *arguments: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        """`lt launch` from the hub; both streams, after checking the exit code."""
        process = self.start(*arguments, env=env)
        out, _ = process.communicate()
        assert process.returncode == code, f"exit code {process.returncode}\n{out}"
        return out

    def until(self, what: Callable[[], object], seconds: float = 60) -> None:
        """Wait for something, at most some seconds."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        for process in (*self.started, *(machine.process for machine in self.machines.values())):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
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
