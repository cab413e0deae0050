"""Client of SageMaker and CloudWatch Logs with plain values; the only module that imports boto3."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.options import SageMakerOptions

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PAGE_SIZE = 100


class SageMakerClient:
    """Client of SageMaker and its logs for one profile, with boto3's default credentials."""

    def __init__(self, options: SageMakerOptions) -> None:
        self._options = options

    def _client(self, service: str) -> Any:
        config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=10, read_timeout=60)
        with _translate_errors(f"creating a client for {service}"):
            return boto3.client(
                service,
                region_name=self._options.region or None,
                endpoint_url=self._options.endpoint_url or None,
                config=config,
            )

    def create_training_job(self, request: Mapping[str, Any]) -> str:
        """Create a training job and return its ARN."""
        with _translate_errors(f"CreateTrainingJob {request['TrainingJobName']}"):
            return self._client("sagemaker").create_training_job(**request)["TrainingJobArn"]

    def describe_training_job(self, name: str) -> dict[str, Any]:
        """Return the response of DescribeTrainingJob."""
        with _translate_errors(f"DescribeTrainingJob {name}"):
            return self._client("sagemaker").describe_training_job(TrainingJobName=name)

    def stop_training_job(self, name: str) -> None:
        """Stop a training job: SIGTERM to the containers, SIGKILL 120 s later."""
        with _translate_errors(f"StopTrainingJob {name}"):
            self._client("sagemaker").stop_training_job(TrainingJobName=name)

    def list_training_jobs(self) -> list[dict[str, Any]]:
        """Return the newest training jobs of the account in this region, at most 100."""
        order = {"MaxResults": PAGE_SIZE, "SortBy": "CreationTime", "SortOrder": "Descending"}
        with _translate_errors("ListTrainingJobs"):
            return self._client("sagemaker").list_training_jobs(**order)["TrainingJobSummaries"]

    def list_log_streams(self, name: str, host: str) -> list[str]:
        """Return the log streams of one host of a job; none before its container has written."""
        prefix = f"{name}/{host}-"
        try:
            with _translate_errors(f"DescribeLogStreams {prefix}"):
                answer = self._client("logs").describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=prefix)
        except SageMakerError as exc:
            if "ResourceNotFound" in str(exc):
                return []
            raise
        return sorted(stream["logStreamName"] for stream in answer["logStreams"])

    def read_log_stream(self, stream: str, token: str = "") -> tuple[list[str], str]:
        """Return the lines of a log stream after a position, and the next position."""
        position = {"nextToken": token} if token else {}
        client, lines = self._client("logs"), []
        while True:
            with _translate_errors(f"GetLogEvents {stream}"):
                answer = client.get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **position
                )
            lines += [event["message"] for event in answer["events"]]
            if answer["nextForwardToken"] == position.get("nextToken") or not answer["events"]:
                return lines, answer["nextForwardToken"]
            position = {"nextToken": answer["nextForwardToken"]}

    def tail_log_stream(self, stream: str) -> list[str]:
        """Return the newest lines of a log stream."""
        with _translate_errors(f"GetLogEvents {stream}"):
            answer = self._client("logs").get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, limit=PAGE_SIZE)
        return [event["message"] for event in answer["events"]]

    def check_s3_write(self, address: str) -> str:
        """Write, read and delete a small object below s3://BUCKET/FOLDER; return the error or ""."""
        bucket, _, folder = address.removeprefix("s3://").partition("/")
        key = f"{folder.rstrip('/')}/.lt-doctor-{time.time_ns()}".lstrip("/")
        client = self._client("s3")
        for call in ("put_object", "get_object", "delete_object"):
            body = {"Body": b"lt"} if call == "put_object" else {}
            try:
                getattr(client, call)(Bucket=bucket, Key=key, **body)
            except (BotoCoreError, ClientError) as exc:
                return f"{call}: {exc}"
        return ""

    def check_s3_list(self, address: str) -> str:
        """List one object below s3://BUCKET/FOLDER; return the error or ""."""
        bucket, _, folder = address.removeprefix("s3://").partition("/")
        try:
            answer = self._client("s3").list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1)
        except (BotoCoreError, ClientError) as exc:
            return str(exc)
        return "" if answer.get("KeyCount") else "no object there"


@contextmanager
def _translate_errors(operation: str) -> Iterator[None]:
    """Translate errors of boto3 into SageMakerError with a remedy."""
    try:
        yield
    except ClientError as exc:
        error = exc.response.get("Error", {})
        denied = "AccessDenied" in error.get("Code", "")
        remedy = "; the required permissions are in containers/iam/sagemaker-client.json" if denied else ""
        raise SageMakerError(f"{operation}: {error.get('Code')}: {error.get('Message', exc)}{remedy}") from exc
    except BotoCoreError as exc:
        raise SageMakerError(f"{operation}: {exc}; see aws configure for credentials and region") from exc
