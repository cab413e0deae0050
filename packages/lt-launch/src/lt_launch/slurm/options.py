"""Options in the table `[slurm]` of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt_launch.job import check_one_line
from lt_trainer.config.fields import check_types, option
from lt_trainer.errors import RecipeError

__all__ = ["SlurmOptions"]


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of sbatch and srun beyond the job itself; empty uses the default of the cluster."""

    partition: str = option("", "partition of stages that name none")
    account: str = option("", "account to charge")
    qos: str = option("", "quality of service")
    reservation: str = option("", "reservation")
    exclude: tuple[str, ...] = option((), "nodes to exclude")
    gpu_option: Literal["gpus-per-node", "gres", ""] = option(
        "gpus-per-node", 'how GPUs are requested; "" = not at all (clusters that allocate whole nodes)'
    )
    signal_lead_time_s: int = option(
        0,
        "time from USR1 to the time limit; 0 = the job's grace period plus 30 s",
        unit="s",
        former_name="warn_s",
    )
    step_wait_timeout_s: int = option(
        600,
        "time srun may wait for the nodes of the job before the job is requeued; 0 = no limit",
        unit="s",
        former_name="step_wait_s",
    )
    auto_resume: Literal["auto", "on", "off"] = option(
        "auto", "srun --auto-resume=1 of SageMaker HyperPod: auto = on HyperPod, if srun supports it"
    )
    container_runtime: Literal["auto", "pyxis", "enroot"] = option(
        "auto", "how images are run: auto = pyxis if srun supports it, else enroot", former_name="container"
    )
    sbatch_args: tuple[str, ...] = option((), "extra options of sbatch, such as --comment=x", former_name="sbatch")
    srun_args: tuple[str, ...] = option((), "extra options of srun, such as --cpu-bind=none", former_name="srun")

    def __post_init__(self) -> None:
        check_types(self, "slurm")
        check_one_line("slurm", self, words=("partition", "account", "qos", "reservation", "exclude"))
        if self.signal_lead_time_s < 0:
            raise RecipeError(
                "must be at least 0",
                values={"slurm.signal_lead_time_s": self.signal_lead_time_s},
                remedy="leave it out to use the grace period",
            )
        if self.step_wait_timeout_s < 0:
            raise RecipeError("must be at least 0", values={"slurm.step_wait_timeout_s": self.step_wait_timeout_s})
        for name in ("sbatch_args", "srun_args"):
            for word in getattr(self, name):
                if not word.startswith("--") or any(char.isspace() for char in word):
                    raise RecipeError(
                        "is not an option", values={f"slurm.{name}": word}, remedy="write it as --name=value"
                    )
