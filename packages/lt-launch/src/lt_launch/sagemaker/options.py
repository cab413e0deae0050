"""Options in the table `[sagemaker]` of a profile."""

from typing import Any, Literal, Self

from pydantic import model_validator

from lt_launch.job import Line
from lt_trainer.config.section import Section, option


class SageMakerOptions(Section, table="sagemaker"):
    """Options of a request beyond the job itself; limits of single fields are checked by the service's model."""

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
    keep_alive_period_s: int = option(0, "time that instances are kept warm for the next job", unit="s")
    network_isolation: bool = option(True, "no network except between the hosts of the job")
    subnets: tuple[Line, ...] = option((), "subnets of the VPC; needed for file systems")
    security_groups: tuple[Line, ...] = option((), "security groups in the VPC")
    use_spot_instances: bool = option(False, "managed spot training: cheaper, interruptible, resumed from checkpoints")
    max_run_s: int = option(86400, "time limit of jobs that set none", unit="s")
    input_mode: Literal["File", "FastFile"] = option("File", "copy S3 channels to disk first, or stream them")
    request: dict[str, Any] = option({}, "further fields of CreateTrainingJob by their names there")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image and self.algorithm:
            raise self.wrong("image algorithm", "a job has either an image or an algorithm", "leave one of them out")
        pairs = [text.partition("=") for text in self.channels]
        if not all(equals and name for name, equals, _ in pairs) or len({name for name, *_ in pairs}) < len(pairs):
            raise self.wrong("channels", "must be NAME=ADDRESS, each name once")
        return self

    @property
    def sources(self) -> dict[str, str]:
        """Address by channel."""
        return {name: address for name, _, address in (text.partition("=") for text in self.channels)}
