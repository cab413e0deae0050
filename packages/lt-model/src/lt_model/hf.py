"""Conversion of `ModelConfig` to and from the config.json of `transformers.LlamaForCausalLM`.

Up to 4.x, transformers keeps rotary settings in `rope_theta` and `rope_scaling`; from 5.0 on, in one `rope_parameters`.
`config_to_hf` writes both spellings with equal values, so every version from 4.48 on reads the same model;
`config_from_hf` reads either and rejects a file in which they disagree. Any setting that would change the output and
that our Llama does not support (biases, dropout, other rotary rules, quantized weights, ...) is an error: a model is
never loaded approximately.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_model.config import ModelConfig, RopeScaling
from lt_model.errors import ModelError

MAX_CONFIG_BYTES = 2**24
# Our field name -> transformers' name, for fields with the same meaning.
HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
# Defaults of transformers' LlamaConfig for absent keys. Sizes have none here: a file without them describes no model.
HF_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
HF_DEFAULT_THETA = 10000.0
# Settings that must have this value (or be absent or null) for the model to be ours.
HF_REQUIRED_VALUES: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}
DTYPES = ("float32", "float64", "float16", "bfloat16")


def config_to_hf(
    config: ModelConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of the equivalent `LlamaForCausalLM`.

    Args:
        config: the model.
        bos_token_id: the tokenizer's begin-of-text id, or None.
        eos_token_id: the tokenizer's end-of-text id, several of them, or None.
        dtype: the type of the stored weights: float32, float64, float16 or bfloat16.

    Raises:
        ModelError: an unknown dtype, or a token id outside the vocabulary.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype = {dtype!r}: not one of {', '.join(DTYPES)}")
    eos_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    for name, token_id in (("bos_token_id", bos_token_id), *(("eos_token_id", i) for i in eos_ids)):
        if token_id is not None and not 0 <= token_id < config.vocab_size:
            raise ModelError(f"{name} = {token_id}: outside the vocabulary of {config.vocab_size} ids")
    scaling = None if config.rope_scaling is None else {"rope_type": "llama3", **_scaling_to_dict(config.rope_scaling)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
    }


def config_from_hf(values: Mapping[str, Any], source: str = "") -> ModelConfig:
    """Read a config.json of `LlamaForCausalLM`, of transformers 4 or 5.

    Args:
        values: the parsed file.
        source: its path, for error messages.

    Raises:
        ModelError: not a Llama, a missing size, or a setting that our Llama does not support.
    """
    where = source or "config.json"
    if values.get("model_type") != "llama":
        raise ModelError(f"{where}: model_type = {values.get('model_type')!r}; only 'llama' can be read")
    for name, wanted in HF_REQUIRED_VALUES.items():
        found = values.get(name)
        if found is not None and found != wanted:
            raise ModelError(f"{where}: {name} = {found!r} is not supported (only {wanted!r})")
    found = {theirs: values[theirs] for theirs in HF_NAMES.values() if values.get(theirs) is not None}
    found = {**HF_DEFAULTS, **found}
    found.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    if missing := [name for name in HF_NAMES.values() if found.get(name) is None]:
        raise ModelError(f"{where}: {missing[0]} is missing")
    theta, scaling = _read_rope(values, where, found["max_position_embeddings"])
    try:
        config = ModelConfig(
            **{ours: found[theirs] for ours, theirs in HF_NAMES.items()},
            rope_theta=theta,
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
        )
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    head_dim = values.get("head_dim")
    if head_dim is not None and head_dim != config.head_dim:
        raise ModelError(
            f"{where}: head_dim = {head_dim} is not supported (only hidden_size / num_attention_heads = "
            f"{config.head_dim})"
        )
    return config


def read_config(path: str | Path) -> ModelConfig:
    """Read a config.json, given as the file or as the folder of a Hugging Face model.

    Raises:
        ModelError: a file that is missing, unreadable, not a JSON object, or not a supported Llama.
    """
    file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    try:
        values = json.loads(_read_text(file))
    except OSError as exc:
        raise ModelError(f"{file}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # broken JSON, nested without end, or bytes that are not UTF-8
        raise ModelError(f"{file}: not a JSON file: {exc}; give a model's config.json") from exc
    if not isinstance(values, Mapping):
        raise ModelError(f"{file}: expected a JSON object, not {type(values).__name__}")
    return config_from_hf(values, str(file))


def _read_text(file: Path) -> str:
    """Return the text of a regular file of usual size; a pipe would be waited for."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CONFIG_BYTES:
            problem = f"no regular file of at most {MAX_CONFIG_BYTES} bytes; give a model's config.json"
            raise OSError(errno.EINVAL, problem)
        return opened.read(MAX_CONFIG_BYTES).decode()


_SCALING_NAMES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _scaling_to_dict(scaling: RopeScaling) -> dict[str, Any]:
    return {name: getattr(scaling, name) for name in _SCALING_NAMES}


def _read_rope(values: Mapping[str, Any], where: str, max_positions: object) -> tuple[Any, dict[str, Any] | None]:
    """Return theta and the llama3 scaling values (or None) from the old spelling, the new one, or both."""
    spellings: dict[str, tuple[Any, dict[str, Any] | None]] = {}
    new = values.get("rope_parameters")
    old_theta = values.get("rope_theta")
    if new:
        theta = _check_rope_mapping(new, f"{where}: rope_parameters").get("rope_theta")
        default = HF_DEFAULT_THETA if old_theta is None else old_theta
        spellings["rope_parameters"] = (
            default if theta is None else theta,
            _read_scaling(new, f"{where}: rope_parameters", max_positions),
        )
    if old_theta is not None or values.get("rope_scaling"):
        scaling = _read_scaling(values.get("rope_scaling") or {}, f"{where}: rope_scaling", max_positions)
        if not values.get("rope_scaling") and new and "rope_scaling" not in values:
            scaling = spellings["rope_parameters"][1]  # without a rope_scaling there is nothing to disagree with
        theta = HF_DEFAULT_THETA if old_theta is None else old_theta
        spellings["rope_theta and rope_scaling"] = (theta, scaling)
    if not spellings:
        return HF_DEFAULT_THETA, None
    found = list(spellings.values())
    if any(one != found[0] for one in found):
        raise ModelError(
            f"{where}: rope_parameters ({found[0]}) and rope_theta with rope_scaling ({found[1]}) disagree; "
            "delete the wrong spelling"
        )
    return found[0]


def _read_scaling(rope: object, where: str, max_positions: object) -> dict[str, Any] | None:
    rope = _check_rope_mapping(rope, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type = {kind!r} is not supported (only 'default' and 'llama3')")
    # transformers defaults to the model's max_position_embeddings.
    scaling = {"original_max_position_embeddings": max_positions}
    scaling |= {name: rope[name] for name in _SCALING_NAMES if rope.get(name) is not None}
    if missing := [name for name in _SCALING_NAMES if name not in scaling]:
        raise ModelError(f"{where}: {missing[0]} is missing")
    return scaling


def _check_rope_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{where} = {value!r}: must be a table")
    if value.get("partial_rotary_factor", 1) != 1:
        raise ModelError(
            f"{where}: partial_rotary_factor = {value['partial_rotary_factor']!r} is not supported (only 1)"
        )
    return value
