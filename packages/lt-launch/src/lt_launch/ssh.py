"""The target `ssh`: hosts that the ssh command reaches, with a person's own ~/.ssh/config, agent and jump hosts.

Each node's agent runs at the other end of one ssh connection and takes its orders from it. When the launcher dies the
connection closes and the agent stops its processes; when the link is cut, no beat comes for `link_timeout_s` and it
does the same. No terminal is asked for, so that output and errors stay apart.

The environment of the launcher is not handed on: variables come from the profile, the job, `--env` and the hostfile,
and secrets by name (`pass_env`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.spec import spec
from lt_launch.ssh_link import SshOptions, SshTransport, hosts_of
from lt_trainer.errors import RecipeError

__all__ = ["SshBackend", "SshOptions", "SshTransport", "backend", "hosts_of"]


class SshBackend:
    """Hosts over ssh."""

    name = "ssh"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """The specs of the stages, the hosts in rank order, and the ssh command lines."""
        options, hosts, transport = self._facts(profile)
        files, commands = {}, []
        for name, values in self.specs(pipeline, profile, cwd="").items():
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
        widest = max(stage.job.nodes for stage in pipeline.stages)
        used = hosts if any(stage.array for stage in pipeline.stages) else hosts[:widest]
        commands = [tuple(transport.argv(host)) for host in used]
        remarks = (
            "the agent, the spec and the recipe follow on standard input; ranks meet at the first host's address",
            f"a host counts as lost after {options.link_timeout_s:g} s of silence",
        )
        return Rendered(files=files, commands=tuple(commands), remarks=remarks)

    def specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """What the agents get, by stage."""
        options, hosts, _ = self._facts(profile)
        for stage in pipeline.stages:
            job = stage.job
            if job.spawner == "srun" or job.container.image:
                raise RecipeError(
                    f"stage {stage.name} cannot run over ssh",
                    values={"job.spawner": job.spawner, "job.container.image": job.container.image},
                    remedy="use spawner direct or torchrun, and no image: put the container's command into argv",
                )
            small = [host for host in hosts[: job.nodes] if host.slots and host.slots < job.procs_per_node]
            if small:
                raise LaunchError(
                    f"stage {stage.name} starts {job.procs_per_node} processes on a host and {small[0].name} has "
                    f"slots={small[0].slots}; lower --nproc-per-node, or raise slots"
                )
        return {
            stage.name: spec(
                stage,
                pipeline,
                profile,
                cwd=cwd,
                link_timeout_s=options.link_timeout_s,
                lost_grace_s=options.lost_grace_s,
            )
            for stage in pipeline.stages
        }

    def reach(self, profile: Profile) -> tuple[tuple[Host, ...], SshTransport]:
        """The hosts, and how to reach them."""
        _, hosts, transport = self._facts(profile)
        return hosts, transport

    def _facts(self, profile: Profile) -> tuple[SshOptions, tuple[Host, ...], SshTransport]:
        options = profile.options("ssh", SshOptions)
        return options, hosts_of(options), SshTransport(options, profile.python)

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run it to its end from here, or from a process in the background."""
        from lt_launch.driver import submit

        return submit(launch, detach=detach)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """From the launch's own records."""
        from lt_launch.recorded import status

        return status(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """From the attempt's folder; where the host does not share it, from there."""
        from lt_launch.recorded import logs

        return logs(launch, stage=stage, rank=rank, follow=follow, fetch=self._fetch(launch))

    def _fetch(self, launch: Launch) -> Any:
        _, hosts, transport = self._facts(launch.profile)

        def fetch(host: str, path: str, follow: bool) -> list[str]:
            found = next((one for one in hosts if one.name == host), None)
            if found is None:
                raise LaunchError(f"host {host} is not in the hostfile any more; its logs are in {path} there")
            return transport.ssh(found, ["tail", "-n", "+1", *(["-F"] if follow else []), path])

        return fetch

    def cancel(self, launch: Launch) -> Iterable[str]:
        """A stop signal to the process that runs it."""
        from lt_launch.driver import cancel

        return cancel(launch)

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Nothing beyond the launches that this machine lists itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """Every host: whether it answers, and what it has."""
        from lt_launch.machine import describe
        from lt_launch.ssh_doctor import survey

        _, hosts, transport = self._facts(profile)
        for host, answer in survey(hosts, transport, folder=""):
            if "problem" in answer:
                yield Node(name=host.name, state="unreachable", reason=answer["problem"])
            else:
                yield Node(name=host.name, state="up", devices=describe(answer))

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Of every host: versions, devices, disk, the shared folder, ports, the clock."""
        from lt_launch.ssh_doctor import doctor

        _, hosts, transport = self._facts(profile)
        yield from doctor(hosts, transport, pipeline)


def backend() -> SshBackend:
    """The target."""
    return SshBackend()
