"""The target `sagemaker`: a training job in AWS, from its request to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus, State
from lt_launch.job import Pipeline, for_containers
from lt_launch.profile import Profile
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.sagemaker.request import request

__all__ = ["REQUEST", "STATES", "SageMakerBackend", "stage_status"]

REQUEST = "request.json"
STATES: Mapping[str, State] = {
    "InProgress": "running",
    "Completed": "done",
    "Failed": "failed",
    "Stopping": "running",
    "Stopped": "cancelled",
    "Deleting": "cancelled",
}
BEFORE_TRAINING = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "DownloadingTrainingImage")
AGAIN = ("Interrupted", "Restarting")
POLL_S, SILENCE_S = 5.0, 30.0
FIRST_HOST = "algo-1"
"""Where rank 0 is."""
NAME_ROOM = 63 - len("-20260101-000000")


class SageMakerBackend:
    """Training jobs on SageMaker."""

    name = "sagemaker"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """The request as JSON, and the command of the AWS CLI that sends the same."""
        job = for_containers(pipeline.only, target="SageMaker", env=profile.env)
        made = request(job, profile.options("sagemaker", SageMakerOptions))
        return Rendered(
            files={REQUEST: json.dumps(made, indent=1) + "\n"},
            commands=(("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{REQUEST}"),),
            notes=profile.left_out_of_containers,
            remarks=("names of training jobs are used once: lt launch run puts the time behind it",),
        )

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Create the job; SageMaker goes on by itself."""
        made = json.loads(rendered.files[REQUEST])
        made["TrainingJobName"] = f"{made['TrainingJobName'][:NAME_ROOM]}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self._aws(launch.profile).create(made)
        return {launch.pipeline.only.name: made["TrainingJobName"]}, 0

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """What DescribeTrainingJob says."""
        stage = launch.pipeline.only.name
        if stage not in launch.ids:
            return (StageStatus(stage=stage, state="waiting", reason="not sent"),)
        name, aws = launch.ids[stage], self._aws(launch.profile)
        found = aws.describe(name)
        status = stage_status(stage, found)
        if found.get("TrainingStartTime"):
            try:
                streams = aws.streams(name, FIRST_HOST)
                status = replace(status, said=tuple(aws.last_lines(streams[-1])) if streams else ())
            except SageMakerError as exc:  # whoever may see the job may not see its log
                status = replace(status, reason=f"{status.reason}; {exc}")
        return (status,)

    def running(self, launch: Launch) -> str:
        """The training job of an earlier launch that has not ended; "" where there is none."""
        name = launch.ids.get(launch.pipeline.only.name, "")
        alive = name and STATES.get(self._aws(launch.profile).describe(name)["TrainingJobStatus"]) == "running"
        return name if alive else ""

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Lines of the host that a rank is on, from CloudWatch; where they will be is said when none come."""
        from lt_launch.sagemaker.aws import LOG_GROUP

        job = launch.pipeline.only
        host, name = f"algo-{rank // job.procs_per_node + 1}", launch.ids.get(job.name, "")
        if not name:
            raise SageMakerError(f"{launch.directory.parent}: the job was not sent")
        aws, tokens, quiet_since, told = self._aws(launch.profile), dict[str, str](), time.monotonic(), False
        while True:
            over = not follow or STATES.get(aws.describe(name)["TrainingJobStatus"]) != "running"
            for stream in aws.streams(name, host):
                lines, tokens[stream] = aws.lines(stream, tokens.get(stream, ""))
                quiet_since = time.monotonic() if lines else quiet_since
                yield from lines
            if over:
                return
            if not told and time.monotonic() - quiet_since > SILENCE_S:
                told = True
                yield f"# no line for {SILENCE_S:.0f} s; they will be in {LOG_GROUP}, streams {name}/{host}-..."
            time.sleep(POLL_S)

    def cancel(self, launch: Launch) -> Iterable[str]:
        """StopTrainingJob: the containers get SIGTERM and 120 s to save."""
        name = launch.ids.get(launch.pipeline.only.name, "")
        if not name:
            return ["it was not sent"]
        self._aws(launch.profile).stop(name)
        return [f"{name} was told to save and stop; it has 120 s"]

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """The newest training jobs of the account."""
        for job in self._aws(profile).jobs():
            name = job["TrainingJobName"]
            state = STATES.get(job["TrainingJobStatus"], "unknown")
            yield StageStatus(stage=name, state=state, id=name, since=_seconds(job.get("LastModifiedTime")))

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """SageMaker has no nodes of ours."""
        raise SageMakerError("SageMaker shows no nodes: instances exist only while a job runs")

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """boto3, the request's limits, and the rights in S3."""
        from lt_launch.sagemaker.doctor import findings

        return findings(profile, pipeline)

    def _aws(self, profile: Profile) -> Any:
        try:
            from lt_launch.sagemaker.aws import Aws
        except ModuleNotFoundError as exc:
            raise SageMakerError("--on sagemaker needs boto3: pip install 'lt-launch[sagemaker]'") from exc
        return Aws(profile.options("sagemaker", SageMakerOptions))


def stage_status(stage: str, found: Mapping[str, Any]) -> StageStatus:
    """A training job as DescribeTrainingJob shows it, in our words."""
    secondary = found.get("SecondaryStatus", "")
    state = STATES.get(found["TrainingJobStatus"], "unknown")
    if secondary in BEFORE_TRAINING and state == "running":
        state = "waiting"
    elif secondary in AGAIN:
        state = "requeued"
    elif secondary in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        state = "requeued"  # saved; another start goes on
    transitions = found.get("SecondaryStatusTransitions", [])
    message = transitions[-1].get("StatusMessage", "") if transitions else ""
    metrics = [f"{one['MetricName']}={one['Value']}" for one in found.get("FinalMetricDataList") or []]
    reason = found.get("FailureReason") or ", ".join(word for word in (secondary, message, *metrics) if word)
    return StageStatus(
        stage=stage,
        state=state,
        id=found["TrainingJobName"],
        attempt=sum(1 for one in transitions if one.get("Status") in AGAIN),
        code=0 if state == "done" else None,
        reason=reason,
        nodes=tuple(f"algo-{i + 1}" for i in range(found.get("ResourceConfig", {}).get("InstanceCount", 0))),
        since=_seconds(transitions[-1].get("StartTime") if transitions else found.get("CreationTime")),
    )


def _seconds(when: Any) -> float:
    return when.timestamp() if isinstance(when, datetime) else float(when or 0)
