"""Target `local`: processes on this machine, children of the launch command.

If that command dies, the shell beside the processes ends them (`node`), so that none is orphaned. With `--detach` a
background process launches them instead.
"""

import json
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lt_launch.attempt import Transport
from lt_launch.driver import DrivenTarget
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.node_commands import node_commands
from lt_launch.policy import Place
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import Finding, RenderedLaunch, TargetNode
from lt_trainer.config.section import Section, option
from lt_trainer.errors import RecipeError


class LocalOptions(Section, table="local"):
    """Options in the table [local] of a profile."""

    slots: int = option(0, "processes that may run in parallel; 0 = one per core", ge=0)


class LocalTarget(DrivenTarget):
    """Launch target for processes on this machine."""

    name = "local"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the specs of the stages and the command lines of their processes."""
        files: dict[str, str] = {}
        commands: dict[tuple[str, ...], None] = {}
        out = str(Path(pipeline.out).absolute())
        for name, values in self.stage_specs(pipeline, profile, cwd="").items():
            files[f"{name}.spec.json"] = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
            stage = pipeline.stage(name)
            if stage.job.recipe:
                files[f"{name}.recipe.toml"] = stage.job.recipe
            for index in stage.array_indices:
                place = Place(Path(f"{out}/launch/stages/{name}/spec.json"), index)
                for order in node_commands(values, place, 0, 0, ("127.0.0.1", "PORT")):
                    commands[tuple(word.replace(out, pipeline.out) for word in order["argv"])] = None
        comments = (
            "PORT is a free port; each process of a stage without torchrun has torchrun's variables",
            f"output and exit codes of processes are kept in {pipeline.out}/launch/stages",
        )
        return RenderedLaunch(files=files, commands=tuple(commands), comments=comments)

    def stage_specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """Return the specs by stage."""
        profile.options("local", LocalOptions)
        for stage in pipeline.stages:
            if stage.job.nodes > 1 or stage.job.container.image:
                raise RecipeError(
                    f"stage {stage.name} cannot run on this machine alone",
                    values={"job.nodes": stage.job.nodes, "job.container.image": stage.job.container.image},
                    remedy="set nodes to 1 and no image; or choose another target",
                )
        return {
            stage.name: stage_spec(stage, pipeline, profile, python=sys.executable, cwd=cwd)
            for stage in pipeline.stages
        }

    def hosts_and_transport(self, profile: Profile) -> tuple[tuple[Host, ...], Transport]:
        """Return this machine and the transport that starts processes on it."""
        options = profile.options("local", LocalOptions)
        return (Host(name=socket.gethostname()),), Transport(options.slots)

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Return this machine."""
        from lt_launch.look import look
        from lt_launch.machine import describe_machine

        machine = look("")
        return [TargetNode(name=machine["host"], state="here", devices=describe_machine(machine))]

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check versions, devices, disk and port."""
        from lt_launch.look import look
        from lt_launch.machine import machine_findings

        folder = Path(pipeline.out if pipeline else ".").absolute()
        yield from machine_findings(look(str(folder)), pipeline)
