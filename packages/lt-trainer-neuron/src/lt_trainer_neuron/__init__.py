"""AWS Trainium (neuronx-distributed) engine of lt: options and checks, loaded lazily."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_trainer_neuron.checks import check_model, check_recipe
    from lt_trainer_neuron.environment import neuron_env
    from lt_trainer_neuron.options import NeuronOptions
    from lt_trainer_neuron.spec import SPEC, NeuronSpec

__all__ = ["SPEC", "NeuronOptions", "NeuronSpec", "check_model", "check_recipe", "neuron_env"]

_EXPORTS = {
    "SPEC": "lt_trainer_neuron.spec",
    "NeuronOptions": "lt_trainer_neuron.options",
    "NeuronSpec": "lt_trainer_neuron.spec",
    "check_recipe": "lt_trainer_neuron.checks",
    "check_model": "lt_trainer_neuron.checks",
    "neuron_env": "lt_trainer_neuron.environment",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
