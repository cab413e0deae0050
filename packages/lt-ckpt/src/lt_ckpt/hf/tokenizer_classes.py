"""Tokenizer files of a run, so that transformers' AutoTokenizer reads the ids that were trained on.

Ids are those of tokenizer.json. AutoTokenizer reads them if the class is `PreTrainedTokenizerFast`.
Other classes take the vocabulary alone from that file, and normalizer, pre-tokenizer and unnamed
special tokens from their own code. For some types of models (`model_types` of
tokenizer_classes.json) transformers chooses the class, whatever `tokenizer_class` says.

`classes` describes the code of a class, without the settings that are off. A class that is not
there is replaced.

Pure. Cost: parsing tokenizer.json.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lt_ckpt import json_objects

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_PLAIN_CLASS = "PreTrainedTokenizerFast"
_PLAIN_CLASSES = (_PLAIN_CLASS, "TokenizersBackend")
_NO_EFFECT_ON_IDS = ("trim_offsets", "vocab", "merges")


def adapt_tokenizer(files: Mapping[str, bytes], model_type: str) -> dict[str, bytes]:
    """Return a run's tokenizer files with a `tokenizer_class` that keeps the ids.

    If the type of model has no such class, the files keep theirs.

    Raises:
        CheckpointError: tokenizer.json or tokenizer_config.json is damaged.
    """
    if TOKENIZER not in files:
        return dict(files)
    config = _read(files, TOKENIZER_CONFIG)
    tokenizer_class = _class_name(config, model_type)
    changed = dict(config)
    if _keeps_ids(files, tokenizer_class):
        named = {**config, **special_token_names(files)}
        for key in _table()["classes"].get(tokenizer_class, {}).get("special_tokens", ()):
            if key not in named:
                changed[key] = None  # else the class adds its own token, with a new id
    elif model_type not in _table()["model_types"]:
        changed["tokenizer_class"] = _PLAIN_CLASS
    if changed == config:
        return dict(files)
    return {**files, TOKENIZER_CONFIG: json_objects.dumps(changed, TOKENIZER_CONFIG, indent=2)}


def describe_other_ids(files: Mapping[str, bytes], model_type: str) -> str:
    """Return a sentence if AutoTokenizer gives other ids for this type of model, or "".

    It concerns types for which `tokenizer_class` has no effect.
    """
    tokenizer_class = _table()["model_types"].get(model_type)
    if tokenizer_class is None or TOKENIZER not in files or _keeps_ids(files, tokenizer_class):
        return ""
    return (
        f"transformers' AutoTokenizer gives other ids than those of training: for type {model_type} its class "
        f"{tokenizer_class} divides text by its own rule; load this tokenizer with "
        f"{_PLAIN_CLASS}.from_pretrained"
    )


def special_token_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return `bos_token` and the like, as AutoTokenizer reads them.

    special_tokens_map.json, the older file, overrides a configuration without `added_tokens_decoder`.
    """
    values = _read(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in values:
        values |= _read(files, SPECIAL_TOKENS_MAP)
    names: dict[str, str] = {}
    for key, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str) and text:
            names[key] = text
    return names


def token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return token → id; a token that only `added_tokens_decoder` has gets the next id.

    Raises:
        CheckpointError: A file is damaged.
    """
    with json_objects.translate_format_errors(TOKENIZER):
        tokenizer = _read(files, TOKENIZER)
        ids = _vocabulary(tokenizer)
        next_id = len(ids)
        for token in tokenizer.get("added_tokens") or ():
            ids[token["content"]] = token["id"]
            next_id = max(next_id, token["id"] + 1)
        decoder = _read(files, TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
        for number in sorted(decoder, key=int):
            if decoder[number]["content"] not in ids:
                ids[decoder[number]["content"]] = next_id
                next_id += 1
        return ids


def _keeps_ids(files: Mapping[str, bytes], tokenizer_class: str) -> bool:
    """Return whether a class gives a text the ids of tokenizer.json."""
    if tokenizer_class in _PLAIN_CLASSES:
        return True
    known = _table()["classes"].get(tokenizer_class)
    if known is None or _read(files, TOKENIZER_CONFIG).get("add_prefix_space"):
        return False
    with json_objects.translate_format_errors(TOKENIZER):
        tokenizer = _read(files, TOKENIZER)
        parts = [_settings(tokenizer.get(name)) for name in ("normalizer", "pre_tokenizer", "model")]
        expected = [known.get("normalizer"), known["pre_tokenizer"], {"type": "BPE"}]
        return parts == expected and _reads_added_tokens(files, tokenizer)


def _reads_added_tokens(files: Mapping[str, bytes], tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a class with its own code has the added tokens of tokenizer.json.

    It reads `added_tokens_decoder` in their place.
    """
    decoder = _read(files, TOKENIZER_CONFIG).get("added_tokens_decoder")
    if decoder is None:
        return True
    read = [{"id": int(number), **fields} for number, fields in decoder.items()]
    return all(token in read for token in tokenizer.get("added_tokens") or ())


def _settings(value: Any) -> Any:
    """Return settings of a part of tokenizer.json as the table has them: on, and of effect on ids."""
    if isinstance(value, list):
        return [_settings(item) for item in value]
    if not isinstance(value, dict):
        return value or None
    if value.get("type") == "ByteLevel":
        value = {"use_regex": True, **value}
    return {key: _settings(item) for key, item in value.items() if item and key not in _NO_EFFECT_ON_IDS}


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of Unigram: tokens with their scores, in the order of ids
        return {token: number for number, (token, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _class_name(config: Mapping[str, Any], model_type: str) -> str:
    """Return the class that AutoTokenizer takes, without the ending of older versions."""
    name = _table()["model_types"].get(model_type) or config.get("tokenizer_class")
    if not isinstance(name, str) or name == _PLAIN_CLASS:
        return name or ""
    return name.removesuffix("Fast")


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return json_objects.loads(files[name], name) if name in files else {}


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("tokenizer_classes.json").read_bytes())
