"""Target `ssh`: hosts reached by the ssh command with the user's own configuration.

The user's ~/.ssh/config, ssh agent and jump hosts apply. Each host gets one `bash -s` and what it runs on standard
input (`node`), so nothing is installed or sent beforehand, and command lines need no quoting for a shell in between.
The hosts share the folder of the launch at the same path. If the launcher dies or the link breaks, the processes get
SIGTERM and the grace time to save.

The environment of the launcher is not forwarded: variables come from the profile, the job, `--env` and the hostfile,
and secrets by name (`pass_env`).
"""

import inspect
import json
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from lt_launch import look as look_module
from lt_launch.attempt import Transport
from lt_launch.driver import DrivenTarget
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host, parse_hostfile, read_hostfile
from lt_launch.job import Pipeline
from lt_launch.machine import describe_machine, machine_findings
from lt_launch.node import Node
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import Finding, RenderedLaunch, TargetNode
from lt_trainer.config.section import Section, option
from lt_trainer.errors import RecipeError


class SshOptions(Section, table="ssh"):
    """Options in the table [ssh] of a profile."""

    hostfile: str = option("", "path of a hostfile")
    hosts: tuple[str, ...] = option((), "lines of a hostfile, in place of a file")
    ssh_args: tuple[str, ...] = option((), 'extra arguments of the ssh command, such as ["-i", "~/key"]')
    connect_timeout_s: float = option(30.0, "time within which every host must answer", unit="s", ge=1)
    link_timeout_s: float = option(15.0, "silence after which a host or the launcher counts as lost", unit="s", ge=3)

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


class SshTransport(Transport):
    """Transport over one ssh connection per host and attempt."""

    def __init__(self, options: SshOptions, python: str) -> None:
        self.connect_timeout_s, self.options, self.python = options.connect_timeout_s, options, python

    def address(self, host: Host) -> str:
        """Return the host's address."""
        return host.address

    def slots(self, host: Host) -> int:
        """Return the host's slots in the hostfile; a host without slots runs one stage at a time."""
        return host.slots or 1

    def open_node(self, host: Host, spec: Mapping[str, Any], folder: Path) -> Node:
        """Connect to a host."""
        silence = self.options.link_timeout_s
        return Node(self.argv(host), folder, float(spec["grace_s"]), python=self.python, silence_s=silence)

    def argv(self, host: Host, command: str = "exec bash -s") -> list[str]:
        """Return the command line that runs a shell's command on a host, without terminal, password or prompt."""
        alive = f"ServerAliveInterval={max(1, int(self.options.link_timeout_s / 3))}"
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={round(self.connect_timeout_s)}"]
        words += ["-o", alive, "-o", "ServerAliveCountMax=3", *self.options.ssh_args]
        words += ["-p", str(host.port)] if host.port else []
        words += ["-l", host.user] if host.user else []
        return [*words, "--", host.address, command]

    def look(self, host: Host, folder: str, token: str = "") -> Mapping[str, Any]:
        """Return the description of a host (`look`), or {"problem": ...}."""
        program = f"{inspect.getsource(look_module)}\nimport json\nprint(json.dumps(look({folder!r}, {token!r})))\n"
        command = self.argv(host, f"exec {shlex.quote(self.python)} -")
        limit_s = self.connect_timeout_s + 60
        try:
            done = subprocess.run(
                command, input=program, capture_output=True, text=True, errors="replace", timeout=limit_s, check=True
            )
            return json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer within {limit_s:.0f} s"}
        except subprocess.CalledProcessError as exc:
            return {"problem": (exc.stderr.strip().splitlines() or [f"exit code {exc.returncode}"])[-1]}


