"""Model shapes by name. Parameter counts are exact and tested.

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
from types import MappingProxyType
from typing import Any

from lt_model.config import ModelConfig, RopeScaling
from lt_model.errors import ModelError

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny-2m": ModelConfig(  # 1,967,808 parameters
            vocab_size=2048,
            hidden_size=192,
            intermediate_size=512,
            n_heads=6,
            n_kv_heads=2,
            n_layers=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        ),
        "tiny-5m": ModelConfig(  # 4,951,296 parameters
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=704,
            n_heads=8,
            n_kv_heads=4,
            n_layers=6,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        ),
        "litespark-default": ModelConfig(vocab_size=32000),  # 134,769,408
        "llama-160m": ModelConfig(
            vocab_size=32000, intermediate_size=3072, max_position_embeddings=2048
        ),  # 162,417,408
        "llama-1b": ModelConfig(  # 1,100,048,384
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            n_heads=32,
            n_kv_heads=4,
            n_layers=22,
            max_position_embeddings=2048,
        ),
        "llama-30b": ModelConfig(  # 32,528,943,616
            vocab_size=32000, hidden_size=6656, intermediate_size=17920, n_heads=52, n_kv_heads=52, n_layers=60
        ),
        "llama2-7b": ModelConfig(  # 6,738,415,616
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, n_heads=32, n_kv_heads=32, n_layers=32
        ),
        "llama2-13b": ModelConfig(  # 13,015,864,320
            vocab_size=32000, hidden_size=5120, intermediate_size=13824, n_heads=40, n_kv_heads=40, n_layers=40
        ),
        "llama2-70b": ModelConfig(  # 68,976,648,192
            vocab_size=32000, hidden_size=8192, intermediate_size=28672, n_heads=64, n_kv_heads=8, n_layers=80
        ),
        "llama3-8b": ModelConfig(  # 8,030,261,248
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            n_heads=32,
            n_kv_heads=8,
            n_layers=32,
            max_position_embeddings=8192,
            rope_theta=500000.0,
        ),
        "llama3-70b": ModelConfig(  # 70,553,706,496
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            n_heads=64,
            n_kv_heads=8,
            n_layers=80,
            max_position_embeddings=8192,
            rope_theta=500000.0,
        ),
        "llama3.2-1b": ModelConfig(  # 1,235,814,400
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            n_heads=32,
            n_kv_heads=8,
            n_layers=16,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(
                factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
            tie_word_embeddings=True,
        ),
        "llama3.2-3b": ModelConfig(  # 3,212,749,824
            vocab_size=128256,
            hidden_size=3072,
            intermediate_size=8192,
            n_heads=24,
            n_kv_heads=8,
            n_layers=28,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(
                factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
            tie_word_embeddings=True,
        ),
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the preset `name`, with any fields of `ModelConfig` replaced by `overrides`.

    Raises:
        ModelError: an unknown preset or field, or sizes that do not divide.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ModelError(f"preset {name!r}: unknown; {hint}The presets are {', '.join(PRESETS)}")
    config = PRESETS[name]
    if unknown := sorted(set(overrides) - set(config.to_dict())):
        raise ModelError(f"preset {name!r}: unknown field {unknown[0]!r}")
    return replace(config, **overrides)
