"""Model shapes by name: the config.json files of `preset_configs`. Parameter counts are exact and tested.

litespark-default is the model that the Litespark marketplace listing trains by default (vocabulary of Llama 2). The
numbered ones without a maker's version are public shapes of that size: llama-160m (JackFram), llama-1b (TinyLlama
1.1B), llama-30b (the first Llama's, 32.5 B, with today's context). Their names are the size class, the counts the
exact size. The tiny shapes are for training on a CPU: all sizes are multiples of 64, heads are 32 wide, and the
embedding is tied, so that most of the parameters are in the blocks.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lt_model.config import ModelConfig
from lt_model.errors import ModelError
from lt_model.families import FAMILIES
from lt_model.hf import read_config

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {file.stem: read_config(file) for file in sorted(Path(__file__).with_name("preset_configs").glob("*.json"))}
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the preset `name`, with any fields of `ModelConfig` replaced by `overrides`.

    Raises:
        ModelError: an unknown preset or field, or sizes that do not divide.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ModelError(f"preset {name!r}: unknown; {hint}`lt model list` shows all presets")
    if unknown := sorted(set(overrides) - set(ModelConfig.__dataclass_fields__)):
        raise ModelError(f"preset {name!r}: unknown field {unknown[0]!r}")
    return override(PRESETS[name], **overrides)


def override(config: ModelConfig, **fields: Any) -> ModelConfig:
    """Return `config` with some fields replaced; another number of layers repeats or cuts their pattern.

    Raises:
        ModelError: sizes that do not divide, or another n_layers where layers are a plain list without a pattern.
    """
    n_layers, period = fields.get("n_layers", config.n_layers), len(config.layers)
    row = FAMILIES[config.family]
    is_plain_list = period == config.n_layers > 1 and period != row.period and row.dense_layers != "first"
    if n_layers != config.n_layers and is_plain_list and "layers" not in fields:
        raise ModelError(
            f"n_layers = {n_layers}: the model lists the kinds of its {config.n_layers} layers one by one; "
            "give a config.json with as many"
        )
    if row.dense_layers == "first":  # the first layers stay as they are, others are like the last
        fields = {"layers": (*config.layers, *[config.layers[-1]] * max(0, n_layers - len(config.layers))), **fields}
    return replace(config, **fields)
