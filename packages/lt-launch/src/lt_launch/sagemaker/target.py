"""Target `sagemaker`: a training job in AWS."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, with_container_env
from lt_launch.profile import Profile
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.request import create_training_job_request
from lt_launch.target import Finding, Launch, LaunchTarget, RenderedLaunch, StageState, StageStatus

REQUEST_FILE = "request.json"
STATES: Mapping[str, StageState] = {
    "InProgress": "running",
    "Completed": "completed",
    "Failed": "failed",
    "Stopping": "running",
    "Stopped": "cancelled",
    "Deleting": "cancelled",
}
PENDING_STATUSES = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "DownloadingTrainingImage")
RESTART_STATUSES = ("Interrupted", "Restarting")
RESUMED_STATUSES = (*RESTART_STATUSES, "MaxRuntimeExceeded", "MaxWaitTimeExceeded")
"""Saved, and resumed by the service or by another launch."""
POLL_S, NO_OUTPUT_NOTICE_S = 5.0, 30.0
MAX_NAME_PREFIX = 63 - len("-20260101-000000")
TAIL_LINES = 100
RIGHTS_REMEDY = "upload the store with lt data upload, log in, or see containers/iam/sagemaker-client.json"


class SageMakerTarget(LaunchTarget):
    """Launch target for training jobs on SageMaker."""

    name = "sagemaker"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render the request as JSON and the AWS CLI command that sends it."""
        job = with_container_env(pipeline.single_job, target="SageMaker", env=profile.env)
        request = create_training_job_request(job, profile.options("sagemaker", SageMakerOptions))
        return RenderedLaunch(
            files={REQUEST_FILE: json.dumps(request, indent=1) + "\n"},
            commands=(("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{REQUEST_FILE}"),),
            notes=profile.container_notes,
            comments=("training job names are unique: lt launch run appends the time",),
        )

    def submit(self, launch: Launch, rendered: RenderedLaunch) -> tuple[Mapping[str, str], int]:
        """Create the training job; an account has each name once, so the time is appended."""
        request = json.loads(rendered.files[REQUEST_FILE])
        name = f"{request['TrainingJobName'][:MAX_NAME_PREFIX]}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        _client(launch.profile).call("sagemaker", "create_training_job", **{**request, "TrainingJobName": name})
        return {launch.pipeline.single_job.name: name}, 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from DescribeTrainingJob."""
        stage, name, client = launch.pipeline.single_job.name, _job_name(launch), _client(launch.profile)
        if not name:
            return (StageStatus(stage=stage, state="pending", reason="not submitted"),)
        description = client.call("sagemaker", "describe_training_job", TrainingJobName=name)
        status = to_stage_status(stage, description)
        if description.get("TrainingStartTime"):
            try:
                tail = [
                    client.read_log_stream(stream, startFromHead=False, limit=TAIL_LINES)[0]
                    for stream in client.list_log_streams(name, "algo-1")[-1:]
                ]
                status = replace(status, log_tail=tuple(line for lines in tail for line in lines))
            except LaunchError as exc:  # no right to read the log
                status = replace(status, reason=f"{status.reason}; {exc}")
        return (status,)

    def running_jobs(self, launch: Launch) -> str:
        """Return the name of the unfinished training job of an earlier launch, or ""."""
        name = _job_name(launch)
        return name if name and _is_running(_client(launch.profile), name) else ""

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield the CloudWatch lines of a rank's host; without any, their future location."""
        from lt_launch.sagemaker.client import LOG_GROUP

        host, name = f"algo-{rank // launch.pipeline.single_job.procs_per_node + 1}", _job_name(launch)
        if not name:
            raise LaunchError(f"{launch.directory.parent}: the job was not submitted")
        client, tokens, quiet_since = _client(launch.profile), dict[str, str](), time.monotonic()
        while True:
            is_last, found = not follow or not _is_running(client, name), False
            for stream in client.list_log_streams(name, host):
                while lines := self._read(client, stream, tokens):
                    yield from lines
                    found = True
            if is_last:
                return
            quiet_since = time.monotonic() if found else quiet_since
            if time.monotonic() - quiet_since > NO_OUTPUT_NOTICE_S:
                quiet_since = float("inf")
                where = f"{LOG_GROUP}, streams {name}/{host}-..."
                yield f"# no output for {NO_OUTPUT_NOTICE_S:.0f} s; it will be in {where}"
            time.sleep(POLL_S)

    def _read(self, client: Any, stream: str, tokens: dict[str, str]) -> list[str]:
        lines, tokens[stream] = client.read_log_stream(stream, tokens.get(stream, ""))
        return lines

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Stop the training job: the containers get SIGTERM and 120 s to save."""
        name = _job_name(launch)
        if not name:
            return ["it was not submitted"]
        _client(launch.profile).call("sagemaker", "stop_training_job", TrainingJobName=name)
        return [f"{name} was signaled to save and stop; it has 120 s"]

    def doctor(self, profile: Profile, pipeline: Pipeline) -> Iterator[Finding]:
        """Check this user's rights to read and write in S3."""
        options, client = profile.options("sagemaker", SageMakerOptions), _client(profile)
        folders = {f"channel {name}": address for name, address in options.sources.items()}
        folders |= {"output": options.output_path, "checkpoints": options.checkpoint_s3_uri}
        for check, address in folders.items():
            if address.startswith("s3://"):
                problem = _s3_problem(client, address, write=check in ("output", "checkpoints"))
                level, remedy = ("error", RIGHTS_REMEDY) if problem else ("ok", "")
                yield Finding(level=level, check=check, detail=problem or address, remedy=remedy)
        if not options.checkpoint_s3_uri:
            text = "sagemaker.checkpoint_s3_uri is not set: a stopped job loses its progress"
            yield Finding(level="warning", check="checkpoints", detail=text, remedy="set it to s3://BUCKET/FOLDER")


