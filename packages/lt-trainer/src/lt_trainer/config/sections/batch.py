"""`[batch]`: rows per step."""

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least

if TYPE_CHECKING:
    from lt_data import BatchRamp


@dataclass(frozen=True, kw_only=True)
class RampOptions:
    """`[batch.ramp]`: batch size ramp, from a small batch in equal increments to batch.global_batch_size."""

    start: int = option(0, "rows in the first step; 0 = no ramp")
    increment: int = option(0, "rows added per level; 0 = the largest that start and global_batch_size allow")
    steps: int = option(0, "steps until the full batch size")
    tokens: int = option(0, "positions read until the full batch size, instead of steps", unit="tokens")

    def __post_init__(self) -> None:
        check_types(self, "batch.ramp")
        require_at_least(self, "batch.ramp", 0, "start", "increment", "steps", "tokens")
        if not self.start:
            for name in ("increment", "steps", "tokens"):
                if getattr(self, name):
                    problem, remedy = "has no effect without batch.ramp.start", "set batch.ramp.start, or remove it"
                    raise field_error(self, "batch.ramp", name, problem, remedy)
        elif bool(self.steps) == bool(self.tokens):
            problem = "a ramp has a length in steps or in tokens"
            raise field_error(self, "batch.ramp", "steps tokens", problem, "set exactly one")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Rows per step."""

    global_batch_size: int = option(
        256, "rows per step, over all devices", hyperparameter="GLOBAL_BATCH_SIZE", former_name="global_batch"
    )
    micro_batch_size: int = option(
        4, "rows per forward and backward pass", hyperparameter="MICRO_BATCH_SIZE", former_name="micro_batch"
    )
    ramp: RampOptions = field(default_factory=RampOptions)

    def __post_init__(self) -> None:
        check_types(self, "batch")
        require_at_least(self, "batch", 1, "global_batch_size", "micro_batch_size")
        if self.global_batch_size % self.micro_batch_size:
            sizes = range(min(self.micro_batch_size, self.global_batch_size), 0, -1)
            example = next(size for size in sizes if self.global_batch_size % size == 0)
            problem = "the global batch must be a whole number of micro-batches"
            divisor = f"a divisor of {self.global_batch_size} such as {example}"
            remedy = f"set batch.micro_batch_size (MICRO_BATCH_SIZE) to {divisor}"
            raise field_error(self, "batch", "global_batch_size micro_batch_size", problem, remedy)
        if self.ramp.start:
            self._check_ramp()

    def _check_ramp(self) -> None:
        ramp = self.ramp
        if ramp.start >= self.global_batch_size:
            problem = f"must be less than batch.global_batch_size = {self.global_batch_size}"
            raise field_error(ramp, "batch.ramp", "start", problem, "use a smaller one, or 0 for no ramp")
        if ramp.start % self.micro_batch_size or self.ramp_increment % self.micro_batch_size:
            problem = f"every step must be a whole number of micro-batches of {self.micro_batch_size} rows"
            remedy = f"use multiples of {self.micro_batch_size}"
            raise field_error(ramp, "batch.ramp", "start increment", problem, remedy)
        if (self.global_batch_size - ramp.start) % self.ramp_increment:
            problem = f"equal levels must lead from start to batch.global_batch_size = {self.global_batch_size}"
            remedy = f"use a divisor of {self.global_batch_size - ramp.start}"
            raise field_error(ramp, "batch.ramp", "start increment", problem, remedy)

    @property
    def ramp_increment(self) -> int:
        """Rows added per level of the ramp."""
        return self.ramp.increment or gcd(self.ramp.start, self.global_batch_size - self.ramp.start)

    @property
    def step_size_divisor(self) -> int:
        """Number of rows that divides the batch size of every step."""
        return gcd(self.ramp.start, self.ramp_increment) if self.ramp.start else self.global_batch_size

    def batch_ramp(self, seq_len: int) -> "BatchRamp | None":
        """Return the ramp; None without one.

        Args:
            seq_len: positions per row, to convert `batch.ramp.tokens`.
        """
        if not self.ramp.start:
            return None
        from lt_data import BatchRamp

        return BatchRamp(
            start=self.ramp.start,
            final=self.global_batch_size,
            increment=self.ramp_increment,
            steps=self.ramp.steps,
            rows=-(-self.ramp.tokens // seq_len),
        )
