"""Slurm target: sbatch scripts that need no lt-launch on the nodes, and status without accounting."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.slurm.target import SlurmTarget

__all__ = ["make_target"]


def make_target() -> "SlurmTarget":
    """Return the target."""
    from lt_launch.slurm.target import SlurmTarget

    return SlurmTarget()