def _client(profile: Profile) -> Any:
    try:
        from lt_launch.sagemaker.client import SageMakerClient
    except ModuleNotFoundError as exc:
        raise LaunchError("--on sagemaker needs boto3: pip install 'lt-launch[sagemaker]'") from exc
    return SageMakerClient(profile.options("sagemaker", SageMakerOptions))


def _job_name(launch: Launch) -> str:
    return launch.job_ids.get(launch.pipeline.single_job.name, "")


def _is_running(client: Any, name: str) -> bool:
    description = client.call("sagemaker", "describe_training_job", TrainingJobName=name)
    return STATES.get(description["TrainingJobStatus"]) == "running"


def _s3_problem(client: Any, address: str, *, write: bool) -> str:
    """List a folder, or write and delete a small object in it; return the error or ""."""
    bucket, _, folder = address.removeprefix("s3://").partition("/")
    try:
        if not write:
            answer = client.call("s3", "list_objects_v2", Bucket=bucket, Prefix=folder, MaxKeys=1)
            return "" if answer.get("KeyCount") else "no object there"
        place = {"Bucket": bucket, "Key": f"{folder.rstrip('/')}/.lt-doctor-{time.time_ns()}".lstrip("/")}
        client.call("s3", "put_object", Body=b"lt", **place)
        client.call("s3", "delete_object", **place)
    except LaunchError as exc:
        return str(exc)
    return ""


def to_stage_status(stage: str, description: Mapping[str, Any]) -> StageStatus:
    """Convert a response of DescribeTrainingJob to a StageStatus."""
    secondary = description.get("SecondaryStatus", "")
    state = STATES.get(description["TrainingJobStatus"], "unknown")
    if secondary in PENDING_STATUSES and state == "running":
        state = "pending"
    elif secondary in RESUMED_STATUSES:
        state = "requeued"
    transitions = description.get("SecondaryStatusTransitions", [])
    message = transitions[-1].get("StatusMessage", "") if transitions else ""
    return StageStatus(
        stage=stage,
        state=state,
        job_id=description["TrainingJobName"],
        attempt=sum(1 for one in transitions if one.get("Status") in RESTART_STATUSES),
        exit_code=0 if state == "completed" else None,
        reason=description.get("FailureReason") or ", ".join(word for word in (secondary, message) if word),
        nodes=tuple(f"algo-{i + 1}" for i in range(description["ResourceConfig"]["InstanceCount"])),
        since=_to_timestamp(transitions[-1].get("StartTime") if transitions else description.get("CreationTime")),
    )


def _to_timestamp(value: Any) -> float:
    """Return seconds since 1970; 0 where there is no time."""
    return value.timestamp() if isinstance(value, datetime) else float(value or 0)
