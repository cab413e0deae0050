"""The table `[slurm]` of a profile: what Slurm has to be told on one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["SlurmOptions"]


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What sbatch and srun need beside the job itself; empty leaves it to the cluster."""

    partition: str = option("", "partition, where a stage names none")
    account: str = option("", "account that is charged")
    qos: str = option("", "quality of service")
    reservation: str = option("", "reservation")
    exclude: tuple[str, ...] = option((), "nodes that are never used")
    gpu_option: Literal["gpus-per-node", "gres", ""] = option(
        "gpus-per-node", 'how GPUs are asked for; "" = not at all (clusters of whole nodes)'
    )
    warn_s: int = option(0, "USR1 so long before the time limit; 0 = the job's grace time and half a minute", unit="s")
    step_wait_s: int = option(
        600, "how long srun may wait for nodes that the job has; then it is requeued. 0 = for ever", unit="s"
    )
    auto_resume: Literal["auto", "on", "off"] = option(
        "auto", "srun --auto-resume=1 of SageMaker HyperPod: auto = where srun offers it on a HyperPod cluster"
    )
    container: Literal["auto", "pyxis", "enroot"] = option(
        "auto", "how images are run: auto = pyxis where srun offers it, else enroot"
    )
    sbatch: tuple[str, ...] = option((), "more options of sbatch, such as --comment=x")
    srun: tuple[str, ...] = option((), "more options of srun, such as --cpu-bind=none")

    def __post_init__(self) -> None:
        check_types(self, "slurm")
        if self.warn_s < 0:
            raise RecipeError(
                "must be at least 0", values={"slurm.warn_s": self.warn_s}, remedy="leave it out to use the grace time"
            )
        if self.step_wait_s < 0:
            raise RecipeError("must be at least 0", values={"slurm.step_wait_s": self.step_wait_s})
        for name in ("sbatch", "srun"):
            for word in getattr(self, name):
                if not word.startswith("--") or any(char.isspace() for char in word):
                    raise RecipeError(
                        "is not an option", values={f"slurm.{name}": word}, remedy="write it as --name=value"
                    )