class SshTarget(DrivenTarget):
    """Launch target for hosts reached over ssh."""

    name = "ssh"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the specs of the stages, the hosts in rank order, and the ssh command lines."""
        hosts, transport = self.hosts_and_transport(profile)
        files = {}
        for name, values in self.stage_specs(pipeline, profile, cwd="").items():
            files[f"{name}.spec.json"] = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
            job = pipeline.stage(name).job
            if job.recipe:
                files[f"{name}.recipe.toml"] = job.recipe
            if job.nodes > len(hosts):
                raise LaunchError(f"stage {name} needs {job.nodes} hosts and the hostfile has {len(hosts)}")
            rows = [
                f"{host.name}  # node {node}, ranks {first} to {first + job.procs_per_node - 1}\n"
                for node, host in enumerate(hosts[: job.nodes])
                for first in [node * job.procs_per_node]
            ]
            files[f"{name}.hosts"] = "".join(rows)
        max_nodes = max(stage.job.nodes for stage in pipeline.stages)
        used = hosts if any(stage.array for stage in pipeline.stages) else hosts[:max_nodes]
        comments = (
            "what a host runs follows on standard input; ranks meet at the first host's address",
            f"output and exit codes of processes are kept in {pipeline.out}/launch/stages, which all hosts share",
            f"a host counts as lost after {transport.options.link_timeout_s:g} s of silence",
        )
        return RenderedLaunch(
            files=files, commands=tuple(tuple(transport.argv(host)) for host in used), comments=comments
        )

    def stage_specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """Return the specs by stage."""
        hosts, _ = self.hosts_and_transport(profile)
        for stage in pipeline.stages:
            job = stage.job
            if job.container.image:
                raise RecipeError(
                    f"stage {stage.name} cannot run over ssh",
                    values={"job.container.image": job.container.image},
                    remedy="use no image: put the container's command into argv",
                )
            too_small = [host for host in hosts[: job.nodes] if host.slots and host.slots < job.procs_per_node]
            if too_small:
                raise LaunchError(
                    f"stage {stage.name} starts {job.procs_per_node} processes on a host and {too_small[0].name} has "
                    f"slots={too_small[0].slots}; lower --nproc-per-node, or raise slots"
                )
        return {stage.name: stage_spec(stage, pipeline, profile, cwd=cwd) for stage in pipeline.stages}

    def hosts_and_transport(self, profile: Profile) -> tuple[tuple[Host, ...], SshTransport]:
        """Return the hosts and the transport that reaches them."""
        options = profile.options("ssh", SshOptions)
        return resolve_hosts(options), SshTransport(options, profile.get_python("python3"))

    def nodes(self, profile: Profile) -> Iterator[TargetNode]:
        """Yield every host with its reachability and hardware."""
        hosts, transport = self.hosts_and_transport(profile)
        for host, answer in zip(hosts, _look_at_all(hosts, transport, "", ""), strict=True):
            if "problem" in answer:
                yield TargetNode(name=host.name, state="unreachable", reason=answer["problem"])
            else:
                yield TargetNode(name=host.name, state="up", devices=describe_machine(answer))

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check versions, devices, disk and the shared folder of every host."""
        hosts, transport = self.hosts_and_transport(profile)
        folder, token = Path(pipeline.out if pipeline else ".").absolute(), f".lt-doctor-{secrets.token_hex(8)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / token).touch()
        try:
            answers = _look_at_all(hosts, transport, str(folder), token)
        finally:
            (folder / token).unlink()
        for host, answer in zip(hosts, answers, strict=True):
            if "problem" in answer:
                remedy = f"try: ssh {host.address} {transport.python} --version"
                yield Finding(level="error", check="ssh", detail=answer["problem"], remedy=remedy, host=host.name)
                continue
            yield from machine_findings(answer, pipeline, host=host.name)
            if answer["sees_token"]:
                yield Finding(level="ok", check="shared folder", detail=str(folder), host=host.name)
            else:
                detail, remedy = f"{folder} is not the folder of this machine", "mount the same file system there"
                yield Finding(level="error", check="shared folder", detail=detail, remedy=remedy, host=host.name)
        packages = {
            host.name: one["packages"] for host, one in zip(hosts, answers, strict=True) if "problem" not in one
        }
        for name in sorted({name for versions in packages.values() for name in versions}):
            versions = {host: versions.get(name, "missing") for host, versions in packages.items()}
            if len(set(versions.values())) > 1:
                text = ", ".join(f"{host}: {version}" for host, version in versions.items())
                yield Finding(
                    level="error", check=f"{name} differs", detail=text, remedy="install one version everywhere"
                )


def _look_at_all(
    hosts: Sequence[Host], transport: SshTransport, folder: str, token: str
) -> Sequence[Mapping[str, Any]]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda host: transport.look(host, folder, token), hosts))
