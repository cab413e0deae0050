"""SageMaker training jobs, from both sides.

The client makes and checks CreateTrainingJob requests (`request`, `constraints`, `client`); the container's entry keeps
the contract of `/opt/ml` (`contract`, `entry`); the publisher prints CreateAlgorithm (`algorithm`); and `local` keeps
the service's side of the contract with processes of this machine. boto3 is imported in `aws` alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_launch.sagemaker.local import LocalSageMaker
    from lt_launch.sagemaker.target import SageMakerBackend

__all__ = ["backend", "local_backend"]


def backend() -> "SageMakerBackend":
    """The target `sagemaker`."""
    from lt_launch.sagemaker.target import SageMakerBackend

    return SageMakerBackend()


def local_backend() -> "LocalSageMaker":
    """The target `sagemaker-local`."""
    from lt_launch.sagemaker.local import LocalSageMaker

    return LocalSageMaker()
