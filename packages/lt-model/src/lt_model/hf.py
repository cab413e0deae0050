"""Conversion of `ModelConfig` to and from the config.json of `transformers`, by the rows of `families.FAMILIES`.

Up to 4.x, transformers keeps rotary settings in `rope_theta` and `rope_scaling` (or names of the family's own); from
5.0 on, in one `rope_parameters`. `config_to_hf` writes both spellings with equal values, so every version that has the
family reads the same model; `config_from_hf` reads either and rejects a file in which they disagree. Of a file only the
keys count that transformers reads in its family. Any setting that would change the output and that the decoder does not
have (other rotary rules, attention in both directions, ...) is an error, as is one that versions of transformers read
differently: a model is never loaded approximately.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import reprlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lt_model.config import LayerKind, ModelConfig, check_size
from lt_model.errors import ModelError
from lt_model.families import COMMON_DEFAULTS, COMMON_REQUIRED, DROPOUTS, EXPERT_COUNTS, FAMILIES, Family
from lt_model.rope_keys import FULL, SLIDING, read_rope, write_rope

MAX_CONFIG_BYTES = 2**24
DTYPES = ("float32", "float64", "float16", "bfloat16")
ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our name to transformers'."""
NULLABLE = ("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")
"""Keys whose null says "none"; of the others it says that the default holds."""
EXPERT_FIELDS = ("n_experts", "experts_per_token", "expert_size", "shared_expert_size")
"""Sizes of experts; those of a family with dense first layers stand in a file also where no layer has experts."""
DEQUANTIZED_BY: Mapping[str, str] = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""`quant_method` to the class of transformers that reads such weights in bfloat16."""


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
        **write_rope(config, row),
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
    where = source or "config.json"
    family = _find_family(values, where)
    row = FAMILIES[family]
    _check_required(values, row, where)
    read = {key: value for key, value in values.items() if key in row.read_keys}
    given = {**COMMON_DEFAULTS, **row.defaults, **{key: value for key, value in read.items() if value is not None}}
    given |= {key: None for key in NULLABLE if key in read and read[key] is None}
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
        found |= read_rope(read, row, family, found["max_position_embeddings"])
        found |= _read_layers(given, row, check_size("n_layers", found["n_layers"]))
        if row.dense_layers and not any(kind.experts for kind in found["layers"]):
            for name in (*EXPERT_FIELDS, "n_groups", "top_groups"):
                found.pop(name, None)
        elif "n_shared_experts" in row.keys.values():
            counted = {"n_shared_experts": "shared_expert_size", "moe_intermediate_size": "expert_size"}
            found["shared_expert_size"] = math.prod(check_size(key, found[name]) for key, name in counted.items())
        if not any(kind.sliding for kind in found["layers"]):
            found |= {"sliding_window": 0, "sliding_rope_theta": 0.0}
        config = ModelConfig(**{**row.fixed, **found}, family=family)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(where) else f"{where}: {text}") from error
    head_dim = read.get("head_dim")
    if head_dim is not None and "head_dim" not in row.keys.values() and head_dim != config.head_width:
        _refuse_key(where, family, "head_dim", head_dim, config.head_width)
    return config


def _find_family(values: Mapping[str, Any], where: str) -> str:
    """Return the family of a file."""
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type
    for family, row in FAMILIES.items():
        if model_type in row.other_types and values.get("architectures") == [row.architecture]:
            return family
    place = f"{where}: model_type = {model_type!r}"
    part = values.get("text_config")
    if isinstance(part, Mapping):
        inner = part.get("model_type")
        if inner in FAMILIES:
            known = f"{inner}, which lt has: give that table as a config.json of its own, for random weights"
        else:
            known = f"{inner}, unknown too; the families are {', '.join(FAMILIES)}"
        raise ModelError(f"{place}: several models in one, which is not read; its text_config is of type {known}")
    raise ModelError(f"{place}: unknown; the families are {', '.join(FAMILIES)}")


def _check_required(values: Mapping[str, Any], row: Family, where: str) -> None:
    """Refuse values of keys that have one supported value, and nulls that transformers takes for false."""
    partial = {} if row.partial_key else {"partial_rotary_factor": 1}
    required = {**COMMON_REQUIRED, **row.required, **partial}
    for name, wanted in required.items():
        found = values.get(name)
        if found is not None and found != wanted:
            _refuse_key(where, values["model_type"], name, found, wanted)
    for name, default in {**COMMON_DEFAULTS, **row.defaults, **required}.items():
        if default is True and values.get(name, default) is None:
            raise ModelError(f"{where}: {name} = null: transformers takes that for false; write true or false")


def _refuse_key(where: str, family: str, name: str, found: object, wanted: object) -> NoReturn:
    texts = [reprlib.repr(value) if isinstance(value, list | dict) else json.dumps(value) for value in (found, wanted)]
    raise ModelError(f"{where}: {name} = {texts[0]} of {family} is not supported (only {texts[1]})")


def check_not_quantized(values: Mapping[str, Any], source: str = "") -> None:
    """Check that a config.json is not that of quantized weights, which are not read.

    Raises:
        ModelError: it is; names the method and the remedy.
    """
    quantization = values.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    kind = f"quantized ({method})" if isinstance(method, str) else "quantized"
    remedy = "take the model's bf16 files"
    if isinstance(method, str) and method in DEQUANTIZED_BY:
        loader = f"quantization_config={DEQUANTIZED_BY[method]}(dequantize=True)"
        remedy += f", or write them with transformers: from_pretrained(..., {loader}), then save_pretrained"
    raise ModelError(
        f"{source or 'config.json'}: quantization_config: {kind} weights are not read; {remedy}; "
        "for random weights name the config.json in model.config"
    )


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
    if name in EXPERT_FIELDS and not config.has_experts and FAMILIES[config.family].dense_layers == "first":
        return 1  # no layer reads it, and 0 is refused
    if name == "attention_scale":
        scale = value or config.head_width**-0.5
        return round(scale**-2) if key == "query_pre_attn_scalar" else scale
    if key == "n_shared_experts":
        return value // config.expert_size if value else 0
    return value or None if key in NULLABLE else value


def _read_layers(given: Mapping[str, Any], row: Family, n_layers: int) -> dict[str, Any]:
    """Return the kinds of layers and their window."""
    experts = _experts_by_layer(given, row, n_layers)
    listed = given.get("layer_types") if row.sliding != "all" else None
    if not row.sliding:
        if listed and set(listed) != {FULL}:
            raise ModelError(f"layer_types = {listed!r} is not supported (only {FULL} in this family)")
        return {"layers": tuple(LayerKind(experts=has_experts) for has_experts in experts)}
    window = given["sliding_window"] or 0
    if row.sliding in ("last", "nope") and not given["use_sliding_window"]:
        if SLIDING in (listed or ()):
            raise ModelError(
                f"layer_types has {SLIDING} without use_sliding_window = true, which parts of transformers take for "
                "a window and others not; change one of them"
            )
        window = 0
    ropes = [True] * n_layers
    if row.sliding == "nope":
        interval = given.get("no_rope_layer_interval") or row.period
        by_rule = [(index + 1) % interval != 0 for index in range(n_layers)]
        ropes = given.get("no_rope_layers") or by_rule
    types = listed or [(FULL, SLIDING)[slides] for slides in _slides_by_rule(given, row, window, ropes)]
    for key, values in (("no_rope_layers", ropes), ("layer_types", types)):
        if len(values) != n_layers or (key == "layer_types" and not set(values) <= {FULL, SLIDING}):
            raise ModelError(f"{key} = {values!r}: must be {n_layers} of {FULL} and {SLIDING}, one for each layer")
    kinds = tuple(
        LayerKind(sliding=kind == SLIDING, rope=bool(rope), experts=has_experts)
        for kind, rope, has_experts in zip(types, ropes, experts, strict=True)
    )
    return {"layers": kinds, "sliding_window": window}


def _experts_by_layer(given: Mapping[str, Any], row: Family, n_layers: int) -> list[bool]:
    if "n_experts" not in row.keys:
        return [False] * n_layers
    dense = given.get("mlp_only_layers") or ()
    step = given.get("decoder_sparse_step") or 1
    first = given.get("first_k_dense_replace") or 0
    if first:
        check_size("first_k_dense_replace", first)
    return [index >= first and index not in dense and (index + 1) % step == 0 for index in range(n_layers)]


def _slides_by_rule(given: Mapping[str, Any], row: Family, window: int, ropes: list[Any]) -> list[bool]:
    """Return which layers slide where the file does not list them."""
    if row.sliding == "pattern":
        period = given.get(row.period_key) or row.period
        return [(index + 1) % period != 0 for index in range(len(ropes))]
    if row.sliding == "nope":
        return [window > 0 and not has_rope for has_rope in ropes]
    first = given["max_window_layers"] if row.sliding == "last" else 0
    return [window > 0 and index >= first for index in range(len(ropes))]


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
    if row.sliding == "pattern" and not config.sliding_window:
        written["sliding_window"] = config.max_position_embeddings  # transformers fails without, though no layer slides
    written["layer_types"] = ["sliding_attention" if kind.sliding else "full_attention" for kind in kinds]
    if row.sliding == "pattern":
        period = _period([not kind.sliding for kind in kinds])
        return written | ({row.period_key: period} if period and row.period_key else {})
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
