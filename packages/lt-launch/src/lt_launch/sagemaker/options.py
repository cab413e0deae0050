"""Options in the table `[sagemaker]` of a profile."""

from dataclasses import dataclass
from typing import Literal

from lt_launch.job import check_one_line
from lt_launch.sagemaker.aws_names import region_problem
from lt_launch.sagemaker.errors import SageMakerError
from lt_trainer.config.fields import check_types, option
from lt_trainer.errors import RecipeError

__all__ = ["SageMakerOptions", "parse_pairs"]


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """Options of a request beyond the job itself; single-field limits are checked by the service model."""

    region: str = option("", "AWS region; empty = boto3's default")
    endpoint_url: str = option("", "URL of another SageMaker endpoint, for tests; empty = AWS", former_name="endpoint")
    role: str = option("", "ARN of the job's role")
    image: str = option("", "training image in ECR; exclusive with algorithm")
    algorithm: str = option("", "ARN of a subscribed marketplace algorithm, or the name of your own")
    channels: tuple[str, ...] = option(
        (),
        "inputs, as NAME=s3://BUCKET/FOLDER, NAME=fsx://FILE_SYSTEM_ID/FOLDER or NAME=efs://ID/FOLDER; "
        "?rw after a file system makes it writable",
    )
    output_path: str = option("", "s3://BUCKET/FOLDER of the trained model", former_name="output")
    checkpoint_s3_uri: str = option(
        "", "s3://BUCKET/FOLDER for the upload and restore of checkpoints", former_name="checkpoints"
    )
    checkpoint_local_path: str = option(
        "/opt/ml/checkpoints", "checkpoint folder in the container", former_name="checkpoints_in"
    )
    compress_output: bool = option(True, "one model.tar.gz; false = plain objects, faster for large models")
    output_kms_key: str = option("", "KMS key of the output", former_name="kms_key")
    volume_kms_key: str = option("", "KMS key of the disks")
    keep_alive_period_s: int = option(
        0, "time that instances are kept warm for the next job", unit="s", former_name="keep_alive_s"
    )
    network_isolation: bool = option(True, "no network except between the hosts of the job", former_name="isolated")
    encrypt_traffic: bool = option(False, "encrypt traffic between the hosts; slow")
    subnets: tuple[str, ...] = option((), "subnets of the VPC; needed for file systems")
    security_groups: tuple[str, ...] = option((), "security groups in the VPC")
    use_spot_instances: bool = option(
        False, "managed spot training: cheaper, interruptible, resumed from checkpoints", former_name="spot"
    )
    max_run_s: int = option(86400, "time limit of jobs that set none", unit="s")
    max_wait_s: int = option(0, "with spot: limit of run and waiting time together; 0 = twice max_run_s", unit="s")
    max_pending_s: int = option(0, "time the job may wait for instances; 0 = SageMaker's default", unit="s")
    input_mode: Literal["File", "FastFile"] = option("File", "copy S3 channels to disk first, or stream them")
    max_retry_attempts: int = option(0, "restarts by SageMaker after internal failures", former_name="retries")
    tags: tuple[str, ...] = option((), "tags of the job, as KEY=VALUE")
    local_folders: tuple[str, ...] = option(
        (),
        "sagemaker-local: local folder of an address and all below it, as s3://BUCKET/FOLDER=/path",
        former_name="folders",
    )

    def __post_init__(self) -> None:
        check_types(self, "sagemaker")
        check_one_line("sagemaker", self)
        if self.region and (problem := region_problem(self.region)):
            raise RecipeError("is not a region", values={"sagemaker.region": self.region}, remedy=problem.remedy)
        if self.image and self.algorithm:
            raise RecipeError(
                "a job has either an image or an algorithm",
                values={"sagemaker.image": self.image, "sagemaker.algorithm": self.algorithm},
                remedy="leave one of them out",
            )
        for name in ("channels", "tags", "local_folders"):
            parse_pairs(getattr(self, name), f"sagemaker.{name}")


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
