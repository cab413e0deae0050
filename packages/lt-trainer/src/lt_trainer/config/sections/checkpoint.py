"""`[checkpoint]`: checkpoint interval, retention and mirror."""

from dataclasses import dataclass

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoint interval, retention and mirror."""

    interval: int = option(
        1000, "steps between checkpoints; 0 = only at the end and on a stop", hyperparameter="CHECKPOINT_INTERVAL"
    )
    keep_last: int = option(3, "number of newest checkpoints to keep")
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0 = none, 1 = all")
    async_save: bool = option(
        False,
        "write checkpoints in the background; needs host memory for a copy of the state",
        former_name="background",
    )
    resume: bool = option(True, "resume from the newest valid checkpoint of the run directory or the mirror")
    mirror_url: str = option(
        "",
        "s3://bucket/folder to which checkpoints are uploaded in the background, and from which a run resumes on an "
        "empty machine; credentials and endpoint as configured for boto3",
        former_name="mirror",
    )
    mirror_keep_last: int = option(0, "number of newest checkpoints to keep in the mirror; 0 = all")
    mirror_keep_every: int = option(0, "also keep checkpoints in the mirror whose step is a multiple of this; 0 = none")

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        require_at_least(self, "checkpoint", 0, "interval", "keep_every", "mirror_keep_last", "mirror_keep_every")
        require_at_least(self, "checkpoint", 1, "keep_last")
        self._check_mirror()

    def _check_mirror(self) -> None:
        if self.mirror_url:
            from lt_ckpt import CheckpointError
            from lt_ckpt.s3.address import split_url

            try:
                split_url(self.mirror_url)
            except CheckpointError as exc:
                problem = "not the URL of a folder in a bucket"
                raise field_error(self, "checkpoint", "mirror_url", problem, "write it as s3://bucket/folder") from exc
        for name, needed in (("mirror_keep_last", "mirror_url"), ("mirror_keep_every", "mirror_keep_last")):
            if getattr(self, name) and not getattr(self, needed):
                problem = f"has no effect without checkpoint.{needed}"
                raise field_error(self, "checkpoint", name, problem, f"set checkpoint.{needed}, or remove it")
