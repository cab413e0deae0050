"""The target `local`: processes on this machine, under one agent, watched by the command that started them.

When that command dies, the agent sees its standard input end and stops the processes: nothing is left behind. In the
background (`--detach`) a process of its own takes the command's place.
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

from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus
from lt_launch.boot import BOOT
from lt_launch.hosts import Host
from lt_launch.job import Pipeline
from lt_launch.profile import Profile
from lt_launch.spec import spec
from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["LocalBackend", "LocalOptions", "LocalTransport", "backend", "devices"]


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """The table [local] of a profile."""

    lost_grace_s: float = option(3.0, "from the launcher's death until processes are killed", unit="s")
    slots: int = option(0, "processes that may run side by side; 0 = one for each core")

    def __post_init__(self) -> None:
        check_types(self, "local")
        if self.slots < 0:
            raise RecipeError(
                "must be at least 0", values={"local.slots": self.slots}, remedy="leave it out for one for each core"
            )


class LocalTransport:
    """Agents as children of the launcher."""

    link_timeout_s = 0.0
    connect_timeout_s = 60.0
    carries_files = False

    def __init__(self, slots: int = 0) -> None:
        self._places = slots or os.cpu_count() or 1
        self.memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30

    def argv(self, host: Host) -> list[str]:
        """Start `boot` with this interpreter."""
        return [sys.executable, "-c", BOOT]

    def places(self, host: Host) -> int:
        """The profile's slots, else cores."""
        return self._places


class LocalBackend:
    """Processes on this machine."""

    name = "local"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """The specs of the stages, and the agents' command lines."""
        files, commands = {}, []
        for name, values in self.specs(pipeline, profile, cwd="").items():
            files[f"{name}.spec.json"] = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
            stage = pipeline.stage(name)
            if stage.job.recipe:
                files[f"{name}.recipe.toml"] = stage.job.recipe
            for index in stage.indexes:
                launch = f"{pipeline.out}/launch"
                words = [values["argv"][0] if stage.job.argv[0] == "python" else "python3", f"{launch}/agent", "node"]
                words += [f"{launch}/stages/{name}/spec.json", "--attempt", "0", "--node-rank", "0"]
                words += ["--master-addr", "127.0.0.1", "--master-port", "PORT", "--control"]
                commands.append(tuple(words if index is None else [*words, "--index", str(index)]))
        return Rendered(files=files, commands=tuple(commands), remarks=("PORT is a free one, found at the start",))

    def specs(self, pipeline: Pipeline, profile: Profile, *, cwd: str) -> dict[str, dict[str, Any]]:
        """What the agent gets, by stage."""
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
            stage.name: spec(
                stage, pipeline, profile, python=sys.executable, cwd=cwd, lost_grace_s=options.lost_grace_s
            )
            for stage in pipeline.stages
        }

    def reach(self, profile: Profile) -> tuple[tuple[Host, ...], LocalTransport]:
        """This machine, and how to start agents on it."""
        options = profile.options("local", LocalOptions)
        return (Host(name=socket.gethostname()),), LocalTransport(options.slots)

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run it to its end, or in the background."""
        from lt_launch.driver import submit

        return submit(launch, detach=detach)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """From the launch's own records."""
        from lt_launch.recorded import status

        return status(launch)

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """From the attempt's folder."""
        from lt_launch.recorded import logs

        return logs(launch, stage=stage, rank=rank, follow=follow)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """A stop signal to the process that runs it."""
        from lt_launch.driver import cancel

        return cancel(launch)

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Nothing beyond the launches that this machine lists itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """This machine."""
        from lt_launch.agent.look import look
        from lt_launch.machine import describe

        found = look("")
        return [Node(name=found["host"], state="here", devices=describe(found))]

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Versions, devices, disk, port."""
        from lt_launch.agent.look import look
        from lt_launch.machine import findings

        folder = Path(pipeline.out if pipeline else ".").absolute()
        yield from findings(look(str(folder)), pipeline)


def devices(root: Path = Path("/dev"), environ: Mapping[str, str] | None = None) -> int:
    """Accelerators that a process here would see: NVIDIA devices, else Neuron cores' devices."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and not word.strip().startswith("-")])
    return sum(1 for path in root.glob("nvidia*") if path.name[len("nvidia") :].isdigit())


def backend() -> LocalBackend:
    """The target."""
    return LocalBackend()
