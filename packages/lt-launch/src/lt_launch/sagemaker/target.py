"""Target `sagemaker`: a training job in AWS."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lt_launch.job import Pipeline, with_container_env
from lt_launch.profile import Profile
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.recipe_rules import request_notes
from lt_launch.sagemaker.request import create_training_job_request
from lt_launch.target import Finding, Launch, LaunchTarget, RenderedLaunch, StageState, StageStatus, TargetNode

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
POLL_S, NO_OUTPUT_NOTICE_S = 5.0, 30.0
FIRST_HOST = "algo-1"
"""Host of rank 0."""
MAX_NAME_PREFIX = 63 - len("-20260101-000000")


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
            notes=(*profile.container_notes, *request_notes(request)),
            comments=("training job names are unique: lt launch run appends the time",),
        )

    def submit(self, launch: Launch, rendered: RenderedLaunch, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Create the training job."""
        request = json.loads(rendered.files[REQUEST_FILE])
        request["TrainingJobName"] = unique_job_name(request["TrainingJobName"])
        self._client(launch.profile).create_training_job(request)
        return {launch.pipeline.single_job.name: request["TrainingJobName"]}, 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Return the status from DescribeTrainingJob."""
        stage = launch.pipeline.single_job.name
        if stage not in launch.job_ids:
            return (StageStatus(stage=stage, state="pending", reason="not submitted"),)
        name, client = launch.job_ids[stage], self._client(launch.profile)
        description = client.describe_training_job(name)
        status = to_stage_status(stage, description)
        if description.get("TrainingStartTime"):
            try:
                streams = client.list_log_streams(name, FIRST_HOST)
                status = replace(status, log_tail=tuple(client.tail_log_stream(streams[-1])) if streams else ())
            except SageMakerError as exc:  # no right to read the log
                status = replace(status, reason=f"{status.reason}; {exc}")
        return (status,)

    def running_jobs(self, launch: Launch) -> str:
        """Return the name of the unfinished training job of an earlier launch, or ""."""
        name = launch.job_ids.get(launch.pipeline.single_job.name, "")
        is_running = (
            name
            and STATES.get(self._client(launch.profile).describe_training_job(name)["TrainingJobStatus"]) == "running"
        )
        return name if is_running else ""

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Yield the CloudWatch lines of a rank's host; without any, their future location."""
        from lt_launch.sagemaker.client import LOG_GROUP

        job = launch.pipeline.single_job
        host, name = f"algo-{rank // job.procs_per_node + 1}", launch.job_ids.get(job.name, "")
        if not name:
            raise SageMakerError(f"{launch.directory.parent}: the job was not submitted")
        client, tokens, quiet_since, noticed = self._client(launch.profile), dict[str, str](), time.monotonic(), False
        while True:
            is_last = not follow or STATES.get(client.describe_training_job(name)["TrainingJobStatus"]) != "running"
            for stream in client.list_log_streams(name, host):
                lines, tokens[stream] = client.read_log_stream(stream, tokens.get(stream, ""))
                quiet_since = time.monotonic() if lines else quiet_since
                yield from lines
            if is_last:
                return
            if not noticed and time.monotonic() - quiet_since > NO_OUTPUT_NOTICE_S:
                noticed = True
                where = f"{LOG_GROUP}, streams {name}/{host}-..."
                yield f"# no output for {NO_OUTPUT_NOTICE_S:.0f} s; it will be in {where}"
            time.sleep(POLL_S)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Stop the training job: the containers get SIGTERM and 120 s to save."""
        name = launch.job_ids.get(launch.pipeline.single_job.name, "")
        if not name:
            return ["it was not submitted"]
        self._client(launch.profile).stop_training_job(name)
        return [f"{name} was signaled to save and stop; it has 120 s"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Return the newest training jobs of the account."""
        for job in self._client(profile).list_training_jobs():
            name = job["TrainingJobName"]
            state = STATES.get(job["TrainingJobStatus"], "unknown")
            yield StageStatus(stage=name, state=state, job_id=name, since=_to_timestamp(job.get("LastModifiedTime")))

    def nodes(self, profile: Profile) -> Iterable[TargetNode]:
        """Raise SageMakerError: SageMaker has no permanent nodes."""
        raise SageMakerError("--on sagemaker: it has no nodes; instances exist only while a job runs")

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Check boto3, the request's limits, and the rights in S3."""
        from lt_launch.sagemaker.doctor import sagemaker_findings

        return sagemaker_findings(profile, pipeline)

    def _client(self, profile: Profile) -> Any:
        try:
            from lt_launch.sagemaker.client import SageMakerClient
        except ModuleNotFoundError as exc:
            raise SageMakerError("--on sagemaker needs boto3: pip install 'lt-launch[sagemaker]'") from exc
        return SageMakerClient(profile.options("sagemaker", SageMakerOptions))


def unique_job_name(name: str) -> str:
    """Return the name with the time: an account has each name of a training job once."""
    return f"{name[:MAX_NAME_PREFIX]}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def to_stage_status(stage: str, description: Mapping[str, Any]) -> StageStatus:
    """Convert a response of DescribeTrainingJob to a StageStatus."""
    secondary = description.get("SecondaryStatus", "")
    state = STATES.get(description["TrainingJobStatus"], "unknown")
    if secondary in PENDING_STATUSES and state == "running":
        state = "pending"
    elif secondary in RESTART_STATUSES:
        state = "requeued"
    elif secondary in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        state = "requeued"  # saved; a restart resumes it
    transitions = description.get("SecondaryStatusTransitions", [])
    message = transitions[-1].get("StatusMessage", "") if transitions else ""
    metrics = [f"{one['MetricName']}={one['Value']}" for one in description.get("FinalMetricDataList", [])]
    reason = description.get("FailureReason") or ", ".join(word for word in (secondary, message, *metrics) if word)
    return StageStatus(
        stage=stage,
        state=state,
        job_id=description["TrainingJobName"],
        attempt=sum(1 for one in transitions if one.get("Status") in RESTART_STATUSES),
        exit_code=0 if state == "completed" else None,
        reason=reason,
        nodes=tuple(f"algo-{i + 1}" for i in range(description["ResourceConfig"]["InstanceCount"])),
        since=_to_timestamp(transitions[-1].get("StartTime") if transitions else description.get("CreationTime")),
    )


def _to_timestamp(value: Any) -> float:
    """Return seconds since 1970; 0 where there is no time."""
    return value.timestamp() if isinstance(value, datetime) else float(value or 0)
