"""Table of targets; imports no target."""

from collections.abc import Mapping

TARGETS: Mapping[str, str] = {
    "local": "lt_launch.local:LocalTarget",
    "ssh": "lt_launch.ssh:SshTarget",
    "slurm": "lt_launch.slurm.target:SlurmTarget",
    "sagemaker": "lt_launch.sagemaker.target:SageMakerTarget",
    "k8s": "lt_launch.k8s.target:KubernetesTarget",
}
"""Class by name, as `module:class`; it is made without arguments. A profile has a table of each target's name."""
