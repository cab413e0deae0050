"""Targets without a queue: `local`, this machine, and `ssh`, the hosts of a hostfile, which share the launch's folder.

Local is one host without ssh. The launch command itself runs the stages (`stage_runner`) and ends with them; with nohup
it runs in the background. If it dies, a shell on each host ends the processes (`node`), which have the grace time to
save.

The user's ~/.ssh/config (ports, users, addresses), agent and jump hosts apply. Each host gets one `bash -s` and what it
runs on standard input, so nothing is installed or sent beforehand, and command lines need no quoting for a shell in
between. The environment of the launcher is not forwarded: variables come from the profile, the job and `--env`, and
secrets by name (`pass_env`).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lt_ckpt.terminal_text import echo_error, escape_controls
from lt_launch import look
from lt_launch.attempt import Stop, handle_stop_signals
from lt_launch.doctor import machine_findings
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.launch_dir import lock_owner
from lt_launch.launch_dir_status import read_logs, read_stage_statuses
from lt_launch.node import Host, node_commands
from lt_launch.policy import CANCELLED, Place
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.stage_runner import StageRunner
from lt_launch.target import Finding, Launch, LaunchTarget, RenderedLaunch, StageStatus
from lt_trainer.config.section import PathText, Section, option
from lt_trainer.errors import RecipeError

HOST = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?)(?:\s+slots=([1-9][0-9]{0,5}))?")
"""A line of a hostfile: a name or address, and the number of devices."""
LOOK_S = 90.0
"""Time within which every host must answer doctor."""


class LocalOptions(Section, table="local"):
    """Options in the table [local] of a profile."""

    slots: int = option(0, "processes that may run in parallel; 0 = one per core", ge=0)


class SshOptions(Section, table="ssh"):
    """Options in the table [ssh] of a profile."""

    hostfile: PathText = option("", "path of a hostfile: lines of HOST [slots=N], in rank order")
    ssh_args: tuple[str, ...] = option((), 'extra arguments of the ssh command, such as ["-i", "~/key"]')
    link_timeout_s: float = option(15.0, "silence after which a host or the launcher counts as lost", unit="s", ge=3)


class HostsTarget(LaunchTarget):
    """Launch target that starts processes on hosts by itself."""

    default_slots = 1
    """Processes side by side on a host that says nothing of it."""

    @abstractmethod
    def hosts(self, profile: Profile) -> tuple[Host, ...]:
        """Return the hosts in rank order; further ones are spares."""

    def interpreter(self, profile: Profile) -> str:
        """Return the Python of the hosts."""
        return profile.python

    def stage_specs(self, pipeline: Pipeline, profile: Profile) -> dict[str, dict[str, Any]]:
        """Return the specs by stage; refuse what the hosts cannot run."""
        hosts = self.hosts(profile)
        for stage in pipeline.stages:
            job, slots = stage.job, hosts[0].slots
            for name, is_wrong, remedy in (
                ("container.image", job.container.image, "set no image: put the container's command into argv"),
                ("nodes", job.nodes > len(hosts), f"set at most {len(hosts)}, add hosts or choose another target"),
                ("procs_per_node", 0 < slots < job.procs_per_node, f"set at most {slots}, or raise the slots"),
            ):
                if is_wrong:
                    problem = f"stage {stage.name} cannot run on {self.name}"
                    raise RecipeError(problem, values={f"job.{name}": job.value(name)}, remedy=remedy)
        python = self.interpreter(profile)
        return {stage.name: stage_spec(stage, pipeline, profile, python=python) for stage in pipeline.stages}

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the specs of the stages, and the command lines of every host."""
        files: dict[str, str] = {}
        commands: dict[tuple[str, ...], None] = {}
        hosts, out = self.hosts(profile), str(Path(pipeline.out).absolute())
        for name, spec in self.stage_specs(pipeline, profile).items():
            stage = pipeline.stage(name)
            files[f"{name}.spec.json"] = json.dumps(spec, indent=1, ensure_ascii=False) + "\n"
            if stage.job.recipe:
                files[f"{name}.recipe.toml"] = stage.job.recipe
            for index in stage.array_indices:
                place = Place(Path(out, "launch", "stages", name, "spec.json"), index)
                for node in range(stage.job.nodes):
                    host = hosts[node if index is None else index % len(hosts)]
                    for command in node_commands(spec, place, 0, node, (hosts[0].address, "PORT")):
                        commands[self.shown(host, [word.replace(out, pipeline.out) for word in command.argv])] = None
        comments = (
            "PORT is a free port; each process of a stage without torchrun has torchrun's variables",
            "commands and variables are sent to bash on standard input, not as arguments",
            f"output and exit codes of processes are kept in {pipeline.out}/launch/stages, which all hosts share",
        )
        return RenderedLaunch(files=files, commands=tuple(commands), comments=comments)

    def shown(self, host: Host, argv: Sequence[str]) -> tuple[str, ...]:
        """Return a command line as it is run on a host."""
        return tuple(argv)

    def submit(self, launch: Launch, rendered: RenderedLaunch) -> tuple[Mapping[str, str], int]:
        """Run the launch to its end."""
        folder = launch.directory.parent
        line = f"# folder: {folder}; elsewhere: lt launch status {shlex.quote(folder.name)}"
        echo_error(escape_controls(line, keep=""))
        stop = Stop()
        with handle_stop_signals(stop):
            return {}, StageRunner(launch, self.hosts(launch.profile), stop, self.default_slots).run()

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from the launch directory."""
        return read_stage_statuses(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders."""
        return read_logs(launch, stage=stage, rank=rank, follow=follow)

    def cancel(self, launch: Launch) -> list[str]:
        """Send a stop signal to the process that runs the launch.

        Raises:
            LaunchError: it runs on another machine, or the lock is another user's, who could name any process in it.
        """
        owner = lock_owner(launch.directory)
        if not owner:
            return ["it is not running; there is nothing to stop"]
        match = re.fullmatch(r"process ([0-9]{1,9}) on (\S+)", owner)
        if match is None or match[2] != socket.gethostname():
            raise LaunchError(f"{owner} runs it; cancel it there")
        if (launch.directory / "launch.lock").stat().st_uid != os.getuid():
            raise LaunchError(f"{owner} runs it, which is another user's; ask them")
        for stage in launch.pipeline.stages:
            (launch.directory / "stages" / stage.name / CANCELLED).touch()
        os.kill(int(match[1]), signal.SIGTERM)
        return [f"asked {owner} to stop; training saves and exits"]

    def doctor(self, profile: Profile, pipeline: Pipeline) -> Iterator[Finding]:
        """Check versions, devices, disk and the shared folder of every host."""
        hosts, python = self.hosts(profile), self.interpreter(profile)
        folder, token = Path(pipeline.out).absolute(), f".lt-doctor-{secrets.token_hex(8)}"
        while not folder.is_dir():
            folder = folder.parent
        program = f"{inspect.getsource(look)}\nimport json\nprint(json.dumps(look({str(folder)!r}, {token!r})))\n"
        (folder / token).touch()
        try:
            with ThreadPoolExecutor(max_workers=32) as pool:
                machines = list(pool.map(partial(_look, shlex.join([python, "-c", program])), hosts))
        finally:
            (folder / token).unlink()
        versions: dict[str, set[str]] = {}
        for host, machine in zip(hosts, machines, strict=True):
            if isinstance(machine, str):
                remedy = f"try: {shlex.join(self.shown(host, [python, '--version']))}"
                yield Finding(level="error", check="reach", detail=machine, remedy=remedy, host=host.name)
                continue
            yield from machine_findings(machine, pipeline, host=host.name)
            for name in look.PACKAGES:
                versions.setdefault(name, set()).add(machine["packages"].get(name, "missing"))
            if not machine["sees_token"]:
                detail, remedy = f"{folder} is not the folder of this machine", "mount the same file system there"
                yield Finding(level="error", check="shared folder", detail=detail, remedy=remedy, host=host.name)
        for name, different in versions.items():
            if len(different) > 1:
                detail, remedy = ", ".join(sorted(different)), "install one version everywhere"
                yield Finding(level="error", check=f"{name} differs", detail=detail, remedy=remedy)


