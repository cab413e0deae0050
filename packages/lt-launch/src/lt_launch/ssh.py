"""Target `ssh`: hosts reached by the ssh command with the user's own configuration.

The user's ~/.ssh/config, ssh agent and jump hosts apply.

Each host's commands are started at the other end of one ssh connection (`ssh_node`, which says why ssh needs that). If
the launcher dies, the connection closes and they get SIGTERM and the grace time to save; if the link breaks, no
heartbeat arrives for `link_timeout_s`, with the same effect. No terminal is allocated, so that output and errors stay
separate.

The environment of the launcher is not forwarded: variables come from the profile, the job, `--env` and the hostfile,
and secrets by name (`pass_env`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.ssh_transport import SshOptions, SshTransport, resolve_hosts
from lt_launch.target import Finding, Launch, RenderedLaunch, StageStatus, TargetNode
from lt_trainer.errors import RecipeError

__all__ = ["SshOptions", "SshTarget", "SshTransport", "resolve_hosts"]


class SshTarget:
    """Launch target for hosts reached over ssh."""

    name = "ssh"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the specs of the stages, the hosts in rank order, and the ssh command lines."""
        options, hosts, transport = self._connection(profile)
        files, commands = {}, []
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
        commands = [tuple(transport.argv(host)) for host in used]
        comments = (
            "commands, recipe and lt_launch.ssh_node follow on standard input; ranks meet at the first host's address",
            f"output and exit codes of processes are kept in {pipeline.out}/launch/stages",
            f"a host counts as lost after {options.link_timeout_s:g} s of silence",
        )
        return RenderedLaunch(files=files, commands=tuple(commands), comments=comments)

    def stage_specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """Return the specs by stage."""
        _, hosts, _ = self._connection(profile)
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
        _, hosts, transport = self._connection(profile)
        return hosts, transport

    def _connection(self, profile: Profile) -> tuple[SshOptions, tuple[Host, ...], SshTransport]:
        options = profile.options("ssh", SshOptions)
        return options, resolve_hosts(options), SshTransport(options, profile.python)

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run the launch to its end, or in a background process."""
        from lt_launch.driver import submit

        return submit(launch, detach=detach)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from the launch directory."""
        from lt_launch.launch_dir_status import read_stage_statuses

        return read_stage_statuses(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders, over ssh if the host does not share them."""
        from lt_launch.launch_dir_status import read_logs

        return read_logs(
            launch, stage=stage, rank=rank, follow=follow, remote_command=self._remote_tail_command(launch)
        )

    def _remote_tail_command(self, launch: Launch) -> Any:
        def command(host: str, path: str, follow: bool) -> list[str]:
            _, hosts, transport = self._connection(launch.profile)  # only now: logs in a shared folder need no host
            match = next((candidate for candidate in hosts if candidate.name == host), None)
            if match is None:
                raise LaunchError(f"host {host} is no longer in the hostfile; its logs are in {path} there")
            return transport.ssh_argv(match, ["tail", "-n", "+1", *(["-F"] if follow else []), path])

        return command

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Send a stop signal to the process that runs the launch."""
        from lt_launch.driver import cancel

        return cancel(launch)

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return an empty list: this machine lists its launches itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Return every host with its reachability and hardware."""
        from lt_launch.machine import describe_machine
        from lt_launch.ssh_doctor import probe_hosts

        _, hosts, transport = self._connection(profile)
        for host, answer in probe_hosts(hosts, transport, folder=""):
            if "problem" in answer:
                yield TargetNode(name=host.name, state="unreachable", reason=answer["problem"])
            else:
                yield TargetNode(name=host.name, state="up", devices=describe_machine(answer))

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check versions, devices, disk, shared folder, ports and clock of every host."""
        from lt_launch.ssh_doctor import doctor

        _, hosts, transport = self._connection(profile)
        yield from doctor(hosts, transport, pipeline)
