"""Target `sagemaker-local`: the same request, run by `emulator` with local processes, without docker.

Local paths replace S3: a path in `sagemaker.channels` or in the recipe becomes an address below s3://local/, and
`sagemaker.local_folders` maps other addresses, with all below them, to folders: of channels, checkpoints and output.
Role, image and instance type are optional.
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

from lt_launch.job import Job, Pipeline, with_container_env
from lt_launch.job_output import format_lines
from lt_launch.launch_dir import check_own, read_log
from lt_launch.policy import open_for_appending, read_bytes, read_table, write_table, write_text
from lt_launch.process_start import identify_process, process_start
from lt_launch.profile import Profile
from lt_launch.sagemaker.addresses import channel_address, local_folder
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions, parse_pairs
from lt_launch.sagemaker.request import channel_for_field, create_training_job_request
from lt_launch.sagemaker.target import REQUEST_FILE, to_stage_status, unique_job_name
from lt_launch.target import Finding, Launch, RenderedLaunch, StageStatus, TargetNode
from lt_trainer.config.section import flatten

__all__ = ["SageMakerLocalTarget"]

LOCAL_S3 = "s3://local"
LOCAL_IMAGE = "000000000000.dkr.ecr.{}.amazonaws.com/local:1"
"""Stand-in for an image, in the region of the profile; nothing is pulled."""
ADDRESSES_FILE = "addresses.json"
TERMINAL_STATUSES = ("Completed", "Failed", "Stopped")
TAIL_BYTES = 1 << 16
BACKGROUND_PROCESSES: list[subprocess.Popen[bytes]] = []
"""Emulators of detached jobs; referenced to avoid the ResourceWarning of a running child."""


class SageMakerLocalTarget:
    """Launch target that emulates SageMaker's contract on this machine."""

    name = "sagemaker-local"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the request and the folder of each address (relative to the launch, or absolute)."""
        options = profile.options("sagemaker", SageMakerOptions)
        job = with_container_env(pipeline.single_job, target="SageMaker", env=profile.env)
        job, localized, folders = map_to_local_folders(job, options)
        request = create_training_job_request(job, localized, emulated=True)
        files = {
            REQUEST_FILE: json.dumps(request, indent=1) + "\n",
            ADDRESSES_FILE: json.dumps(folders, indent=1) + "\n",
        }
        commands = ((sys.executable, "-P", "-m", "lt_launch.sagemaker.emulator", "."),)
        return RenderedLaunch(files=files, commands=commands, notes=profile.container_notes)

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Run the job to its end here, or in the background."""
        base = launch.directory / "sagemaker"
        request = json.loads(rendered.files[REQUEST_FILE])
        request["TrainingJobName"] = unique_job_name(request["TrainingJobName"])
        number = len(list(base.glob("job-*"))) if base.is_dir() else 0
        folder = base / f"job-{number:03}"
        folder.mkdir(parents=True)
        folders = {}
        for address, path in json.loads(rendered.files[ADDRESSES_FILE]).items():
            folders[address] = str(base / path)
            if not Path(path).is_absolute():
                (base / path).mkdir(exist_ok=True)
        write_table(folder / REQUEST_FILE, request)
        write_table(folder / ADDRESSES_FILE, folders)
        stage = launch.pipeline.single_job.name
        with os.fdopen(open_for_appending(folder / "emulator.log"), "ab") as log:
            service = subprocess.Popen(
                [sys.executable, "-P", "-m", "lt_launch.sagemaker.emulator", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write_text(folder / "pid", f"{service.pid} {process_start(service.pid)}")
        while not (folder / "job.json").exists() and service.poll() is None:  # from then on it handles a stop signal
            time.sleep(0.02)
        if detach:
            BACKGROUND_PROCESSES.append(service)
            return {stage: folder.name}, 0
        return {stage: folder.name}, _follow_job(service, folder)

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from the emulator's files."""
        stage = launch.pipeline.single_job.name
        folder = self._folder(launch)
        description = read_table(folder / "job.json")
        if description is None:
            return (StageStatus(stage=stage, state="pending", job_id=folder.name, reason="not started"),)
        status = replace(
            to_stage_status(stage, description),
            job_id=folder.name,
            log_tail=_tail_lines(folder / "logs" / "algo-1.log"),
        )
        if description.get("TrainingJobStatus") not in TERMINAL_STATUSES and not _is_running(folder):
            status = replace(status, state="lost", reason="the emulator process is gone")
        return (status,)

    def running_jobs(self, launch: Launch) -> str:
        """Return the names of unfinished jobs of an earlier launch, or ""."""
        base = launch.directory / "sagemaker"
        return ", ".join(folder.name for folder in sorted(base.glob("job-*")) if _is_running(folder))

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield the log lines of a rank's container."""
        job, folder = launch.pipeline.single_job, self._folder(launch)
        path = folder / "logs" / f"algo-{rank // job.procs_per_node + 1}.log"
        offset = 0
        while True:
            is_last = not follow or not _is_running(folder)
            data = read_log(path, offset)
            complete = data[: data.rfind(b"\n") + 1]
            offset += len(complete)
            yield from (line.decode("utf-8", "replace") for line in complete.split(b"\n")[:-1])
            if is_last:
                return
            time.sleep(0.2)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Send SIGTERM to the containers; SIGKILL follows after 120 s."""
        folder = self._folder(launch)
        if not _is_running(folder):
            return ["it is not running"]
        check_own(launch.directory)
        os.kill(_process_id(folder), signal.SIGTERM)
        return [f"{folder.name} was signaled to save and stop; it has 120 s"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return an empty list: this machine lists its launches itself."""
        return ()

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Return this machine."""
        return [TargetNode(name=os.uname().nodename, state="here")]

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check the request's limits and the support for network isolation."""
        from lt_launch.sagemaker.doctor import local_findings

        return local_findings(self, profile, pipeline)

    def _folder(self, launch: Launch) -> Path:
        name = launch.job_ids.get(launch.pipeline.single_job.name, "")
        base = launch.directory / "sagemaker"
        jobs = sorted(base.glob("job-*")) if base.is_dir() else []
        if not name and not jobs:
            raise SageMakerError(f"{launch.directory.parent}: the job was not started")
        return base / name if name else jobs[-1]


def map_to_local_folders(job: Job, options: SageMakerOptions) -> tuple[Job, SageMakerOptions, dict[str, str]]:
    """Return job and options with local paths as addresses, and the folder of each address."""
    given = parse_pairs(options.local_folders, "sagemaker.local_folders")
    given = {address: str(Path(folder).expanduser().absolute()) for address, folder in given.items()}
    channels = parse_pairs(options.channels, "sagemaker.channels")
    values = flatten(tomllib.loads(job.recipe)) if job.recipe else {}
    for name, value in values.items():
        if channel_for_field(name) and value and not str(value).startswith("s3://"):
            channels.setdefault(channel_for_field(name), str(value))
    if job.nodes > 1:
        channels.setdefault("run", f"{LOCAL_S3}/run")
    folders: dict[str, str] = {}
    for name, source in channels.items():
        if "://" not in source:
            path = Path(source).absolute()
            channels[name] = f"{LOCAL_S3}{path}"
            folders[channels[name]] = str(path)
            continue
        address = channel_address(source)
        folder = local_folder(address, given) or ("run" if source == f"{LOCAL_S3}/run" else "")
        if not folder:
            raise SageMakerError(
                f"sagemaker.channels, {name}={source}: no folder of this machine stands for it; add "
                f'"{address}=/PATH" to sagemaker.local_folders'
            )
        folders[address] = folder
    checkpoints = options.checkpoint_s3_uri or f"{LOCAL_S3}/checkpoints"
    folders[checkpoints] = local_folder(checkpoints, given) or "checkpoints"
    output = options.output_path or f"{LOCAL_S3}/output"
    if folder := local_folder(output, given):
        folders[output] = folder
    resources = job.resources.model_copy(update={"instance_type": job.resources.instance_type or "ml.m5.xlarge"})
    changes = {
        "role": options.role or "arn:aws:iam::000000000000:role/local",
        "image": options.image or ("" if options.algorithm else LOCAL_IMAGE.format(options.region or "us-east-1")),
        "channels": tuple(f"{name}={source}" for name, source in channels.items()),
        "checkpoint_s3_uri": checkpoints,
        "output_path": output,
    }
    local_options = options.model_copy(update=changes)
    return job.model_copy(update={"resources": resources}), local_options, folders


def _tail_lines(path: Path) -> tuple[str, ...]:
    size = path.stat().st_size if path.exists() else 0
    return tuple(read_log(path, max(0, size - TAIL_BYTES)).decode("utf-8", "replace").splitlines())


def _follow_job(service: subprocess.Popen[bytes], folder: Path) -> int:
    """Show the log of rank 0's container until the job ends; return the launch's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: service.poll() is None and service.terminate())
    path, offset = folder / "logs" / "algo-1.log", 0
    while True:
        is_last = service.poll() is not None
        data = read_log(path, offset)
        complete = data if is_last else data[: data.rfind(b"\n") + 1]
        offset += len(complete)
        if complete:
            sys.stdout.write(format_lines(complete.decode("utf-8", "replace"), sys.stdout))
            sys.stdout.flush()
        if is_last:
            break
        time.sleep(0.1)
    description: dict[str, Any] = read_table(folder / "job.json") or {}
    status = description.get("TrainingJobStatus", "Failed")
    reason = description.get("FailureReason") or description.get("SecondaryStatus", "")
    sys.stderr.write(format_lines(f"{status}: {reason}", sys.stderr, "# "))
    return {"Completed": 0, "Stopped": 75}.get(status, 70)


def _is_running(folder: Path) -> bool:
    """Return True if the emulator process is running."""
    for service in BACKGROUND_PROCESSES:
        service.poll()  # reap it if it is a child of this process
    return bool(_process_id(folder))


def _process_id(folder: Path) -> int:
    """Return the id of the emulator process, 0 if it has ended or the file is not ours."""
    try:
        return identify_process(read_bytes(folder / "pid").decode("ascii"))
    except (OSError, UnicodeDecodeError):
        return 0
