"""`[run]`: where a run lives and which engine trains."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import wrong


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the run lives and what trains it."""

    out: str = option("runs/run", "run directory: recipe, environment, metrics, checkpoints, logs")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    engine: str = option("gpu", "engine that trains: gpu (CUDA and CPU) or neuron (AWS Trainium)")

    def __post_init__(self) -> None:
        check_types(self, "run")
        if not self.out:
            raise wrong(self, "run", "out", "a run needs a directory", "set run.out to one, such as runs/run")
        if not 0 <= self.seed < 2**63:
            raise wrong(self, "run", "seed", "must lie in [0, 2**63)", "use a small whole number such as 0")
