"""Options in the table `[sagemaker]` of a profile."""

from typing import Literal, Self

from pydantic import model_validator

from lt_launch.job import Line
from lt_launch.sagemaker.errors import SageMakerError
from lt_trainer.config.section import Section, option


class SageMakerOptions(Section, table="sagemaker"):
    """Options of a request beyond the job itself; single-field limits are checked by the service model."""

    region: Line = option("", "AWS region; empty = boto3's default")
    endpoint_url: Line = option("", "URL of another SageMaker endpoint, for tests; empty = AWS")
    role: Line = option("", "ARN of the job's role")
    image: Line = option("", "training image in ECR; exclusive with algorithm")
    algorithm: Line = option("", "ARN of a subscribed marketplace algorithm, or the name of your own")
    channels: tuple[Line, ...] = option(
        (),
        "inputs, as NAME=s3://BUCKET/FOLDER, NAME=fsx://FILE_SYSTEM_ID/FOLDER or NAME=efs://ID/FOLDER; "
        "?rw after a file system makes it writable",
    )
    output_path: Line = option("", "s3://BUCKET/FOLDER of the trained model")
    checkpoint_s3_uri: Line = option("", "s3://BUCKET/FOLDER for the upload and restore of checkpoints")
    checkpoint_local_path: Line = option("/opt/ml/checkpoints", "checkpoint folder in the container")
    compress_output: bool = option(True, "one model.tar.gz; false = plain objects, faster for large models")
    output_kms_key: Line = option("", "KMS key of the output")
    volume_kms_key: Line = option("", "KMS key of the disks")
    keep_alive_period_s: int = option(0, "time that instances are kept warm for the next job", unit="s")
    network_isolation: bool = option(True, "no network except between the hosts of the job")
    encrypt_traffic: bool = option(False, "encrypt traffic between the hosts; slow")
    subnets: tuple[Line, ...] = option((), "subnets of the VPC; needed for file systems")
    security_groups: tuple[Line, ...] = option((), "security groups in the VPC")
    use_spot_instances: bool = option(False, "managed spot training: cheaper, interruptible, resumed from checkpoints")
    max_run_s: int = option(86400, "time limit of jobs that set none", unit="s")
    max_wait_s: int = option(0, "with spot: limit of run and waiting time together; 0 = twice max_run_s", unit="s")
    max_pending_s: int = option(0, "time the job may wait for instances; 0 = SageMaker's default", unit="s")
    input_mode: Literal["File", "FastFile"] = option("File", "copy S3 channels to disk first, or stream them")
    max_retry_attempts: int = option(0, "restarts by SageMaker after internal failures")
    tags: tuple[Line, ...] = option((), "tags of the job, as KEY=VALUE")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image and self.algorithm:
            raise self.wrong("image algorithm", "a job has either an image or an algorithm", "leave one of them out")
        for name in ("channels", "tags"):
            parse_pairs(getattr(self, name), f"sagemaker.{name}")
        return self


def parse_pairs(given: tuple[str, ...], field: str) -> dict[str, str]:
    """Parse NAME=VALUE texts into a dict.

    Raises:
        SageMakerError: a text without '=', or a duplicate name.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SageMakerError(f"{field} = {text!r}: write it as NAME=VALUE")
        if name in found:
            raise SageMakerError(f"{field} = {text!r}: {name} stands there twice")
        found[name] = value
    return found
