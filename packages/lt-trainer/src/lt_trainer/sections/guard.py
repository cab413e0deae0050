"""`[guard]`: what a run does when something goes wrong."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """What the run does when something goes wrong."""

    max_skipped: int = option(
        10,
        "updates skipped, because their loss or gradient norm is not finite, before the run goes back to its newest "
        "checkpoint; counted anew when two checkpoints have none between them",
    )
    max_rewinds: int = option(
        3, "times that one start of the run goes back to a checkpoint, past the rows that led there, before it ends"
    )
    timeout_s: float = option(
        600.0, "how long ranks wait for one that hangs or is gone before the run ends with exit code 75", unit="s"
    )
    grace_s: float = option(
        120.0, "how long a stop may take before the ranks are killed: the update under way and a save", unit="s"
    )

    def __post_init__(self) -> None:
        check_types(self, "guard")
        at_least(self, "guard", 0, "max_skipped", "max_rewinds")
        above_zero(self, "guard", "timeout_s", "grace_s")

    @property
    def collective_timeout_s(self) -> float:
        """What engines give their collectives: more than `timeout_s`, for the watchdog can say who is missing."""
        return 1.5 * self.timeout_s + 30
