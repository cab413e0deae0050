"""Options in the table `[slurm]` of a profile."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from lt_launch.job import Word
from lt_trainer.config.section import Section, option


def _long_option(word: str) -> str:
    if not word.startswith("--"):
        raise ValueError("is not an option; write it as --name=value")
    return word


LongOption = Annotated[Word, AfterValidator(_long_option)]


class SlurmOptions(Section, table="slurm"):
    """Options of sbatch and srun beyond the job itself; empty uses the default of the cluster."""

    partition: Word = option("", "partition of stages that name none")
    account: Word = option("", "account to charge")
    exclude: tuple[Word, ...] = option((), "nodes to exclude")
    gpu_option: Literal["gpus-per-node", "gres", ""] = option(
        "gpus-per-node", 'how GPUs are requested; "" = not at all (clusters that allocate whole nodes)'
    )
    step_wait_timeout_s: int = option(
        600, "time srun may wait for the nodes of the job before the job is requeued; 0 = no limit", unit="s", ge=0
    )
    auto_resume: Literal["auto", "on", "off"] = option(
        "auto", "srun --auto-resume=1 of SageMaker HyperPod: auto = on HyperPod, if srun supports it"
    )
    container_runtime: Literal["auto", "pyxis", "enroot"] = option(
        "auto", "how images are run: auto = pyxis if srun supports it, else enroot"
    )
    sbatch_args: tuple[LongOption, ...] = option((), "extra options of sbatch, such as --comment=x")
    srun_args: tuple[LongOption, ...] = option((), "extra options of srun, such as --cpu-bind=none")
