"""User errors of the SageMaker targets."""

from lt_launch.errors import LaunchError


class SageMakerError(LaunchError):
    """Invalid request, contract or response; the message names field, value and remedy."""
