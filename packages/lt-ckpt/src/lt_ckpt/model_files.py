"""Files of a model besides its tensors: both configurations, tokenizer and chat template.

A conversion gives all of them to its output. Folders (hf, nxd, dcp) hold them beside the tensors, a torch file holds
them as records that torch does not read, a checkpoint of ours has the folders `hf` and `tokenizer`. Tokenizer files and
the generation configuration are copied byte for byte; of the configuration only `torch_dtype` follows the tensors.

Pure. Cost: parsing the files that differ.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lt_ckpt import json_objects
from lt_ckpt.dtypes import TORCH_NAMES
from lt_ckpt.hf.folder import CONFIG
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec
from lt_model import ModelConfig, config_from_hf, config_to_hf
from lt_model.families import FAMILIES

HF_CONFIG_DEFAULTS: Mapping[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "use_cache": True,
    "architectures": ["LlamaForCausalLM"],
}
"""What an absent key of config.json means to transformers, where `config_to_hf` does not say it; else null."""

_NO_MEANING = {"transformers_version", "_name_or_path", "_from_model_config", "torch_dtype", "dtype"}
"""Keys that say where a file came from, or follow from the tensors."""

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def config_for(source: Source, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the configuration of a source for tensors of these dtypes.

    Its `torch_dtype` is the dtype of the most bytes.
    """
    bytes_by_dtype: dict[str, int] = {}
    for spec in specs.values():
        bytes_by_dtype[spec.dtype] = bytes_by_dtype.get(spec.dtype, 0) + spec.n_bytes
    largest = max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype])
    config = {**source.config, "torch_dtype": TORCH_NAMES[largest]}
    if config["model_type"] not in FAMILIES:  # read by the code of its own repository, which is not here
        config["model_type"] = source.model.family
        config.pop("auto_map", None)
    config.pop("dtype", None)  # the newer spelling, which versions of transformers before 4.56 do not read
    return config


def model_files(source: Source, specs: Mapping[str, TensorSpec], *, folder: str = "") -> dict[str, bytes]:
    """Return the files to write beside the tensors, by path in the output.

    Args:
        source: What is converted.
        specs: The output's tensors.
        folder: Folder of the output for them.
    """
    found = {**source.aux_files, CONFIG: json_objects.dumps(config_for(source, specs), CONFIG, indent=2)}
    return {f"{folder}/{name}" if folder else name: data for name, data in found.items()}


def with_architecture(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a configuration with another architecture, and all else as it was.

    Args:
        config: Content of a config.json.
        model: The architecture; a run may have resized the vocabulary or changed the rotary settings.
    """
    if config_from_hf(config) == model:
        return dict(config)
    old, new = config_to_hf(config_from_hf(config)), config_to_hf(model)
    kept = {name: value for name, value in config.items() if name not in _ROPE}
    changed = {name: value for name, value in new.items() if value != old.get(name)}
    return {**kept, **changed, **{name: new[name] for name in _ROPE if name in new}}


def find_differences(a: Source, b: Source) -> Iterator[str]:
    """Yield the differences of two models besides their tensors, as text.

    JSON is compared by its values, other files by their bytes. Nothing is said about files where one of the models is
    in a format without a place for any and carries none.
    """
    for name, left, right in _compare_json(_config_values(a.config), _config_values(b.config)):
        yield f"configuration: {name} is {left}, in {b.path} {right}"
    if not carries_files(a) or not carries_files(b):
        return
    for file in sorted(a.aux_files.keys() | b.aux_files.keys()):
        if file not in a.aux_files or file not in b.aux_files:
            yield f"{file}: not in {(a if file not in a.aux_files else b).path}"
            continue
        left, right = a.aux_files[file], b.aux_files[file]
        if left == right:
            continue
        if not file.endswith(".json"):
            yield f"{file}: differs from that of {b.path}"
            continue
        values = [
            {name: value for name, value in json_objects.loads(data, file).items() if name not in _NO_MEANING}
            for data in (left, right)
        ]
        for name, one, other in _compare_json(*values):
            yield f"{file}: {name} is {one}, in {b.path} {other}"


def carries_files(source: Source) -> bool:
    """Return True unless the format has no place for a model's files and this model came without any."""
    return source.format in ("hf", "lt") or bool(source.aux_files)


def _config_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration, those of the architecture in one form."""
    architecture = config_to_hf(config_from_hf(config))
    values = {**HF_CONFIG_DEFAULTS, **config}
    values |= {name: value for name, value in architecture.items() if name not in HF_CONFIG_DEFAULTS}
    return {name: value for name, value in values.items() if name not in _NO_MEANING}


def _compare_json(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the keys whose values differ, and both as text.

    Null and an absent key are the same, as are 2 and [2] of token ids.
    """
    for name in sorted(a.keys() | b.keys()):
        left, right = (_shortest(name, values.get(name)) for values in (a, b))
        if left != right or type(left) is not type(right):
            yield name, _format_value(left), _format_value(right)


def _shortest(name: str, value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value[0] if name.endswith("_token_id") and isinstance(value, list) and len(value) == 1 else value


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
