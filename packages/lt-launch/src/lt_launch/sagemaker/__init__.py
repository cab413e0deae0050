"""SageMaker training jobs: client, container entry point, publisher and local emulator.

The client builds and checks CreateTrainingJob requests (`request`, `constraints`, `client`); the container entry point
implements the `/opt/ml` contract (`contract`, `entrypoint`); the publisher prints CreateAlgorithm (`algorithm`);
`local` and `emulator` run the service's side with processes on this machine. Only `client` imports boto3.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.sagemaker.local import SageMakerLocalTarget
    from lt_launch.sagemaker.target import SageMakerTarget

__all__ = ["make_local_target", "make_target"]


def make_target() -> "SageMakerTarget":
    """Return the target `sagemaker`."""
    from lt_launch.sagemaker.target import SageMakerTarget

    return SageMakerTarget()


def make_local_target() -> "SageMakerLocalTarget":
    """Return the target `sagemaker-local`."""
    from lt_launch.sagemaker.local import SageMakerLocalTarget

    return SageMakerLocalTarget()