class LocalTarget(HostsTarget):
    """Launch target for processes on this machine."""

    name, default_slots = "local", os.cpu_count() or 1

    def hosts(self, profile: Profile) -> tuple[Host, ...]:
        """Return this machine."""
        return (Host(name=socket.gethostname(), slots=profile.options("local", LocalOptions).slots),)

    def interpreter(self, profile: Profile) -> str:
        """Return the profile's Python, else this one."""
        return profile.python if "python" in profile.values else sys.executable

    def capacity(self, profile: Profile) -> tuple[int, int]:
        """Return one node and its devices."""
        return 1, look.count_devices()


class SshTarget(HostsTarget):
    """Launch target for hosts reached over ssh."""

    name = "ssh"

    def hosts(self, profile: Profile) -> tuple[Host, ...]:
        """Return the hosts of the hostfile, each with the ssh command that starts a shell there without a prompt."""
        options = profile.options("ssh", SshOptions)
        if not options.hostfile:
            raise LaunchError("the target ssh needs hosts: give --hostfile FILE, or [ssh] hostfile in the profile")
        if shutil.which("ssh") is None:
            raise LaunchError("the target ssh needs the command ssh: apt-get install openssh-client")
        alive = f"ServerAliveInterval={max(1, int(options.link_timeout_s / 3))}"
        words = ["ssh", "-T", *options.ssh_args, "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"]
        words += ["-o", alive, "-o", "ServerAliveCountMax=3", "--"]
        silence_s = options.link_timeout_s
        return tuple(
            Host(name=name, slots=slots, address=name, shell=(*words, name, "exec bash -s"), silence_s=silence_s)
            for name, slots in read_hostfile(Path(options.hostfile)).items()
        )

    def capacity(self, profile: Profile) -> tuple[int, int]:
        """Return the hosts and their slots."""
        hosts = self.hosts(profile)
        return len(hosts), hosts[0].slots

    def shown(self, host: Host, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the ssh command line that would run a command there."""
        return (*host.shell[:-1], shlex.join(argv))


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of a hostfile's hosts, 0 where it states none, in the order of their lines: node2 before node10.

    Raises:
        LaunchError: it cannot be read, a line is invalid, a host is listed twice, slots differ, or there is no host.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as exc:
        raise LaunchError(f"cannot read the hostfile {path}: {exc.strerror}; give the path of a hostfile") from exc
    except UnicodeDecodeError as exc:
        raise LaunchError(f"the hostfile {path} is not text in UTF-8; give the path of a hostfile") from exc
    hosts: dict[str, int] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        match = HOST.fullmatch(words)
        if words and not match:
            remedy = "write HOST [slots=N]; ports, users and addresses are for ~/.ssh/config"
            raise LaunchError(f"{path}:{number}: {words!r} is not a host; {remedy}")
        if not match:
            continue
        name = match[1]
        host, colon, rest = name.partition(":")
        if colon and ":" not in rest:  # an address of IPv6 has two or more
            remedy = f"write the number of devices as {host} slots=N; a port is for ~/.ssh/config"
            raise LaunchError(f"{path}:{number}: {name!r} is not a host; {remedy}")
        if name.casefold() in seen:  # names of hosts have no case
            raise LaunchError(f"{path}:{number}: {name} is listed twice; give it one line, with slots=N")
        seen.add(name.casefold())
        hosts[name] = int(match[2] or 0)
    if len(set(hosts.values())) != 1:
        problem = "the hosts have different slots" if hosts else "no host in it"
        raise LaunchError(f"{path}: {problem}; write HOST [slots=N] for each, with the same N")
    return hosts


def _look(command: str, host: Host) -> dict[str, Any] | str:
    """Return the description of a host (`look`), or why there is none."""
    try:
        done = subprocess.run(
            host.shell,
            input=f"exec {command}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOOK_S,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {LOOK_S:.0f} s"
    except subprocess.CalledProcessError as exc:
        return (exc.stderr.strip().splitlines() or [f"exit code {exc.returncode}"])[-1]
