"""The one module that imports boto3: calls to SageMaker and CloudWatch Logs as plain values, errors as sentences."""

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

__all__ = ["LOG_GROUP", "Aws"]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PAGE = 100


class Aws:
    """SageMaker and its logs for one profile; credentials come from where boto3 looks for them."""

    def __init__(self, options: SageMakerOptions) -> None:
        self._options = options

    def _client(self, service: str) -> Any:
        config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=10, read_timeout=60)
        with _sentences(f"making a client for {service}"):
            return boto3.client(
                service,
                region_name=self._options.region or None,
                endpoint_url=self._options.endpoint or None,
                config=config,
            )

    def create(self, request: Mapping[str, Any]) -> str:
        """Create a training job; its ARN."""
        with _sentences(f"CreateTrainingJob {request['TrainingJobName']}"):
            return self._client("sagemaker").create_training_job(**request)["TrainingJobArn"]

    def describe(self, name: str) -> dict[str, Any]:
        """What DescribeTrainingJob says."""
        with _sentences(f"DescribeTrainingJob {name}"):
            return self._client("sagemaker").describe_training_job(TrainingJobName=name)

    def stop(self, name: str) -> None:
        """Ask for a stop: SIGTERM to the containers, 120 s later SIGKILL."""
        with _sentences(f"StopTrainingJob {name}"):
            self._client("sagemaker").stop_training_job(TrainingJobName=name)

    def jobs(self) -> list[dict[str, Any]]:
        """The newest training jobs of the account in this region, at most a hundred."""
        with _sentences("ListTrainingJobs"):
            answer = self._client("sagemaker").list_training_jobs(
                MaxResults=PAGE, SortBy="CreationTime", SortOrder="Descending"
            )
        return answer["TrainingJobSummaries"]

    def streams(self, name: str, host: str) -> list[str]:
        """The log streams of one host of a job; none before its container has written, or when it never did."""
        prefix = f"{name}/{host}-"
        try:
            with _sentences(f"DescribeLogStreams {prefix}"):
                answer = self._client("logs").describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=prefix)
        except SageMakerError as exc:
            if "ResourceNotFound" in str(exc):
                return []
            raise
        return sorted(stream["logStreamName"] for stream in answer["logStreams"])

    def lines(self, stream: str, token: str = "") -> tuple[list[str], str]:
        """Lines of a log stream from a place on, and the place behind them."""
        more = {"nextToken": token} if token else {}
        client, found = self._client("logs"), []
        while True:
            with _sentences(f"GetLogEvents {stream}"):
                answer = client.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more)
            found += [event["message"] for event in answer["events"]]
            if answer["nextForwardToken"] == more.get("nextToken") or not answer["events"]:
                return found, answer["nextForwardToken"]
            more = {"nextToken": answer["nextForwardToken"]}

    def last_lines(self, stream: str) -> list[str]:
        """The newest lines of a log stream."""
        with _sentences(f"GetLogEvents {stream}"):
            answer = self._client("logs").get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, limit=PAGE)
        return [event["message"] for event in answer["events"]]

    def can_write(self, address: str) -> str:
        """Try to write, read and remove one small object below s3://BUCKET/FOLDER; what failed, or ""."""
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

    def can_list(self, address: str) -> str:
        """Look for one object below s3://BUCKET/FOLDER; what failed, or ""."""
        bucket, _, folder = address.removeprefix("s3://").partition("/")
        try:
            answer = self._client("s3").list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1)
        except (BotoCoreError, ClientError) as exc:
            return str(exc)
        return "" if answer.get("KeyCount") else "there is nothing"


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """An error of boto3 as a sentence with a remedy."""
    try:
        yield
    except ClientError as exc:
        error = exc.response.get("Error", {})
        code = error.get("Code", "")
        remedies = {
            "ResourceInUse": "give the job another name",
            "AccessDeniedException": "the rights that are needed stand in containers/iam/sagemaker-client.json",
            "ResourceLimitExceeded": "ask for more instances of this type in Service Quotas, or use fewer",
            "ExpiredTokenException": "log in again",
        }
        remedy = f"; {remedies[code]}" if code in remedies else ""
        raise SageMakerError(f"{what}: {code}: {error.get('Message', exc)}{remedy}") from exc
    except BotoCoreError as exc:
        raise SageMakerError(f"{what}: {exc}; see aws configure for credentials and region") from exc
