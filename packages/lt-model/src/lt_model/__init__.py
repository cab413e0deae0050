"""Decoders as data (shape, parameters, costs) and, with [torch], as a module.

Importing the package imports nothing else: every name below is loaded from its module on first use (PEP 562). The names
of `decoder`, `documents`, `loss`, `scoring`, `init` and `generation` need torch (`pip install 'lt-model[torch]'`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_model.config import ModelConfig, RopeScaling
    from lt_model.costs import flops_per_token, n_parameters
    from lt_model.decoder import Decoder, DecoderBlock
    from lt_model.documents import DocumentBoundaries
    from lt_model.errors import ModelError
    from lt_model.generation import generate, generate_batch
    from lt_model.hf import config_from_hf, config_to_hf
    from lt_model.init import init_model, init_slice
    from lt_model.loss import IGNORE_INDEX, LossParts, linear_loss_parts
    from lt_model.params import ParamSpec, param_specs
    from lt_model.presets import PRESETS, preset
    from lt_model.scoring import LabelScores, linear_label_scores
    from lt_model.stages import stage_layers

_NAMES = {
    "config": ("ModelConfig", "RopeScaling"),
    "costs": ("flops_per_token", "n_parameters"),
    "decoder": ("Decoder", "DecoderBlock"),
    "documents": ("DocumentBoundaries",),
    "errors": ("ModelError",),
    "generation": ("generate", "generate_batch"),
    "hf": ("config_from_hf", "config_to_hf"),
    "init": ("init_model", "init_slice"),
    "loss": ("IGNORE_INDEX", "LossParts", "linear_loss_parts"),
    "params": ("ParamSpec", "param_specs"),
    "presets": ("PRESETS", "preset"),
    "scoring": ("LabelScores", "linear_label_scores"),
    "stages": ("stage_layers",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["IGNORE_INDEX", "PRESETS", "Decoder", "DecoderBlock", "DocumentBoundaries", "LabelScores", "LossParts"]
__all__ += ["ModelConfig", "ModelError", "ParamSpec", "RopeScaling", "config_from_hf", "config_to_hf"]
__all__ += ["flops_per_token", "generate", "generate_batch", "init_model", "init_slice", "linear_label_scores"]
__all__ += ["linear_loss_parts", "n_parameters", "param_specs", "preset", "stage_layers"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'lt_model' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"lt_model.{_MODULES[name]}"), name)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ModuleNotFoundError(f"lt_model.{name} needs torch: pip install 'lt-model[torch]'", name="torch") from exc
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
