"""Slurm: sbatch scripts that need nothing of lt-launch on the nodes, and status that needs no accounting."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.slurm.target import SlurmBackend

__all__ = ["backend"]


def backend() -> "SlurmBackend":
    """The target."""
    from lt_launch.slurm.target import SlurmBackend

    return SlurmBackend()
