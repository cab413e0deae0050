"""Special and added tokens of a tokenizer, as transformers' AutoTokenizer reads them.

They are in the files beside tokenizer.json. `tokenizer_config.json` names the special tokens. Older
versions of transformers wrote it without the key `added_tokens_decoder`; there,
`special_tokens_map.json` overrides it. With that key, the map is not read. A token that
tokenizer.json lacks gets the next id: first those of `added_tokens_decoder` by their number, then
named special tokens, then additional ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.tokenizing.files import CONFIG_FILE

SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class NamedToken:
    """A token's string and its flags, as those of `tokenizers.AddedToken`."""

    content: str
    flags: Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Tokens that the files name.

    Attributes:
        names: `bos_token` and the like -> the token.
        additional: special tokens without a name.
        decoder: tokens of `added_tokens_decoder`, by their number there.
    """

    names: Mapping[str, NamedToken]
    additional: tuple[NamedToken, ...]
    decoder: tuple[NamedToken, ...]

    def string(self, name: str) -> str | None:
        """Return the string of `bos_token` or another name; None if there is no such token."""
        return self.names[name].content if name in self.names else None


def read_special_tokens(files: Mapping[str, bytes], name: str) -> SpecialTokens:
    """Read the special and added tokens that a tokenizer's files name.

    Raises:
        DataError: a file is not a JSON object, or a token in it has another form.
    """
    config = _load(files, CONFIG_FILE, name)
    values = dict(config)
    if not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.get("additional_special_tokens")
    if "added_tokens_decoder" not in config:
        values |= _load(files, SPECIAL_TOKENS_MAP_FILE, name)
    try:
        return SpecialTokens(
            names=dict(_iter_names(values)),
            additional=tuple(_iter_additional(values)),
            decoder=tuple(_iter_decoder(config.get("added_tokens_decoder") or {})),
        )
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        problem = f"a special or added token has another form than transformers writes ({exc!r})"
        raise DataError(f"tokenizer {name}: {CONFIG_FILE}: {problem}; save the tokenizer again") from exc


def _load(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    if file not in files:
        return {}
    return strict_json.load_object(files[file], f"tokenizer {name}: {file}", "save the tokenizer again")


def _iter_names(values: Mapping[str, Any]) -> Iterator[tuple[str, NamedToken]]:
    """Yield the named tokens in the order in which transformers gives them ids."""
    others = [key for key in values if key.endswith("_token") and key not in _STANDARD]
    for key in (*_STANDARD, *others):
        value = values.get(key)
        if value and isinstance(value, str | dict):
            yield key, _to_token(value)
    model_specific = values.get("extra_special_tokens")
    if isinstance(model_specific, dict):
        for key, value in model_specific.items():
            yield key, _to_token(value)


def _iter_additional(values: Mapping[str, Any]) -> Iterator[NamedToken]:
    tokens = values.get("extra_special_tokens")
    if isinstance(tokens, list):
        for token in tokens:
            yield _to_token(token)


def _iter_decoder(decoder: Mapping[str, Mapping[str, Any]]) -> Iterator[NamedToken]:
    for number in sorted(decoder, key=int):
        fields = decoder[number]
        flags = {flag: bool(fields[flag]) for flag in (*_FLAGS, "special") if flag in fields}
        yield NamedToken(fields["content"], flags)


def _to_token(value: Any) -> NamedToken:
    """Return a special token that a file gives as its string, or as an object with flags."""
    if isinstance(value, str):
        return NamedToken(value, {"special": True})
    flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
    return NamedToken(value["content"], {**flags, "special": True})
