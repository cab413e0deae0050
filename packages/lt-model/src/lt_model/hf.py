"""Conversion of `ModelConfig` to and from the config.json of `transformers`, by the rows of `families.FAMILIES`.

Up to 4.x, transformers keeps rotary settings in `rope_theta` and `rope_scaling` (or names of the family's own); from
5.0 on, in one `rope_parameters`. `config_to_hf` writes both spellings with equal values, so every version that has the
family reads the same model; `config_from_hf` reads either and rejects a file in which they disagree. Any setting that
would change the output and that the decoder does not have (other rotary rules, quantized weights, ...) is an error: a
model is never loaded approximately.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_model.config import SCALING_FIELDS, LayerKind, ModelConfig, RopeScaling, check_size
from lt_model.errors import ModelError
from lt_model.families import COMMON_DEFAULTS, COMMON_REQUIRED, DROPOUTS, EXPERT_COUNTS, FAMILIES, Family

MAX_CONFIG_BYTES = 2**24
DTYPES = ("float32", "float64", "float16", "bfloat16")
ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our name to transformers'."""
NULLABLE = ("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")
"""Keys whose null says "none"; of the others it says that the default holds."""
SCALING_KEYS: Mapping[str, str] = {"magnitude": "attention_factor", "score_magnitude": "mscale_all_dim"}
"""Field of `RopeScaling` to key, where they differ."""


def config_to_hf(
    config: ModelConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of the equivalent model of transformers.

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
    row = FAMILIES[config.family]
    return {
        "architectures": [row.architecture],
        "model_type": config.family,
        **{key: _to_key(config, name, key) for name, key in row.keys.items()},
        **row.required,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        **({"num_nextn_predict_layers": 0} if row.has_extra_layers else {}),
        "pad_token_id": None,  # a family's default may lie outside of this vocabulary
        **_write_layers(config, row),
        **_write_rope(config, row),
        "torch_dtype": dtype,
    }


def config_from_hf(values: Mapping[str, Any], source: str = "") -> ModelConfig:
    """Read a config.json of one of the families, of transformers 4 or 5.

    Args:
        values: the parsed file.
        source: its path, for error messages.

    Raises:
        ModelError: an unknown family, a missing size, or a setting that the decoder does not have.
    """
    where, family = source or "config.json", values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{where}: model_type = {family!r}: unknown; the families are {', '.join(FAMILIES)}")
    row = FAMILIES[family]
    _check_required(values, row, where)
    given = {**COMMON_DEFAULTS, **row.defaults, **{key: value for key, value in values.items() if value is not None}}
    given |= {key: None for key in NULLABLE if key in values and values[key] is None}
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    for one, other in itertools.permutations(EXPERT_COUNTS, 2):
        if other in given and given.setdefault(one, given[other]) != given[other]:
            raise ModelError(f"{where}: {one} = {given[one]!r} and {other} = {given[other]!r} disagree")
    if missing := [key for key in row.keys.values() if key not in given and key != "head_dim"]:
        raise ModelError(f"{where}: {missing[0]} is missing")
    try:
        found = {name: _from_key(given.get(key), key) for name, key in row.keys.items()}
        if "n_kv_heads" not in row.keys:
            found["n_kv_heads"] = found["n_heads"]
        if "n_shared_experts" in row.keys.values():
            counted = {"n_shared_experts": "shared_expert_size", "moe_intermediate_size": "expert_size"}
            found["shared_expert_size"] = math.prod(check_size(key, found[name]) for key, name in counted.items())
        found |= _read_rope(values, row, where, found["max_position_embeddings"])
        found |= _read_layers(given, row, check_size("n_layers", found["n_layers"]))
        if not any(kind.sliding for kind in found["layers"]):
            found |= {"sliding_window": 0, "sliding_rope_theta": 0.0}
        return ModelConfig(**{**row.fixed, **found}, family=family)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(where) else f"{where}: {text}") from error


def _check_required(values: Mapping[str, Any], row: Family, where: str) -> None:
    family, partial = values["model_type"], {} if row.partial_key else {"partial_rotary_factor": 1}
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"{where}: quantization_config: {method!r} weights of {family} are not read; take its bf16 files, which "
            "transformers writes: from_pretrained with Mxfp4Config(dequantize=True) or the like, then save_pretrained"
        )
    for name, wanted in {**COMMON_REQUIRED, **row.required, **partial}.items():
        found = values.get(name)
        if found is not None and found != wanted:
            raise ModelError(f"{where}: {name} = {found!r} of {family} is not supported (only {wanted!r})")


