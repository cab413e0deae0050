"""`[fault_tolerance]`: skipped steps, rollbacks, hangs and stops."""

from dataclasses import dataclass

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import require_at_least, require_positive


@dataclass(frozen=True, kw_only=True)
class FaultToleranceOptions:
    """Limits for skipped steps, rollbacks, hangs and stops."""

    max_skipped_steps: int = option(
        10,
        "steps skipped for a non-finite loss or gradient norm before a rollback to the newest checkpoint; reset when "
        "none was skipped between two checkpoints",
        former_name="guard.max_skipped",
    )
    max_rollbacks: int = option(
        3,
        "rollbacks, each skipping the rows that led to it, before the run ends; counted per start",
        former_name="guard.max_rewinds",
    )
    hang_timeout_s: float = option(
        600.0,
        "time that ranks wait for a hanging or lost rank before the run ends with exit code 75",
        unit="s",
        former_name="guard.timeout_s",
    )
    grace_period_s: float = option(
        120.0,
        "time for a stop, the current step and a save, before the ranks are killed",
        unit="s",
        former_name="guard.grace_s",
    )

    def __post_init__(self) -> None:
        check_types(self, "fault_tolerance")
        require_at_least(self, "fault_tolerance", 0, "max_skipped_steps", "max_rollbacks")
        require_positive(self, "fault_tolerance", "hang_timeout_s", "grace_period_s")

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of the engine's collectives: above `hang_timeout_s`, so that the watchdog reports first."""
        return 1.5 * self.hang_timeout_s + 30
