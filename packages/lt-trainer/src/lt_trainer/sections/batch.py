"""`[batch]`: how many rows make one update."""

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong

if TYPE_CHECKING:
    from lt_data import BatchRamp


@dataclass(frozen=True, kw_only=True)
class RampOptions:
    """`[batch.ramp]`: a batch that begins small and grows in equal levels to batch.global_batch."""

    start: int = option(0, "rows in the first update; 0 = the batch does not grow")
    increment: int = option(0, "rows that each level has more; 0 = the most that start and global_batch allow")
    steps: int = option(0, "updates until the batch has grown")
    tokens: int = option(0, "positions read until the batch has grown, instead of steps", unit="tokens")

    def __post_init__(self) -> None:
        check_types(self, "batch.ramp")
        at_least(self, "batch.ramp", 0, "start", "increment", "steps", "tokens")
        if not self.start:
            for name in ("increment", "steps", "tokens"):
                if getattr(self, name):
                    problem, remedy = "has no effect without batch.ramp.start", "set batch.ramp.start, or leave it out"
                    raise wrong(self, "batch.ramp", name, problem, remedy)
        elif bool(self.steps) == bool(self.tokens):
            problem = "a batch grows over so many steps, or over so many tokens"
            raise wrong(self, "batch.ramp", "steps tokens", problem, "set one of the two")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many rows make one update."""

    global_batch: int = option(256, "rows in one update, over all devices", hp="GLOBAL_BATCH_SIZE")
    micro_batch: int = option(4, "rows in one forward and backward pass", hp="MICRO_BATCH_SIZE")
    ramp: RampOptions = field(default_factory=RampOptions)

    def __post_init__(self) -> None:
        check_types(self, "batch")
        at_least(self, "batch", 1, "global_batch", "micro_batch")
        if self.global_batch % self.micro_batch:
            below = range(min(self.micro_batch, self.global_batch), 0, -1)
            fitting = next(size for size in below if self.global_batch % size == 0)
            problem = "the global batch must be a whole number of micro-batches"
            remedy = f"set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of {self.global_batch} such as {fitting}"
            raise wrong(self, "batch", "global_batch micro_batch", problem, remedy)
        if self.ramp.start:
            self._check_ramp()

    def _check_ramp(self) -> None:
        ramp = self.ramp
        if ramp.start >= self.global_batch:
            problem = f"a batch grows from fewer rows than batch.global_batch = {self.global_batch}"
            raise wrong(ramp, "batch.ramp", "start", problem, "set a lower one, or 0 for none")
        if ramp.start % self.micro_batch or self.ramp_increment % self.micro_batch:
            problem = f"every step must be a whole number of micro-batches of {self.micro_batch} rows"
            remedy = f"use multiples of {self.micro_batch}"
            raise wrong(ramp, "batch.ramp", "start increment", problem, remedy)
        if (self.global_batch - ramp.start) % self.ramp_increment:
            problem = f"equal levels must lead from start to batch.global_batch = {self.global_batch}"
            remedy = f"use a divisor of {self.global_batch - ramp.start}"
            raise wrong(ramp, "batch.ramp", "start increment", problem, remedy)

    @property
    def ramp_increment(self) -> int:
        """Rows that each level of the ramp has more than the one before."""
        return self.ramp.increment or gcd(self.ramp.start, self.global_batch - self.ramp.start)

    @property
    def unit(self) -> int:
        """Rows that divide every step's batch."""
        return gcd(self.ramp.start, self.ramp_increment) if self.ramp.start else self.global_batch

    def grows(self, seq_len: int) -> "BatchRamp | None":
        """How the batch grows; None where it does not.

        Args:
            seq_len: positions of a row, in which `batch.ramp.tokens` are counted.
        """
        if not self.ramp.start:
            return None
        from lt_data import BatchRamp

        return BatchRamp(
            start=self.ramp.start,
            final=self.global_batch,
            increment=self.ramp_increment,
            steps=self.ramp.steps,
            rows=-(-self.ramp.tokens // seq_len),
        )