def read_config(path: str | Path) -> ModelConfig:
    """Read a config.json, given as the file or as the folder of a Hugging Face model.

    Raises:
        ModelError: a file that is missing, unreadable, not a JSON object, or of no supported family.
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


def check_trainable(values: Mapping[str, Any], source: str = "") -> None:
    """Check that training would not need what only training does: dropout.

    Raises:
        ModelError: a dropout above 0; names the key and the remedy.
    """
    for key in DROPOUTS:
        if values.get(key):
            raise ModelError(
                f"{source or 'config.json'}: {key} = {values[key]!r}: lt trains without dropout; give a copy of the "
                f"file with {key} = 0 as model.init_config or model.config"
            )


def _from_key(value: Any, key: str) -> Any:
    if key in ("hidden_act", "hidden_activation"):
        names = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
        if value not in names:
            raise ModelError(f"{key} = {value!r} is not supported (only {', '.join(names)})")
        return names[value]
    if key == "query_pre_attn_scalar":
        return check_size(key, value) ** -0.5
    return 0 if value is None else value


def _to_key(config: ModelConfig, name: str, key: str) -> Any:
    value = getattr(config, name)
    if name == "activation":
        return ACTIVATIONS[value]
    if name == "head_dim":
        return config.head_width
    if name == "attention_scale":
        scale = value or config.head_width**-0.5
        return round(scale**-2) if key == "query_pre_attn_scalar" else scale
    if key == "n_shared_experts":
        return value // config.expert_size if value else 0
    return value or None if key in NULLABLE else value


def _read_layers(given: Mapping[str, Any], row: Family, n_layers: int) -> dict[str, Any]:
    """Return the kinds of layers and their window."""
    dense, step = given.get("mlp_only_layers") or (), given.get("decoder_sparse_step") or 1
    n_dense = given.get("first_k_dense_replace") and check_size("first_k_dense_replace", given["first_k_dense_replace"])
    experts = [
        "n_experts" in row.keys and i >= (n_dense or 0) and i not in dense and (i + 1) % step == 0
        for i in range(n_layers)
    ]
    if not row.sliding:
        return {"layers": tuple(LayerKind(experts=has_experts) for has_experts in experts)}
    window = given["sliding_window"] or 0
    if row.sliding in ("last", "nope") and not given["use_sliding_window"]:
        window = 0
    period = given.get("sliding_window_pattern") or given.get("_sliding_window_pattern") or row.period
    interval, ropes = given.get("no_rope_layer_interval") or row.period, [True] * n_layers
    if row.sliding == "nope":
        ropes = given.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(n_layers)]
    slides = {
        "all": lambda index: window > 0,
        "last": lambda index: window > 0 and index >= given["max_window_layers"],
        "pattern": lambda index: (index + 1) % period != 0,
        "nope": lambda index: window > 0 and not ropes[index],
    }[row.sliding]
    names = ("full_attention", "sliding_attention")
    types = given.get("layer_types") if row.sliding != "all" else None
    types = types or [names[slides(index)] for index in range(n_layers)]
    for key, values in (("layer_types", types), ("no_rope_layers", ropes)):
        if len(values) != n_layers or (key == "layer_types" and not set(values) <= set(names)):
            raise ModelError(f"{key} = {values!r}: must be {n_layers} of {' and '.join(names)}, one for each layer")
    kinds = tuple(
        LayerKind(sliding=kind == "sliding_attention", rope=bool(rope), experts=has_experts)
        for kind, rope, has_experts in zip(types, ropes, experts, strict=True)
    )
    return {"layers": kinds, "sliding_window": window}


def _write_layers(config: ModelConfig, row: Family) -> dict[str, Any]:
    kinds = [config.layer(index) for index in range(config.n_layers)]
    if row.dense_layers == "listed":
        step = _period([kind.experts for kind in kinds])
        dense = [] if step else [index for index, kind in enumerate(kinds) if not kind.experts]
        return {"decoder_sparse_step": step or 1, "mlp_only_layers": dense}
    if row.dense_layers == "first":
        return {"first_k_dense_replace": sum(not kind.experts for kind in kinds)}
    if not row.sliding:
        return {}
    written: dict[str, Any] = {"sliding_window": config.sliding_window or None}
    if row.sliding == "all":
        return written
    written["layer_types"] = ["sliding_attention" if kind.sliding else "full_attention" for kind in kinds]
    if row.sliding == "pattern":
        period = _period([not kind.sliding for kind in kinds])
        return written | ({"sliding_window_pattern": period} if period else {})
    written["use_sliding_window"] = config.sliding_window > 0
    if row.sliding == "last":
        written["max_window_layers"] = next((i for i, kind in enumerate(kinds) if kind.sliding), config.n_layers)
    else:
        written["no_rope_layers"] = [int(kind.rope) for kind in kinds]
        written["no_rope_layer_interval"] = _period([not kind.rope for kind in kinds]) or row.period
    return written


def _period(marks: list[bool]) -> int:
    """Return n if each n-th layer is marked and no other, else 0."""
    n = next((index + 1 for index, mark in enumerate(marks) if mark), len(marks) + 1)
    return n if all(mark == ((index + 1) % n == 0) for index, mark in enumerate(marks)) else 0


def _read_rope(values: Mapping[str, Any], row: Family, where: str, max_positions: object) -> dict[str, Any]:
    """Return the rotary fields from the old spelling, the new one, or both."""
    if "rope_scaling" in row.defaults and not values.keys() & {"rope_scaling", "rope_parameters"}:
        values = {**values, "rope_scaling": row.defaults["rope_scaling"]}
    given = {key: value for key, value in values.items() if value is not None}
    partial, defaults = row.partial_key or "partial_rotary_factor", {**COMMON_DEFAULTS, **row.defaults}
    names = {"rope_theta": row.theta_key, "partial_rotary_factor": partial}
    outer = {name: given[key] for name, key in names.items() if key in given}
    base = {"rope_theta": given["rope_local_base_freq"]} if "rope_local_base_freq" in given else {}

    def read(key: str, full: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
        theta, place = full.get("rope_theta", defaults["rope_theta"]), f"{where}: {key} of {values['model_type']}"
        found = {
            "rope_theta": theta,
            "rope_scaling": _read_scaling(full, place, max_positions),
            "rotary_fraction": full.get("partial_rotary_factor", defaults.get(partial, 1.0)),
        }
        if not row.partial_key and found["rotary_fraction"] != 1:
            fraction = found["rotary_fraction"]
            raise ModelError(f"{place}: partial_rotary_factor = {fraction!r} is not supported (only 1)")
        if row.has_two_ropes:
            found["sliding_rope_theta"] = local.get("rope_theta", defaults.get("rope_local_base_freq", theta))
            if _read_scaling(local, f"{place}: sliding_attention", max_positions):
                raise ModelError(f"{place}: sliding_attention is scaled, which is not supported")
        return found

    old = read("rope_scaling", {**outer, **_read_table(given, "rope_scaling", where)}, base)
    full = _read_table(given, "rope_parameters", where)
    if not full:
        return old
    local: Mapping[str, Any] = {}
    if "full_attention" in full or "sliding_attention" in full:
        if not row.has_two_ropes:
            raise ModelError(f"{where}: rope_parameters differ between layers, which this family has not")
        place = f"{where}: rope_parameters"
        full, local = (_read_table(full, f"{kind}_attention", place) for kind in ("full", "sliding"))
    new = read("rope_parameters", {**outer, **full}, {**base, **local})
    keys = {"rope_theta": row.theta_key, "rotary_fraction": partial, "sliding_rope_theta": "rope_local_base_freq"}
    said = {name: key for name, key in keys.items() if key in given}
    if "rope_scaling" in given or ("rope_scaling" in values and "rope_theta" in said):
        said["rope_scaling"] = "rope_scaling"
    for name, key in said.items():
        if old[name] != new[name]:
            raise ModelError(f"{where}: {key} ({old[name]}) and rope_parameters ({new[name]}) disagree; delete one")
    return new


def _write_rope(config: ModelConfig, row: Family) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling is not None:
        names = ("factor", *SCALING_FIELDS[config.rope_scaling.kind])
        fields = {SCALING_KEYS.get(name, name): getattr(config.rope_scaling, name) for name in names}
        scaling = {"rope_type": config.rope_scaling.kind, **{k: v for k, v in fields.items() if v or k == "truncate"}}
    new = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    old = {row.theta_key: config.rope_theta, "rope_scaling": scaling}
    if row.partial_key:
        new["partial_rotary_factor"] = old[row.partial_key] = config.rotary_fraction
    if not row.has_two_ropes:
        return {**old, "rope_parameters": new}
    local = config.sliding_rope_theta or config.rope_theta
    both = {"full_attention": new, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return {**old, "rope_local_base_freq": local, "rope_parameters": both}


def _read_scaling(rope: Mapping[str, Any], where: str, max_positions: object) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALING_FIELDS:
        raise ModelError(f"{where}: rope_type = {kind!r} is not supported (only default, {', '.join(SCALING_FIELDS)})")
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [name for name in required if rope.get(name) is None]:
        raise ModelError(f"{where}: {missing[0]} is missing")
    # transformers defaults to the model's max_position_embeddings.
    fields: dict[str, Any] = {"original_max_position_embeddings": max_positions} if kind != "linear" else {}
    for name in ("factor", *SCALING_FIELDS[kind]):
        if rope.get(SCALING_KEYS.get(name, name)) is not None:
            fields[name] = rope[SCALING_KEYS.get(name, name)]
    if kind == "yarn" and "magnitude" not in fields and rope.get("mscale") and rope.get("mscale_all_dim"):
        one, other = (1.0 + 0.1 * rope[key] * math.log(rope["factor"]) for key in ("mscale", "mscale_all_dim"))
        fields["magnitude"] = one / other if rope["factor"] > 1 else 1.0
    return RopeScaling(kind=kind, **fields)


def _read_table(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}: {key} = {value!r}: must be a table")
    return value
