"""The error of everything that concerns SageMaker and that a person can mend."""

from lt_launch.errors import LaunchError

__all__ = ["SageMakerError"]


class SageMakerError(LaunchError):
    """A request, a contract or an answer that cannot be used; its message names field, value and remedy."""
