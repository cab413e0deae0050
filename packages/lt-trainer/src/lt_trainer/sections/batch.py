"""`[batch]`: how many rows make one update."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many rows make one update."""

    global_batch: int = option(256, "rows in one update, over all devices", hp="GLOBAL_BATCH_SIZE")
    micro_batch: int = option(4, "rows in one forward and backward pass", hp="MICRO_BATCH_SIZE")

    def __post_init__(self) -> None:
        check_types(self, "batch")
        at_least(self, "batch", 1, "global_batch", "micro_batch")
        if self.global_batch % self.micro_batch:
            below = range(min(self.micro_batch, self.global_batch), 0, -1)
            fitting = next(size for size in below if self.global_batch % size == 0)
            problem = "the global batch must be a whole number of micro-batches"
            remedy = f"set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of {self.global_batch} such as {fitting}"
            raise wrong(self, "batch", "global_batch micro_batch", problem, remedy)
