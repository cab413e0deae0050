"""The table `[sagemaker]` of a profile: where jobs run in AWS, with which rights, and for how long."""

from dataclasses import dataclass
from typing import Literal

from lt_launch.sagemaker.errors import SageMakerError
from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["SageMakerOptions", "pairs"]


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """What a request needs beside the job itself. Limits of single fields are the service model's to check."""

    region: str = option("", "AWS region; empty = where boto3 looks for it")
    endpoint: str = option("", "address of another SageMaker endpoint, for tests; empty = AWS")
    role: str = option("", "ARN of the role that the job runs with")
    image: str = option("", "own training image in ECR; either this or algorithm")
    algorithm: str = option("", "ARN of a subscribed marketplace algorithm, or the name of an own one")
    channels: tuple[str, ...] = option(
        (),
        "what is read, as NAME=s3://BUCKET/FOLDER, NAME=fsx://FILE_SYSTEM_ID/FOLDER or NAME=efs://ID/FOLDER; "
        "?rw behind a file system makes it writable",
    )
    output: str = option("", "s3://BUCKET/FOLDER of the trained model")
    checkpoints: str = option("", "s3://BUCKET/FOLDER that checkpoints are sent to and restored from")
    checkpoints_in: str = option("/opt/ml/checkpoints", "where the container has its checkpoints")
    compress_output: bool = option(True, "one model.tar.gz; false = plain objects, quicker for large models")
    kms_key: str = option("", "KMS key of the output")
    volume_kms_key: str = option("", "KMS key of the disks")
    keep_alive_s: int = option(0, "how long instances are kept warm for the next job", unit="s")
    isolated: bool = option(True, "no network but between the hosts of the job")
    encrypt_traffic: bool = option(False, "encrypt traffic between the hosts; slow")
    subnets: tuple[str, ...] = option((), "subnets of the VPC; needed for file systems")
    security_groups: tuple[str, ...] = option((), "security groups in the VPC")
    spot: bool = option(False, "managed spot training: cheaper, interrupted at any time, goes on from checkpoints")
    max_run_s: int = option(86400, "after which the job is stopped, where the job names no limit", unit="s")
    max_wait_s: int = option(0, "with spot: for run and waiting together; 0 = twice the run", unit="s")
    max_pending_s: int = option(0, "how long the job may wait for instances; 0 = SageMaker's default", unit="s")
    input_mode: Literal["File", "FastFile"] = option("File", "copy S3 channels to disk first, or read them as they go")
    retries: int = option(0, "how often SageMaker starts the job again after a failure of its own")
    tags: tuple[str, ...] = option((), "tags of the job, as KEY=VALUE")
    folders: tuple[str, ...] = option(
        (), "sagemaker-local: the folder that stands for an address, as s3://BUCKET/FOLDER=/path"
    )

    def __post_init__(self) -> None:
        check_types(self, "sagemaker")
        if self.image and self.algorithm:
            raise RecipeError(
                "a job has either an image or an algorithm",
                values={"sagemaker.image": self.image, "sagemaker.algorithm": self.algorithm},
                remedy="leave one of them out",
            )
        for name in ("channels", "tags", "folders"):
            pairs(getattr(self, name), f"sagemaker.{name}")


def pairs(given: tuple[str, ...], field: str) -> dict[str, str]:
    """NAME=VALUE texts as a map.

    Raises:
        SageMakerError: a text without '=', or a name twice.
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
