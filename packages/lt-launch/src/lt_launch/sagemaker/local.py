"""The target `sagemaker-local`: the same request, kept by `emulator` with processes of this machine, without docker.

Local paths take the place of S3: a path in `sagemaker.channels` or in the recipe becomes an address below s3://local/,
and `sagemaker.folders` says what stands for other addresses. Role, image and instance type may be left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_launch.agent.places import read_table, write_table
from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus
from lt_launch.job import Job, Pipeline, for_containers
from lt_launch.profile import Profile
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions, pairs
from lt_launch.sagemaker.request import channel_of, request
from lt_launch.sagemaker.target import REQUEST, stage_status
from lt_trainer.fields import flatten

__all__ = ["LocalSageMaker"]

LOCAL = "s3://local"
ADDRESSES = "addresses.json"
ENDED = ("Completed", "Failed", "Stopped")
TAIL = 1 << 16
BACKGROUND: list[subprocess.Popen[bytes]] = []
"""Jobs that go on by themselves; kept, because Python complains of a process that it forgets while it runs."""


class LocalSageMaker:
    """SageMaker's contract on this machine."""

    name = "sagemaker-local"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """The request, and which folders stand for its addresses (relative to the launch, or absolute)."""
        options = profile.options("sagemaker", SageMakerOptions)
        job = for_containers(pipeline.only, target="SageMaker", env=profile.env)
        job, localized, folders = localize(job, options)
        made = request(job, localized)
        files = {REQUEST: json.dumps(made, indent=1) + "\n", ADDRESSES: json.dumps(folders, indent=1) + "\n"}
        commands = ((sys.executable, "-m", "lt_launch.sagemaker.emulator", "."),)
        return Rendered(files=files, commands=commands, notes=profile.left_out_of_containers)

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run it to its end here, or in the background."""
        base = launch.directory / "sagemaker"
        made = json.loads(rendered.files[REQUEST])
        number = len(list(base.glob("job-*"))) if base.is_dir() else 0
        folder = base / f"job-{number:03}"
        folder.mkdir(parents=True)
        folders = {}
        for address, path in json.loads(rendered.files[ADDRESSES]).items():
            folders[address] = str(base / path)
            if not Path(path).is_absolute():
                (base / path).mkdir(exist_ok=True)
        write_table(folder / REQUEST, made)
        write_table(folder / ADDRESSES, folders)
        stage = launch.pipeline.only.name
        with open(folder / "emulator.log", "ab") as log:
            service = subprocess.Popen(
                [sys.executable, "-m", "lt_launch.sagemaker.emulator", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (folder / "pid").write_text(str(service.pid), encoding="ascii")
        while not (folder / "job.json").exists() and service.poll() is None:  # from then on it takes a stop signal
            time.sleep(0.02)
        if detach:
            BACKGROUND.append(service)
            return {stage: folder.name}, 0
        return {stage: folder.name}, _attend(service, folder)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """From what the emulator keeps."""
        stage = launch.pipeline.only.name
        folder = self._folder(launch)
        found = read_table(folder / "job.json")
        if found is None:
            return (StageStatus(stage=stage, state="waiting", id=folder.name, reason="not begun"),)
        status = replace(stage_status(stage, found), id=folder.name, said=_last_lines(folder / "logs" / "algo-1.log"))
        if found["TrainingJobStatus"] not in ENDED and not _runs(folder):
            status = replace(status, state="lost", reason="the process that stands for the service is gone")
        return (status,)

    def running(self, launch: Launch) -> str:
        """The job of an earlier launch that has not ended; "" where there is none."""
        base = launch.directory / "sagemaker"
        return ", ".join(folder.name for folder in sorted(base.glob("job-*")) if _runs(folder))

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """What the container wrote in which a rank is."""
        job, folder = launch.pipeline.only, self._folder(launch)
        path = folder / "logs" / f"algo-{rank // job.procs_per_node + 1}.log"
        at = 0
        while True:
            over = not follow or not _runs(folder)
            data = path.read_bytes()[at:] if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            at += len(whole)
            yield from (line.decode("utf-8", "replace") for line in whole.split(b"\n")[:-1])
            if over:
                return
            time.sleep(0.2)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """SIGTERM to the containers, 120 s, SIGKILL."""
        folder = self._folder(launch)
        if not _runs(folder):
            return ["it does not run"]
        os.kill(int((folder / "pid").read_text(encoding="ascii")), signal.SIGTERM)
        return [f"{folder.name} was told to save and stop; it has 120 s"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Nothing beyond the launches that this machine lists itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """This machine."""
        return [Node(name=os.uname().nodename, state="here")]

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """The request's limits, and whether containers can be cut off from the network."""
        from lt_launch.sagemaker.doctor import local_findings

        return local_findings(self, profile, pipeline)

    def _folder(self, launch: Launch) -> Path:
        name = launch.ids.get(launch.pipeline.only.name, "")
        base = launch.directory / "sagemaker"
        made = sorted(base.glob("job-*")) if base.is_dir() else []
        if not name and not made:
            raise SageMakerError(f"{launch.directory.parent}: the job was not begun")
        return base / name if name else made[-1]


