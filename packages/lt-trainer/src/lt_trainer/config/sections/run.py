"""`[run]`: run directory, seed and engine."""

from dataclasses import dataclass

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Run directory, seed and engine."""

    dir: str = option("runs/run", "run directory: recipe, environment, metrics, checkpoints, logs", former_name="out")
    seed: int = option(0, "seed of the initial weights and the data order")
    engine: str = option("gpu", "engine: gpu (CUDA and CPU) or neuron (AWS Trainium)")

    gc_interval: int = option(
        50,
        "steps between collections of Python's garbage, at the same steps on all ranks; 0 leaves it to Python, which "
        "collects in another step on each rank",
    )

    def __post_init__(self) -> None:
        check_types(self, "run")
        require_at_least(self, "run", 0, "gc_interval")
        if not self.dir:
            raise field_error(self, "run", "dir", "must not be empty", "set it to a directory, such as runs/run")
        if not 0 <= self.seed < 2**63:
            raise field_error(self, "run", "seed", "must be in [0, 2**63)", "use a small integer such as 0")
