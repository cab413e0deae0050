"""Check that the packages of AWS Neuron are installed: neuronx-distributed (NxD) is imported, as a run does anyway.

On the public package index the same names are placeholders of a few kilobytes: they install and import, but are empty.
The versions that belong together are in the constraints files.
"""

from importlib import import_module

from lt_trainer.errors import TrainerError

NXD_LAYERS = "neuronx_distributed.parallel_layers"
CONSTRAINTS = "constraints/neuron-2.28.1.txt"
"""The release that AWS advises to users of NxD."""


class NotInstalledError(TrainerError):
    """Neuron packages are missing, are the placeholders of the public index, or cannot be imported."""


def require_installed() -> None:
    """Raise unless neuronx-distributed can be imported.

    Raises:
        NotInstalledError: with the cause, and the command that mends it.
    """
    try:
        import_module(NXD_LAYERS)
    except ImportError as exc:
        raise NotInstalledError(
            f"neuronx-distributed, which trains on Trainium, cannot be imported ({exc}): install versions that belong "
            f'together, pip install "lt-trainer-neuron[neuron]" -c {CONSTRAINTS} with the AWS Neuron pip repository as '
            "extra index (packages of the public index with these names are empty: uninstall them first); to compare "
            "numbers on a CPU set engine.neuron.backend to cpu, to train on this machine set run.engine to gpu"
        ) from exc