def localize(job: Job, options: SageMakerOptions) -> tuple[Job, SageMakerOptions, dict[str, str]]:
    """A job and options that the request takes, with local paths as addresses, and the folder of each address."""
    folders = pairs(options.folders, "sagemaker.folders")
    channels = pairs(options.channels, "sagemaker.channels")
    values = flatten(tomllib.loads(job.recipe)) if job.recipe else {}
    for name, value in values.items():
        if channel_of(name) and value and not str(value).startswith("s3://"):
            channels.setdefault(channel_of(name), str(value))
    if job.nodes > 1:
        channels.setdefault("run", f"{LOCAL}/run")
        folders.setdefault(f"{LOCAL}/run", "run")
    for name, source in channels.items():
        if "://" not in source:
            path = Path(source).absolute()
            channels[name] = f"{LOCAL}{path}"
            folders[channels[name]] = str(path)
    checkpoints = options.checkpoints or f"{LOCAL}/checkpoints"
    folders.setdefault(checkpoints, "checkpoints")
    output = options.output or f"{LOCAL}/output"
    resources = replace(job.resources, instance_type=job.resources.instance_type or "ml.m5.xlarge")
    made = replace(
        options,
        role=options.role or "arn:aws:iam::000000000000:role/local",
        image=options.image or ("" if options.algorithm else "local"),
        channels=tuple(f"{name}={source}" for name, source in channels.items()),
        checkpoints=checkpoints,
        output=output,
    )
    return replace(job, resources=resources), made, folders


def _last_lines(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return tuple(file.read().decode("utf-8", "replace").splitlines())


def _attend(service: subprocess.Popen[bytes], folder: Path) -> int:
    """Show rank 0's container until the job has ended; stop signals stop the job. The exit code of the launch."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: service.poll() is None and service.terminate())
    path, at = folder / "logs" / "algo-1.log", 0
    while True:
        over = service.poll() is not None
        data = path.read_bytes()[at:] if path.exists() else b""
        at += len(data)
        sys.stdout.write(data.decode("utf-8", "replace"))
        sys.stdout.flush()
        if over:
            break
        time.sleep(0.1)
    found: dict[str, Any] = read_table(folder / "job.json") or {}
    status = found.get("TrainingJobStatus", "Failed")
    sys.stderr.write(f"# {status}: {found.get('FailureReason') or found.get('SecondaryStatus', '')}\n")
    return {"Completed": 0, "Stopped": 75}.get(status, 70)


def _runs(folder: Path) -> bool:
    """Whether the process that stands for the service is there."""
    for service in BACKGROUND:
        service.poll()  # buried, if it was this process's own
    file = folder / "pid"
    if not file.exists():
        return False
    pid = int(file.read_text(encoding="ascii"))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text(encoding="utf-8").rpartition(") ")[2][:1] != "Z"
