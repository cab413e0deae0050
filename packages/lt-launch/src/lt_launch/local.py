"""Target `local`: processes on this machine, under one agent, supervised by the launch command.

If that command dies, the agent reads the end of its standard input and stops the processes, so that none is orphaned.
With `--detach` a background process supervises them instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.boot import BOOT
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import Finding, Launch, RenderedLaunch, StageStatus, TargetNode
from lt_trainer.config import check_types, option
from lt_trainer.errors import RecipeError

__all__ = ["LocalOptions", "LocalTarget", "LocalTransport", "count_devices", "make_target"]


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options in the table [local] of a profile."""

    launcher_lost_grace_period_s: float = option(
        3.0, "time from the death of the launcher until processes are killed", unit="s", former_name="lost_grace_s"
    )
    slots: int = option(0, "processes that may run in parallel; 0 = one per core")

    def __post_init__(self) -> None:
        check_types(self, "local")
        if self.slots < 0:
            raise RecipeError(
                "must be at least 0", values={"local.slots": self.slots}, remedy="leave it out to use one per core"
            )


class LocalTransport:
    """Transport that starts agents as child processes of the launcher."""

    link_timeout_s = 0.0
    connect_timeout_s = 60.0
    copies_files = False

    def __init__(self, slots: int = 0) -> None:
        self._slots = slots or os.cpu_count() or 1
        self.memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30

    def argv(self, host: Host) -> list[str]:
        """Return the command that starts `boot` with this interpreter."""
        return [sys.executable, "-c", BOOT]

    def slots(self, host: Host) -> int:
        """Return the slots of the profile, else the number of cores."""
        return self._slots


class LocalTarget:
    """Launch target for processes on this machine."""

    name = "local"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the specs of the stages and the agents' command lines."""
        files, commands = {}, []
        for name, values in self.stage_specs(pipeline, profile, cwd="").items():
            files[f"{name}.spec.json"] = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
            stage = pipeline.stage(name)
            if stage.job.recipe:
                files[f"{name}.recipe.toml"] = stage.job.recipe
            for index in stage.array_indices:
                launch = f"{pipeline.out}/launch"
                words = [values["argv"][0] if stage.job.argv[0] == "python" else "python3", f"{launch}/agent", "node"]
                words += [f"{launch}/stages/{name}/spec.json", "--attempt", "0", "--node-rank", "0"]
                words += ["--master-addr", "127.0.0.1", "--master-port", "PORT", "--control"]
                commands.append(tuple(words if index is None else [*words, "--index", str(index)]))
        return RenderedLaunch(
            files=files, commands=tuple(commands), comments=("PORT is a free port, chosen at the start",)
        )

    def stage_specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """Return the agent's specs by stage."""
        options = profile.options("local", LocalOptions)
        for stage in pipeline.stages:
            if stage.job.nodes > 1 or stage.job.spawner == "srun" or stage.job.container.image:
                names = {"job.nodes": stage.job.nodes, "job.spawner": stage.job.spawner}
                raise RecipeError(
                    f"stage {stage.name} cannot run on this machine alone",
                    values={**names, "job.container.image": stage.job.container.image},
                    remedy="set nodes to 1, spawner to direct or torchrun, and no image; or choose another target",
                )
        return {
            stage.name: stage_spec(
                stage,
                pipeline,
                profile,
                python=sys.executable,
                cwd=cwd,
                lost_grace_s=options.launcher_lost_grace_period_s,
            )
            for stage in pipeline.stages
        }

    def hosts_and_transport(self, profile: Profile) -> tuple[tuple[Host, ...], LocalTransport]:
        """Return this machine and the transport that starts agents on it."""
        options = profile.options("local", LocalOptions)
        return (Host(name=socket.gethostname()),), LocalTransport(options.slots)

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run the launch to its end, or in the background."""
        from lt_launch.driver import submit

        return submit(launch, detach=detach)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from the launch directory."""
        from lt_launch.launch_dir_status import read_stage_statuses

        return read_stage_statuses(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield log lines from the attempts' folders."""
        from lt_launch.launch_dir_status import read_logs

        return read_logs(launch, stage=stage, rank=rank, follow=follow)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Send a stop signal to the process that runs the launch."""
        from lt_launch.driver import cancel

        return cancel(launch)

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return an empty list: this machine lists its launches itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Return this machine."""
        from lt_launch.agent.look import look
        from lt_launch.machine import describe_machine

        machine = look("")
        return [TargetNode(name=machine["host"], state="here", devices=describe_machine(machine))]

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check versions, devices, disk and port."""
        from lt_launch.agent.look import look
        from lt_launch.machine import machine_findings

        folder = Path(pipeline.out if pipeline else ".").absolute()
        yield from machine_findings(look(str(folder)), pipeline)


def count_devices(root: Path = Path("/dev"), environ: Mapping[str, str] | None = None) -> int:
    """Count the accelerators visible to a process: NVIDIA devices, else Neuron devices."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and not word.strip().startswith("-")])
    return sum(1 for path in root.glob("nvidia*") if path.name[len("nvidia") :].isdigit())


def make_target() -> LocalTarget:
    """Return the target."""
    return LocalTarget()
