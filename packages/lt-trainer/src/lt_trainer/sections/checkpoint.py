"""`[checkpoint]`: when the state is saved, and how much of it is kept where."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When the state of the run is saved and how much of it is kept."""

    interval: int = option(
        1000, "updates between checkpoints; 0 = only at the end and when stopped", hp="CHECKPOINT_INTERVAL"
    )
    keep_last: int = option(3, "newest checkpoints to keep")
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0 = none, 1 = all")
    background: bool = option(
        False, "train on while a checkpoint is written; takes memory on the host for one more copy of the state"
    )
    resume: bool = option(True, "go on from the newest valid checkpoint of the run directory, or of the mirror")
    mirror: str = option(
        "",
        "s3://bucket/folder that gets every checkpoint in the background, and from which a run goes on on an empty "
        "machine; credentials and endpoint from where boto3 looks for them",
    )
    mirror_keep_last: int = option(0, "newest checkpoints to keep in the mirror; 0 = all")
    mirror_keep_every: int = option(0, "also keep checkpoints in the mirror whose step is a multiple of this; 0 = none")

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least(self, "checkpoint", 0, "interval", "keep_every", "mirror_keep_last", "mirror_keep_every")
        at_least(self, "checkpoint", 1, "keep_last")
        self._check_mirror()

    def _check_mirror(self) -> None:
        if self.mirror:
            from lt_ckpt import CheckpointError
            from lt_ckpt.s3.address import split

            try:
                split(self.mirror)
            except CheckpointError as exc:
                problem = "is not the address of a folder in a bucket"
                raise wrong(self, "checkpoint", "mirror", problem, "write it as s3://bucket/folder") from exc
        for name, needed in (("mirror_keep_last", "mirror"), ("mirror_keep_every", "mirror_keep_last")):
            if getattr(self, name) and not getattr(self, needed):
                problem = f"has no effect without checkpoint.{needed}"
                raise wrong(self, "checkpoint", name, problem, f"set checkpoint.{needed}, or leave it out")
