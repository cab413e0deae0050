"""Calls of AWS with errors in one sentence; the only module that imports boto3."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.options import SageMakerOptions

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


class SageMakerClient:
    """AWS for one profile, with boto3's default credentials: SageMaker, its logs, and S3."""

    def __init__(self, options: SageMakerOptions) -> None:
        self._options = options

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of an operation of a service; both have boto3's names.

        Raises:
            LaunchError: AWS refuses it or cannot be reached.
        """
        try:
            return getattr(self.boto3(service), operation)(**arguments)
        except ClientError as exc:
            denied = "AccessDenied" in exc.response.get("Error", {}).get("Code", "")
            remedy = "; the required permissions are in containers/iam/sagemaker-client.json" if denied else ""
            raise LaunchError(f"{exc}{remedy}") from exc
        except BotoCoreError as exc:
            raise LaunchError(f"{operation}: {exc}; see aws configure for credentials and region") from exc

    def boto3(self, service: str) -> Any:
        """Return boto3's client of a service."""
        config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=10, read_timeout=60)
        region, url = self._options.region or None, self._options.endpoint_url or None
        return boto3.client(service, region_name=region, endpoint_url=url, config=config)

    def list_log_streams(self, name: str, host: str) -> list[str]:
        """Return the log streams of one host of a job; none before its container has written."""
        names = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/{host}-"}
        try:
            answer = self.call("logs", "describe_log_streams", **names)
        except LaunchError as exc:
            if "ResourceNotFound" not in str(exc):
                raise
            return []
        return sorted(stream["logStreamName"] for stream in answer["logStreams"])

    def read_log_stream(self, stream: str, token: str = "", **how: Any) -> tuple[list[str], str]:
        """Return lines of a log stream after a position, and the next position.

        Args:
            stream: name of the stream.
            token: the position; "" = the start.
            how: further arguments of GetLogEvents.
        """
        position = {"nextToken": token} if token else {}
        names = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        answer = self.call("logs", "get_log_events", **{**names, **how}, **position)
        return [event["message"] for event in answer["events"]], answer["nextForwardToken"]
